"""Labels that are drawn from what a model predicts, for the curvature of Sophia-G."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from ..distributed.tensor_shard import even_bounds
from ..errors import ModelError
from ..zero.sharded_model import newest_topology
from .axis import Axis, make_axis

_CHUNK = 1 << 22  # logits that are looked at together: 32 MiB of their sums, in fp64
_APART = 1e-2  # the largest relative difference between logits that are the same: they may be rounded to bf16


@torch.no_grad()
def sampled_labels(logits: torch.Tensor, vocabulary: int | None = None) -> torch.Tensor:
    """Draw a class for each row of ``logits`` [..., classes] from softmax(logits): int64 [...], without a gradient.

    ``vocabulary``: the number of all classes, for logits that are divided over tensor-parallel ranks by their last
    dimension. All ranks of the tensor axis must make this call, and get the same labels, as of whole logits. Numbers come
    from torch's default generator of the CPU (``torch.manual_seed``); data-parallel ranks with the same seed draw different
    ones. Raises ModelError for logits of another size than this rank's part.
    """
    topology = newest_topology()
    axis = make_axis(topology, logits.device) if topology is not None and topology.tensor > 1 else None
    rows = logits.reshape(-1, logits.shape[-1])
    low = _first_class(rows, vocabulary, axis)
    chosen = _uniform(len(rows), logits.device, axis)
    over = axis if vocabulary is not None else None
    size = max(_CHUNK // max(vocabulary or logits.shape[-1], 1), 1)
    parts = zip(rows.split(size), chosen.split(size), strict=True)
    return torch.cat([_pick(part, numbers, low, over) for part, numbers in parts]).view(logits.shape[:-1])


def _first_class(rows: torch.Tensor, vocabulary: int | None, axis: Axis | None) -> int:
    """The first class of which this rank has logits. Raises ModelError if it has another number than it should."""
    bounds = [0, rows.shape[1] if vocabulary is None else vocabulary]
    if axis is not None and vocabulary is not None:
        bounds = even_bounds(vocabulary, axis.size)[axis.rank :][:2]
    elif axis is not None:
        tops = _gathered(rows.float().amax(-1), axis)
        if ((tops - tops[0]).abs() > _APART * tops[0].abs()).any(0).double().mean() > 0.5:
            raise ModelError(
                "sampled_labels() was given other logits on each tensor rank, and no vocabulary. Remedy: pass the number "
                "of all classes as vocabulary= if these are parts of the logits; if not, ranks saw different data."
            )
    if rows.shape[1] != bounds[1] - bounds[0]:
        raise ModelError(
            f"logits have {rows.shape[1]} classes, but this rank has {bounds[1] - bounds[0]} of {vocabulary}. Remedy: pass "
            "the number of all classes as vocabulary= for logits that tensor-parallel ranks divide, and nothing for others."
        )
    return bounds[0]


def _uniform(count: int, device: torch.device, axis: Axis | None) -> torch.Tensor:
    """[count] fp64 in [0, 1): the same on all tensor ranks, others on each data-parallel rank, and on any device."""
    seed = torch.randint(2**62, (1,)).to(device)
    if axis is not None:
        axis.broadcast(seed, "tensor: seed of labels")
    topology = newest_topology()
    if topology is not None:
        place = topology.data_parallel_rank
    else:
        place = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(random.Random(f"{int(seed)} {place}").getrandbits(63))
    return torch.rand(count, generator=generator, dtype=torch.float64).to(device)


def _pick(rows: torch.Tensor, numbers: torch.Tensor, low: int, axis: Axis | None) -> torch.Tensor:
    """Of each row the first class up to which the probabilities add up to more than its number.

    ``low``: the first class that is here. With an ``axis``, ranks tell each other 3 numbers for each row.
    """
    wide = rows.float()
    top = wide.amax(-1) if wide.shape[1] else wide.new_full((len(wide),), -torch.inf)
    if axis is not None:
        top = _gathered(top, axis).amax(0)
    sums = (wide - top.unsqueeze(1)).exp_().cumsum(-1, dtype=torch.float64)
    own = sums[:, -1] if sums.shape[1] else torch.zeros_like(numbers)
    each = own.unsqueeze(0) if axis is None else _gathered(own, axis)
    ends = each.cumsum(0)
    target = numbers * ends[-1]
    owner = (ends <= target).sum(0).clamp_(max=len(each) - 1)
    begins = (ends - each).gather(0, owner.unsqueeze(0))
    column = (sums <= (target - begins.squeeze(0)).unsqueeze(1)).sum(-1).clamp_(max=max(rows.shape[1] - 1, 0))
    if axis is None:
        return column
    return _gathered(low + column, axis).gather(0, owner.unsqueeze(0)).squeeze(0)


def _gathered(values: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[n] of each tensor rank -> [ranks, n]."""
    bounds = list(range(axis.size + 1))
    return axis.all_gather(values.unsqueeze(0), 0, bounds, "tensor: sampled labels")
