"""Verdicts: who is guilty of a job that stands still, and when nobody is."""

from __future__ import annotations

from typing import Any

import pytest

from zerorun.watch.board import ALL, NOBODY, Phase, Sight, only
from zerorun.watch.verdict import Ended, Hang, Standing, judge


def rank(of: int, *, stopped: bool = False, quiet_s: float = 40.0, host: str | None = None, **seen: Any) -> Standing:
    """A rank that stands still in the script, after 10 steps."""
    told = {"events": 9, "pid": 1, "rank": of, "gives_stacks": True, "limit_s": None, "step": 10, "batches": 20}
    told |= {"phase": Phase.SCRIPT, "phase_s": quiet_s, "wait_s": None, "span": NOBODY, "number": 0}
    told |= {"longest_s": 1.0, "label": ""}
    return Standing(of, host, quiet_s, Sight(**{**told, **seen}), stopped)


def waits(of: int, label: str = "gather", wait_s: float = 40.0, **seen: Any) -> Standing:
    told = {"phase": Phase.FORWARD, "span": ALL, "label": label, "wait_s": wait_s, "quiet_s": wait_s}
    return rank(of, **{**told, **seen})


def verdict(*standing: Standing, ended: tuple[Ended, ...] = (), world: int = 4) -> Hang | None:
    return judge({one.rank: one for one in standing}, {one.rank: one for one in ended}, world)


def cause(*standing: Standing, **more: Any) -> tuple[str, tuple[int, ...], bool] | None:
    found = verdict(*standing, **more)
    return None if found is None else (found.cause, found.guilty, found.certain)


def test_a_rank_that_computes_is_named_and_not_certain() -> None:
    found = verdict(waits(0), waits(1), rank(2, host="node2"), waits(3, wait_s=50))
    assert found is not None and (found.cause, found.guilty, found.certain) == ("busy", (2,), False)
    assert found.text == (
        "rank 2 on node2 does not move: it has been in the script between calls of the engine for 40 s, after 10 steps "
        "(micro-batch 20). Ranks 0-1, 3 are waiting for it, rank 3 for 50 s at 'gather'."
    )


def test_the_group_of_who_waits_for_the_guilty_is_named() -> None:
    """Others may wait longer, for those who wait: here for all."""
    found = verdict(waits(0, "experts: counts", span=(0, 1, 2)), rank(1), waits(2, wait_s=45), waits(3, wait_s=45))
    assert found is not None and found.guilty == (1,)
    assert found.text.endswith("Ranks 0, 2-3 are waiting for it, rank 0 for 40 s at 'experts: counts' between ranks 0-1.")


def test_a_rank_that_moves_is_waited_for() -> None:
    assert verdict(waits(0), waits(1), waits(3)) is None


def test_short_waits_are_none_of_a_hang() -> None:
    assert verdict(waits(0, wait_s=29), rank(1), world=2) is None
    assert verdict(waits(0, wait_s=31), rank(1, quiet_s=3), world=2) is None


@pytest.mark.parametrize(("longest", "seen"), [(5.0, True), (9.0, False)])
def test_five_times_what_it_took_before(longest: float, seen: bool) -> None:
    assert (verdict(waits(0, longest_s=longest), rank(1), world=2) is not None) == seen


@pytest.mark.parametrize(("limit", "seen"), [(0.0, False), (5.0, True), (60.0, False)])
def test_the_limit_of_the_configuration(limit: float, seen: bool) -> None:
    assert (verdict(waits(0, limit_s=limit), rank(1, limit_s=limit), world=2) is not None) == seen


@pytest.mark.parametrize("phase", [Phase.COMPILE, Phase.SAVE, Phase.LOAD, Phase.INITIALIZE, Phase.WHOLE_WEIGHTS])
def test_what_may_take_its_time_takes_it(phase: Phase) -> None:
    assert verdict(waits(0, wait_s=500), rank(1, phase=phase, quiet_s=500), world=2) is None
    assert cause(waits(0, wait_s=700), rank(1, phase=phase, quiet_s=700), world=2) == ("busy", (1,), False)


def test_so_do_first_steps() -> None:
    assert verdict(waits(0, wait_s=500, step=1), rank(1, phase=Phase.FORWARD, quiet_s=500, step=1), world=2) is None


def test_stopped_and_ended_and_without_data() -> None:
    assert cause(waits(0), rank(1, stopped=True, quiet_s=3), world=2) == ("stopped", (1,), True)
    assert cause(waits(0), rank(1, phase=Phase.DATA), world=2) == ("data", (1,), False)
    found = verdict(waits(0, batches=1000), ended=(Ended(1, 0, 998),), world=2)
    assert found is not None and (found.cause, found.guilty, found.certain) == ("ended", (1,), True)
    assert (
        "ended with exit code 0 after 998 micro-batches; rank 0 has been waiting for it for 40 s, after 1000" in found.text
    )
    assert "give all ranks the same number of batches" in found.text
    found = verdict(waits(0, batches=0), ended=(Ended(1, 0, 0),), world=2)
    assert found is not None and "after 0 micro-batches" in found.text and "ended before its first batch" in found.text


@pytest.mark.parametrize(("phase", "remedy"), [(Phase.LEFT, "the same number"), (Phase.FORWARD, "look at its own error")])
def test_how_a_rank_has_ended_may_not_be_known(phase: Phase, remedy: str) -> None:
    """As under srun and torchrun, which have started it. That it left its script, its board tells."""
    found = verdict(waits(0), ended=(Ended(1, None, 20, rank(1, phase=phase).sight),), world=2)
    assert found is not None and "rank 1 has ended after 20 micro-batches" in found.text and remedy in found.text


@pytest.mark.parametrize(
    ("batches", "ago_s", "seen"), [(20, 1.0, False), (20, 3.0, True), (22, 3.0, False), (22, 31.0, True), (18, 1.0, False)]
)
def test_a_rank_that_has_just_ended_may_have_done_its_part(batches: int, ago_s: float, seen: bool) -> None:
    """After a long save all go on at once. Who is ahead has ended before this one has come to a core."""
    found = verdict(waits(0, wait_s=66), ended=(Ended(1, 0, batches, ago_s=ago_s),), world=2)
    assert (found is not None) == seen


def test_a_wait_for_a_disk_is_no_wait_for_ranks() -> None:
    found = verdict(waits(0), waits(1, "reading states", span=NOBODY), world=2)
    assert found is not None and (found.cause, found.guilty) == ("busy", (1,))
    assert "in forward, at 'reading states' for 40 s" in found.text


def test_different_collectives_of_few_and_of_those_outside_the_loop() -> None:
    found = verdict(waits(0, "save", phase=Phase.SAVE), waits(1), waits(2), waits(3))
    assert found is not None and (found.cause, found.guilty, found.certain) == ("order", (0,), True)
    assert "rank 0 is saving, at 'save', after 10 steps (micro-batch 20); ranks 1-3 are in forward" in found.text
    assert found.others == (1,)  # whose stack is shown, too: of two ranks, either may be the one that should not be there
    assert cause(waits(0), waits(1, "save", phase=Phase.SAVE), world=2) == ("order", (1,), True)


def test_a_circle_is_one_only_if_all_wait_long() -> None:
    assert verdict(waits(0), waits(1, "other", wait_s=10), world=2) is None


def test_the_end_of_a_chain_is_guilty() -> None:
    chain = [waits(0, "a", span=only(1)), waits(1, "b", span=only(2)), waits(2, "c", span=only(3)), rank(3)]
    assert cause(*chain) == ("busy", (3,), False)
    assert verdict(*chain[:3]) is None  # rank 3 moves


def test_all_are_there_and_it_does_not_end() -> None:
    found = verdict(*(waits(number, span=(0, 1, 2), host=f"node{number}") for number in range(2)))
    assert found is not None and (found.cause, found.guilty, found.certain) == ("link", (0, 1), True)
    assert "the link between node0 and node1 lets nothing through" in found.text
    assert verdict(*(waits(number, longest_s=0.0, wait_s=500) for number in range(4))) is None  # the first of its kind


def test_the_last_one_may_just_have_come() -> None:
    """The collective has only begun with it, however long the others have waited."""
    assert verdict(waits(0), waits(1), waits(2, wait_s=2.5), world=3) is None
    assert verdict(waits(0, number=6), waits(1, number=7, wait_s=2.5), world=2) is None  # nor has rank 0 had a core since


def test_groups_of_the_script_that_have_one_label() -> None:
    """Rank 1 is not in the collective of ranks 0 and 1: it waits for rank 2 in another one, which is ahead in numbers."""
    first = waits(0, "all_reduce of the script", span=(0, 1, 2), number=7)
    second = waits(1, "all_reduce of the script", span=(1, 1, 2), number=9)
    found = verdict(first, second, rank(2), world=3)
    assert found is not None and (found.cause, found.guilty, found.certain, found.asked_for) == ("busy", (2,), False, True)


def test_messages_of_one_collective_have_other_ranks() -> None:
    ring = [waits(number, span=only((number + 1) % 3), number=4) for number in range(3)]
    assert cause(*ring, world=3) == ("link", (0, 1), True)


def test_messages_of_different_collectives_are_calls_in_different_orders() -> None:
    first, second = waits(0, "0: all-gather", span=only(1)), waits(1, "0: all-gather on request", span=only(0))
    assert cause(first, second, world=2) == ("order", (0,), True)


def test_ranks_that_wait_for_messages_of_each_other() -> None:
    """One was sent and is lost, or was never sent: no board tells."""
    first = waits(0, "pipeline: gradients from stage 1", span=only(1), host="a", phase=Phase.PIPELINE)
    second = waits(1, "pipeline: activations from stage 0", span=only(0), host="b", phase=Phase.PIPELINE)
    found = verdict(first, second, world=2)
    assert found is not None and (found.cause, found.guilty, found.certain) == ("messages", (0, 1), True)
    assert "rank 1 on b is in train_batch() or eval_batch(), at 'pipeline: activations from stage 0'" in found.text
    assert (
        "Either the link between a and b lets nothing through, or they make their calls in different orders" in found.text
    )


def test_ranks_that_get_no_connection_to_each_other() -> None:
    """The one that has all of its connections waits for them in initialize(), in no wrong order."""
    meeting = {"phase": Phase.INITIALIZE, "step": 0, "batches": 0}
    first = waits(0, "initialize(): whether all ranks agree", host="a", **meeting)
    others = [waits(number, "the rendezvous of 3 ranks at a:1", host=f"b{number}", **meeting) for number in (1, 2)]
    found = verdict(first, *others, world=3)
    assert found is not None and (found.cause, found.guilty, found.certain) == ("link", (1, 2), True)
    assert found.text.startswith(
        "ranks 1-2 are still at 'the rendezvous of 3 ranks at a:1', for 40 s, and rank 0 through it"
    )
    assert "since the link between b1 and b2 lets nothing through" in found.text
    found = verdict(first, others[0], waits(2, first.sight.label, host="b2", **meeting), world=3)
    assert found is not None and "since the way between rank 1 on b1 and another rank lets nothing through" in found.text


def test_time_in_which_nobody_looked_is_no_wait() -> None:
    assert verdict(waits(0, quiet_s=20), rank(1), world=2) is None


def test_who_is_further_with_a_label_has_been_there() -> None:
    """Numbers begin anew after 1,023."""
    early, late = waits(0, number=1023), waits(1, number=1)
    assert cause(early, late, rank(2), world=3) == ("busy", (2,), False)
    assert cause(waits(0, number=1023, span=only(1)), late, world=2) == ("link", (0, 1), True)


@pytest.mark.parametrize(
    ("limit", "quiet", "ends"), [(None, 599, False), (None, 601, True), (5.0, 9, False), (5.0, 11, True)]
)
def test_when_a_rank_that_computes_ends_the_job(limit: float | None, quiet: float, ends: bool) -> None:
    found = {0: waits(0, wait_s=quiet, limit_s=limit), 1: rank(1, quiet_s=quiet, limit_s=limit)}
    verdict = judge(found, {}, 2)
    assert verdict is not None and verdict.ends_job(found) == ends
