"""Whether all ranks build the same model and the same loop around it: what differs is told before any of it is moved."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from ..config.parse import Config
from ..distributed.agreement import first_other
from ..distributed.topology import Topology
from ..distributed.transport.world import gather_values
from ..errors import ConfigError, ModelError, TopologyError
from ..log import listed
from ..optim.requested_optimizer import RawOptimizer
from ..pipeline.pipelined import Pipelined
from ..plan.parameter_kinds import sums_of_scales
from ..zero.init import partitioned_as
from .checked_arguments import samples_of
from .parallelize import is_part

_DERIVED = "(derived)"  # as Config.describe() says of values that follow from others
_DEGREES = ("pipe", "replicate", "shard", "tensor", "context", "expert")


@dataclass(frozen=True)
class Fingerprint:
    """What a rank has built. ``first``: the first rank that should have the same model; ``bounds``: of pipeline stages.

    ``degrees``: of the topology that the script gives, in words; "" without one.
    """

    config: str
    model: str
    first: int
    bounds: tuple[int, ...]
    degrees: str

    @classmethod
    def of(cls, model: nn.Module, config: Config, topology: Topology | None, raw: RawOptimizer) -> Fingerprint:
        """Return that of this rank."""
        first = 0
        if is_part(model):
            degrees = {"pipe": config.pipeline.stages, "tensor": config.tensor_parallel.size}
            planned = topology or Topology.plan(dist.get_world_size(), dist.get_rank(), **degrees)
            first = planned.ranks_along("data")[0]
        bounds = model.partitions() if isinstance(model, Pipelined) else ()
        described = _described(model, raw) if dist.get_world_size() > 1 else ()  # which one rank compares with nobody
        digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
        given = "" if topology is None else ", ".join(f"{name}={getattr(topology, name)}" for name in _DEGREES)
        return cls(config.fingerprint(), digest, first, tuple(bounds), given)


def compare_ranks(found: list[Fingerprint], model: nn.Module, config: Config, raw: RawOptimizer) -> None:
    """Raise, on all ranks alike, if a rank has another configuration than rank 0, or another model than it should.

    ``found``: what ranks have built. A whole model must be the same on all ranks, and a part the same on all ranks that
    have this part. The parameter groups must agree as well, and so must the order in which ``Init`` made the parameters,
    because values were sent in this order.
    """
    for rank, theirs in enumerate(found):
        if theirs.config != found[0].config:
            values = config.describe().partition("\nnotes:\n")[0]  # notes follow from the values
            _explain_difference(values.splitlines()[1:], rank, 0, "configuration")
        if theirs.degrees and found[0].degrees and theirs.degrees != found[0].degrees:
            raise TopologyError(
                f"initialize() got another topology on rank {rank} than on rank 0: {theirs.degrees}, instead of "
                f"{found[0].degrees}. Remedy: pass the same topology on all ranks."
            )
        if theirs.bounds != found[0].bounds:
            raise ModelError(_other_cut(rank, list(theirs.bounds), list(found[0].bounds)))
        if theirs.model != found[theirs.first].model:
            _explain_difference([*_described(model, raw)], rank, theirs.first, "model")


Extras = tuple[bool, int | None]
"""Whether a rank has a schedule, and the samples of its dataset; None if it has none, or does not know."""


def extras(lr_scheduler: Any, training_data: Any) -> Extras:
    """Return those of this rank."""
    return lr_scheduler is not None, samples_of(training_data)


def compare_extras(found: list[Extras]) -> None:
    """Raise ModelError, on all ranks alike, if only some have a schedule, or if their datasets have different lengths.

    A rank without data is left out: only the first and the last stage of a pipeline read any.
    """
    rank = first_other([has_schedule for has_schedule, _ in found])
    if rank is not None:
        has, lacks = (0, rank) if found[0][0] else (rank, 0)
        raise ModelError(
            f"rank {has} has an lr_scheduler, and rank {lacks} none: it would go on with other learning rates. Remedy: "
            "pass lr_scheduler= on all ranks, or on none."
        )
    counts = [(rank, samples) for rank, (_, samples) in enumerate(found) if samples is not None]
    other = first_other([samples for _, samples in counts])
    if other is not None:
        (first, ours), (rank, theirs) = counts[0], counts[other]
        raise ModelError(
            f"training_data has {theirs} samples on rank {rank}, and {ours} on rank {first}: each rank takes its part of "
            "one dataset, and some would end before others. Remedy: pass the same whole dataset on all ranks, or iterate "
            "over data of its own in the loop, without passing it."
        )


def _other_cut(rank: int, theirs: list[int], ours: list[int]) -> str:
    """Say how rank ``rank`` cuts a pipeline, at the bounds ``theirs``, and what to do. ``ours``: those of rank 0."""
    if theirs[-1:] != ours[-1:]:
        count, other = ([*bounds[-1:], 0][0] for bounds in (theirs, ours))
        return f"rank {rank} builds a pipeline of {count} layers, and rank 0 one of {other}. Remedy: build the same model."
    return (
        f"rank {rank} cuts the pipeline's layers at {theirs}, and rank 0 at {ours}. Remedy: pass the same "
        "partition_method on all ranks; measured times differ, so broadcast those of rank 0."
    )


def _described(model: nn.Module, raw: RawOptimizer) -> Iterator[str]:
    group_of = raw.group_of
    for name, param in model.named_parameters():
        group = f", group {group_of[id(param)]} of the optimizer" if id(param) in group_of else ""
        number = partitioned_as(param)
        made = f", number {number} in zerorun.zero.Init" if number is not None else ""
        yield f"{name} {tuple(param.shape)} {param.dtype} {param.requires_grad}{group}{made}"
    for name, buffer in sorted(model.named_buffers(remove_duplicate=False)):
        yield f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"
    yield from _settings(raw)
    yield from sums_of_scales(model)  # scales are not overwritten, while packed weights become those of rank 0


def _settings(raw: RawOptimizer) -> Iterator[str]:
    """Of the optimizer: its class, and what its groups say in plain values. Ranks with others would get other weights."""
    name = raw.name if raw.optimizer is None else type(raw.optimizer).__name__
    for number, group in enumerate(raw.groups):
        plain = {key: value for key, value in sorted(group.items()) if isinstance(value, (bool, int, float, str, tuple))}
        yield f"group {number} of {name}: {plain}"
    if raw.groups:
        yield f"trial of {name}: it updates {'whole parameters' if raw.whole else 'any elements'}"


def _explain_difference(lines: list[str], rank: int, first: int, what: str) -> None:
    found = gather_values(lines)
    told = difference(found[first], found[rank], f"rank {first}")
    remedy = f"build the same {what} on every rank"
    if what == "model":
        remedy += ", in the same order (that of a set differs between ranks), and give its optimizer the same groups"
    text = f"rank {rank} has another {what} than rank {first}: {told}. Remedy: {remedy}."
    raise ConfigError.saying(text) if what == "configuration" else ModelError(text)


def difference(ours: list[str], theirs: list[str], whose: str) -> str:
    """The first differences of two descriptions in words, a line for each key, parameter or group of ``ours``, ``whose``.

    What was given comes before what was derived from it. Where all are the same, their order is not.
    """
    here, there = ({_subject(line): line.strip() for line in lines} for lines in (ours, theirs))
    told = [f"{there[key]!r} instead of {here[key]!r}" for key in there if key in here and there[key] != here[key]]
    told += [f"{line!r}, which {whose} has not, or as the default" for key, line in there.items() if key not in here]
    told += [f"without {line!r}, or with the default" for key, line in here.items() if key not in there]
    told.sort(key=lambda text: _DERIVED in text)
    if told:
        return listed(told, 2)
    pairs = zip(ours, theirs, strict=False)
    return next((f"{b.strip()!r} instead of {a.strip()!r}" for a, b in pairs if a != b), "in another order")


def _subject(line: str) -> str:
    """What a line of a description is about: ``key = value``, ``parameter (shape) ...``, ``group 0 of SGD: ...``."""
    return re.split(r" = | \(| of ", line.strip(), maxsplit=1)[0]
