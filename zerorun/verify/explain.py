"""Explanations: a difference in words, with the axis that acts at its point and what it does there."""

from __future__ import annotations

from typing import TypeVar

from ..config.parse import Config
from ..distributed.topology import Topology
from ..distributed.transport.world import gather_values
from .records import Kind, Mismatch

Count = TypeVar("Count")
_SHARED = {
    0: "every rank has all weights and updates them alike",
    1: "each rank updates its shard of the weights, and all-gathers the others'",
    2: "each rank updates its shard of the weights, and all-gathers the others'",
    3: "each rank has a shard of the weights, and all-gathers a unit before it runs",
}
_SUMMED = {
    0: "sums the gradients of its ranks, on all of them (all-reduce)",
    1: "sums the gradients of its ranks, for each its shard (reduce-scatter)",
    2: "sums the gradients of its ranks after each backward, for each its shard (reduce-scatter)",
    3: "sums the gradients of its ranks after each backward, for each its shard (reduce-scatter)",
}


def axis_at(kind: Kind, config: Config, topology: Topology, *, divided: bool) -> str:
    """Say which axis acts at a point and what it does. ``divided``: tensor ranks divide the module or the parameter."""
    stage, data = config.zero_optimization.stage, f"data ({topology.data_parallel_size} ranks)"
    if kind is Kind.INPUT:
        return f"{data}: deals the micro-batches to its ranks"
    if kind is Kind.DROPOUT or (divided and kind in (Kind.OUTPUT, Kind.GRADIENT)):
        what = "each rank draws its own numbers inside divided layers or sequences, and the same outside"
        if kind is not Kind.DROPOUT:
            what = "each rank has a part of the layer; outputs, or gradients of inputs, are summed over ranks"
        over = [f"{axis} ({topology.size(axis)} ranks)" for axis in ("tensor", "context") if topology.size(axis) > 1]
        return f"{' and '.join(over) or 'expert'}: {what}"
    if kind is Kind.LOSS and topology.context > 1:
        return f"context ({topology.context} ranks): each has some rows of a sequence, and their losses are summed"
    if kind is Kind.OUTPUT and topology.pipe > 1:
        return f"pipe ({topology.pipe} stages): a stage gets its input from the stage before"
    if kind is Kind.GRADIENT and topology.pipe > 1:
        return f"pipe ({topology.pipe} stages): a stage gets the gradient of its output from the stage after"
    if kind is Kind.WEIGHT:
        return f"shard ({topology.shard} ranks, stage {stage}): {_SHARED[stage]}"
    if kind is Kind.REDUCED:
        copies = f"; then replicate ({topology.replicate} ranks): sums these" if topology.replicate > 1 else ""
        more = "; tensor and pipe: sum what their ranks share" if topology.tensor * topology.pipe > 1 else ""
        return f"{data}: {_SUMMED[stage]}{copies}{more}"
    if kind is Kind.NORM:
        return f"{data}, and all others: the ranks' sums of squares are added; the mean is over {data}"
    if kind is Kind.UPDATED:
        place = config.zero_optimization.offload_optimizer.device
        where = (
            "" if place == "none" else f", in {'host memory' if place == 'cpu' else 'host memory, with states on disks'}"
        )
        return f"shard ({topology.shard} ranks, stage {stage}): each rank updates what it owns{where}, clipped by the norm"
    return "none: this rank computes it alone, from values that were equal" + (
        ""
        if config.activation_checkpointing.policy == "none" or kind is not Kind.GRADIENT
        else ", with activations that are computed again"
    )


def described(difference: Mismatch, axis: str, peer: str, *, topology: Topology, steps: int, more: int) -> str:
    """Return the report of the first difference. ``peer``: which run has the other value; ``more``: how many follow."""
    point, place = difference.point, topology.coordinate(difference.rank)
    ranks = {name: number for name, number in place._asdict().items() if getattr(topology, name, 1) > 1}
    where = f" ({', '.join(f'{name} {number}' for name, number in ranks.items())})" if ranks else ""
    at = "the initial values" if point.step < 0 else f"step {point.step + 1} of {steps}"
    at += f", micro-batch {point.micro + 1}" if point.micro >= 0 else ""
    lines = [
        f"zerorun verify: NOT EQUAL, first at {at}",
        f"  point    {point.kind.value}: {point.name}",
        f"  rank     {difference.rank}{where}",
    ]
    if point.kind is not Kind.DROPOUT:
        allowed = f"allowed are {difference.allowed:.1e}" if difference.allowed else "every bit must be equal"
        lines += [
            f"  slice    elements {difference.first} to {difference.last}; worst at {difference.worst}",
            f"  values   {difference.found:.9g} here, {difference.wanted:.9g} {peer}",
            f"  apart    {difference.apart:.1e}, and {allowed}",
        ]
    else:
        same = "the same" if difference.found else "other"
        lines.append(f"  values   ranks have {same} values there, and did not draw {same} numbers for them")
    lines.append(f"  axis     {axis}")
    if more:
        lines.append(f"  after it {more} more points of {'this rank' if topology.world_size > 1 else 'the run'} differ")
    return "\n".join(lines)


def first_of_ranks(mine: Mismatch | None, text: str, count: Count) -> tuple[str, list[Count]]:
    """Return (the report of the rank that differs first, empty if none does; every rank's ``count``). Collective.

    ``mine``: the first difference of this rank, which ``text`` describes.
    """
    told = gather_values((mine.when if mine is not None else (), text, count))
    first = min((one for one in told if one[1]), key=lambda one: one[0], default=None)
    return first[1] if first is not None else "", [one[2] for one in told]
