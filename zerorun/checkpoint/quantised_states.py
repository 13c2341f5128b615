"""States in blocks (ops/state_format.py), as checkpoints store them: codes under the state's name, and scales beside them.

The codes of a whole parameter have its shape, and its blocks are counted from its first element on. If the last dimension
of a parameter consists of whole blocks, its scales have its shape with that dimension in blocks; otherwise they are flat.

[Note: blocks and tensor-parallel ranks]
A tensor-parallel rank has blocks of its own part. They are blocks of the whole parameter, too, if the rows of the whole
consist of whole blocks, and so do those of the part: then the parts of all ranks are stored together as one. Otherwise the
parts are stored as fp32 values, and whoever loads them makes blocks of its own.
"""

from __future__ import annotations

from math import prod

import torch

from ..distributed.tensor_shard import TensorShard
from ..ops.state_format import BLOCK, NEVER_NEGATIVE, SCALE, codes_map
from .cuts import places
from .read import Read, Reader
from .write_plan import OPTIMIZER

CODES = "U8"  # the dtype of codes in files


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a whole parameter of ``shape``."""
    if shape and shape[-1] % BLOCK == 0:
        return (*shape[:-1], shape[-1] // BLOCK)
    return (-(-prod(shape) // BLOCK),)


def scale_shard(shard: TensorShard) -> TensorShard | None:
    """Return the part of a parameter's scales for the part ``shard`` of it; None if it does not consist of its blocks."""
    last = len(shard.shape) - 1
    if shard.shape[last] % BLOCK:
        return None
    if shard.dim < last:
        return TensorShard(scale_shape(shard.shape), shard.dim, shard.ranges)
    if any(bound % BLOCK for pair in shard.ranges for bound in pair):
        return None
    ranges = tuple((begin // BLOCK, end // BLOCK) for begin, end in shard.ranges)
    return TensorShard(scale_shape(shard.shape), shard.dim, ranges)


def keeps_blocks(shard: TensorShard | None) -> bool:
    """True if the blocks of a rank's part are blocks of the whole: see [Note: blocks and tensor-parallel ranks]."""
    return shard is None or scale_shard(shard) is not None


def is_scale_set(reader: Reader, kind: str, name: str) -> bool:
    """True if the set ``kind`` has scales for the codes of tensor ``name`` in another set."""
    return kind.startswith(OPTIMIZER) and kind.endswith(SCALE) and name in reader.places(kind.removesuffix(SCALE))


def is_coded(reader: Reader, kind: str, name: str) -> bool:
    """True if the state ``kind`` of parameter ``name`` is stored as codes."""
    return kind.startswith(OPTIMIZER) and name in reader.places(kind + SCALE) and name in reader.places(kind)


def scales(reader: Reader, kind: str, name: str) -> Read:
    """Return a request for all scales of the state ``kind`` of parameter ``name``."""
    return Read(kind + SCALE, name, 0, torch.empty(reader.tensor(kind + SCALE, name).numel))


def decoded(kind: str, codes: torch.Tensor, scale: torch.Tensor, start: int, shard: TensorShard | None) -> torch.Tensor:
    """Return the values of ``codes`` [n], the elements from ``start`` on of the flattened parameter or its part ``shard``.

    ``scale``: all scales of the parameter, flat.
    """
    values = codes_map(kind.removeprefix(OPTIMIZER) not in NEVER_NEGATIVE)[codes.int()]
    return values.mul_(scale[places(shard, start, codes.numel(), BLOCK)])
