"""What a step costs, counted on one process that is any rank of any number: see mirror.py."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
from covering import by_day
from mirror import mirrored
from models import Case, Gpt, Place
from races import looking_for_races
from simulation import simulated_device
from training import make_config

import zerorun
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.plan.sharding_plan import ShardingPlan
from zerorun.plan.step_collectives import CONTROL, Collective, step_collectives
from zerorun.plan.step_collectives import NORM as NORM_SUM
from zerorun.zero.parameter_guards import LOOKING_STEPS

WORLDS = (1, 8, 64)
STEADY = LOOKING_STEPS  # after which orders are agreed on, buffers are made, and nobody looks for writes of scripts
# The norm of a step: all shards at once; what comes of them stacked, squared, and added up. Then the losses, and the sum of
# it all over ranks, as a copy.
NORM = Counter(["_foreach_norm.Scalar", "stack.default", "pow.Tensor_Scalar", "sum.default"])
LOSSES = Counter(["isnan.default", "logical_and_.default", "_to_copy.default"])
LOSSES += Counter({"stack.default": 3, "sum.default": 2, "clone.default": 1})
# The decision: the averaged norm; the limit over it, at most 1; the coefficient; whether they are of use; what is read.
DECISION = Counter(["sqrt.default", "full_like.default", "add.Tensor", "clamp.default", "eq.Scalar", "stack.default"])
DECISION += Counter({"div.Tensor": 1, "mul.Tensor": 2, "lt.Scalar": 2, "logical_and_.default": 2, "_to_copy.default": 3})
DECISION += Counter(["where.self", "cat.default"])
# An update by torch's kernels, which come with the check for races: unscaling takes two. Triton's kernel looks by itself
# whether the coefficient is finite, and does not have to put back three tensors.
UPDATE = Counter(("copy_.default", "mul_.Tensor", "_fused_adamw_.default"))
UPDATE += Counter({"abs.default": 1, "ne.Scalar": 1, "eq.Tensor": 1, "mul.Tensor": 1})
UPDATE += Counter({"clone.default": 3, "where.self_out": 3})


@dataclass(frozen=True)
class Counted:
    """Of one step. ``launches``: of operations on the device within step()."""

    plan: ShardingPlan
    sent: Counter[Collective]
    launches: Counter[str]
    host_waits: int


@cache
def count(world: int, stage: int, precision: str, blocks: int = 4) -> Counted:
    """On rank 3, or 0 if it is alone."""
    case = Case("plain", lambda: Gpt(blocks))
    with mirrored(min(3, world - 1), world), simulated_device(), looking_for_races() as seen:
        engine = zerorun.initialize(case.build(), make_config(stage, clip=0.5, precision=precision))
        for step in range(STEADY):
            engine.backward(case.loss(engine, Place(0, step)))
            engine.step()
        sent: Counter[Collective] = Counter()
        seen.begin_step()
        with counting(engine.comm.statistics, sent):
            engine.backward(case.loss(engine, Place(0, STEADY)))
            before = seen.launches.copy()
            engine.step()
        found = Counted(engine.runtime.plan, sent, seen.launches - before, seen.host_waits.total())
        engine.destroy()
    return found


@contextlib.contextmanager
def counting(statistics: CommunicationStatistics, calls: Counter[Collective]) -> Iterator[None]:
    """In the block, add the collectives to ``calls``."""
    with pytest.MonkeyPatch.context() as patch:
        real = statistics.count

        def count(label: str, sent_bytes: int) -> None:
            calls[Collective(label, sent_bytes)] += 1
            real(label, sent_bytes)

        patch.setattr(statistics, "count", count)
        yield


STEPS = pytest.mark.parametrize(
    ("stage", "precision"),
    by_day(product((0, 1, 2, 3), ("fp32", "bf16")), (0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")),
)


@pytest.mark.parametrize("world", by_day(WORLDS, 8))
@STEPS
def test_a_step_sends_what_theory_says(world: int, stage: int, precision: str) -> None:
    """Each element once for a reduce-scatter, and for an all-gather: Rajbhandari et al. 2020, arXiv:1910.02054, 7."""
    found = count(world, stage, precision)
    assert found.sent == Counter(step_collectives(found.plan))
    units = [sum(group.layout.numel for group in unit.flat_groups) for unit in found.plan.units]
    root, *blocks = units
    wide = 2 if precision == "bf16" else 4
    gathered = {0: 4 * sum(units), 1: wide * sum(units), 2: wide * sum(units)}
    # Forward and backward, but for the blocks that the forward has left in the two slots.
    gathered[3] = wide * (root + 2 * sum(blocks) - sum(blocks[-2:]))
    sent = sum(call.bytes * times for call, times in found.sent.items() if call.label not in (CONTROL, NORM_SUM))
    assert sent == (4 * sum(units) + gathered[stage]) * (world - 1) // world


@STEPS
def test_launches_of_a_step_do_not_grow_with_ranks_or_blocks(stage: int, precision: str) -> None:
    """But for the updates: one for each flat group."""
    rounded = Counter({"copy_.default": 1, "clone.default": 1, "where.self_out": 1})  # new weights, maybe put back
    each = UPDATE + (rounded if precision == "bf16" else Counter())
    for found in (count(1, stage, precision), count(64, stage, precision), count(8, stage, precision, blocks=8)):
        updates = {name: times * len(found.plan.trainable) for name, times in each.items()}
        assert found.launches == NORM + LOSSES + DECISION + Counter(updates)


@pytest.mark.parametrize("world", WORLDS)
@STEPS
def test_the_program_does_not_wait_for_the_device(world: int, stage: int, precision: str) -> None:
    """From the forward of a step on until its end. What has come of the step before it looks up."""
    assert count(world, stage, precision).host_waits == 0
