"""Frozen base: the frozen weights that a checkpoint leaves out, of which it has checksums, against those of a model.

Checksums are of the dtype in which the weights were when it was saved. Weights that are wider now are rounded to it, which
gives the same bits as rounding the same base model then did. Weights that are narrower now can only be told to be the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ..errors import CheckpointError
from ..log import is_rank_zero, listed, logger
from .gather import PeerReader
from .inventory import Inventory, TensorPart, frozen_parts
from .ranks import Ranks
from .read import Reader
from .save import frozen_sums
from .tensorfile import dtype_code, dtype_of, memory_of

_AT_ONCE = 1 << 28  # elements that are cast at a time

Kept = Mapping[str, Mapping[str, Any]]  # name -> dtype and CRC-32, as the manifest has them
Live = dict[str, tuple[torch.dtype, str]]  # name -> its dtype here, its CRC-32 in the dtype of the checkpoint


def sums_of_values(kept: Kept, values: Mapping[str, torch.Tensor]) -> Live:
    """The sums of whole tensors that this process has."""
    live = {}
    for name in kept.keys() & values.keys():
        value = values[name].detach().cpu().contiguous()
        cast = value.to(_cast_to(value.dtype, kept[name]))  # it must outlive the view of its memory
        live[name] = value.dtype, f"{zlib.crc32(memory_of(cast)):08x}"
    return live


def sums_of_parts(
    kept: Kept, inventory: Inventory, shapes: Mapping[str, tuple[int, ...]], ranks: Ranks, read_peer: PeerReader | None
) -> Live:
    """The sums of tensors of which ranks have parts. ``shapes``: those of the whole model. Collective."""
    order, live = list(inventory.describe()), {}
    for names in _batches([name for name in kept if name in shapes], shapes):
        parts = list(_parts(inventory, names))
        dtypes = {part.name: part.dtype for part in parts}
        cast = [replace(part, tensor=part.tensor.to(_cast_to(part.dtype, kept[part.name]))) for part in parts]
        sums = frozen_sums(cast, order, ranks, read_peer)
        for found in ranks.gather(dtypes):
            live.update({name: (dtype, sums[name]["crc32"]) for name, dtype in found.items()})
    return live


def _parts(inventory: Inventory, names: Iterable[str]) -> Iterator[TensorPart]:
    apart = {part.name: part for part in inventory.parts_apart()}
    for name in names:
        if name in inventory.homes:
            yield from frozen_parts(name, inventory.homes[name])
        elif name in apart:
            yield apart[name]


def _batches(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    batch: list[str] = []
    for name in names:
        if batch and sum(prod(shapes[other]) for other in (*batch, name)) > _AT_ONCE:
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch


def _cast_to(dtype: torch.dtype, kept: Mapping[str, Any]) -> torch.dtype:
    stored = dtype_of(kept["dtype"])
    return stored if stored.is_floating_point and dtype.is_floating_point else dtype


def _tells_apart(dtype: torch.dtype, kept: Mapping[str, Any]) -> bool:
    """True if weights in ``dtype`` have all that decides their values in the dtype of the checkpoint."""
    stored = dtype_of(kept["dtype"])
    if not (stored.is_floating_point and dtype.is_floating_point):
        return stored == dtype
    return torch.promote_types(dtype, stored) == dtype


def refuse_other_base(reader: Reader, kept: Kept, live: Live, *, strict: bool) -> None:
    """Raise CheckpointError if weights differ from those that the checkpoint was trained with. If not strict, warn only."""
    differ = [name for name, (_, crc32) in live.items() if crc32 != kept[name]["crc32"]]
    wrong = [repr(name) for name in differ if _tells_apart(live[name][0], kept[name])]
    unknown = [f"{n!r} ({dtype_code(live[n][0], n)}, {kept[n]['dtype']} there)" for n in differ if repr(n) not in wrong]
    what = f"{reader.path} was trained with other frozen weights; they differ in {listed(wrong)}."
    if wrong and strict:
        raise CheckpointError(
            f"{what} Remedy: load the base model's weights that it was trained with before, or pass strict=False."
        )
    if wrong and is_rank_zero():
        logger.warning("%s They stay as they are.", what)
    if unknown and is_rank_zero():
        what = "%s leaves frozen weights out, and their dtypes do not let it be told whether those here are the same: %s."
        logger.warning(what, reader.path, listed(unknown))
