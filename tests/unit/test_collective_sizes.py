"""Sizes: which ranks had other bytes than the others for a collective, by what is on their boards."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest

from zerorun.watch.board import ALL, PAGE, Board, Phase, Sight, Span, read
from zerorun.watch.collective_sizes import NO_BATCH, SAME_NUMBER, OtherSizes, differing, left_early
from zerorun.watch.verdict import Ended, Standing, judge

Note = tuple[str, Span, int, int]


def board(*notes: Note, at: str = "") -> Sight:
    """What is seen of a rank that has noted sizes, and waits ``at`` a collective of all ranks, or computes."""
    memory, shown = mmap.mmap(-1, PAGE), Board()
    shown.go_on_at(memory)
    shown.write(STEP=10, LIMIT=0 if at == "no limit" else 1)
    shown.enter(Phase.SCRIPT)
    for note in notes:
        shown.note_size(*note)
    if at:
        shown.wait_begins(at, ALL, 1)
    sight = read(memory)
    assert sight is not None
    return sight


def note(size: int, label: str = "reduce", number: int = 1, span: Span = ALL) -> Note:
    return label, span, number, size


def text_of(*sights: Sight) -> str | None:
    found = differing(dict(enumerate(sights)))
    return None if found is None else found.text(lambda rank: f"rank {rank} on node{rank}")


def test_the_odd_one_is_named_with_both_sizes() -> None:
    """Also if it has gone on to another collective, as far as it came."""
    three = board(note(12), at="reduce")
    odd = board(note(24), note(8, "gather"), at="gather")
    assert text_of(three, odd, three, three) == (
        "ranks disagree on the size of 'reduce': rank 1 on node1 has 24 bytes, ranks 0, 2-3 have 12 bytes. "
        "Remedy: give it tensors of the same shape and dtype on all ranks."
    )


def test_of_two_nobody_is_right() -> None:
    found = differing({0: board(note(12)), 1: board(note(1))})
    assert found is not None and found.guilty == (0, 1) and found.label is None
    assert found.text(str).startswith("ranks disagree on the size of a collective: 0 has 12 bytes, 1 has 1 byte.")


@pytest.mark.parametrize(
    ("sizes", "guilty"),
    [
        ([1, 2, 2], (0,)),
        ([1, 2, 2, 1], (0, 1, 2, 3)),
        ([1, 2, 3], (0, 1, 2)),
        ([5, 5, 5, 7, 9], (3, 4)),
        ([1, 1, 2, 3], (0, 1, 2, 3)),
    ],
)
def test_who_is_guilty(sizes: list[int], guilty: tuple[int, ...]) -> None:
    assert OtherSizes("reduce", dict(enumerate(sizes))).guilty == guilty


@pytest.mark.parametrize(
    "other",
    [note(24, number=2), note(24, "gather"), note(24, span=(0, 1, 2)), note(24, number=1 + 1024), note(12)],
    ids=["another call", "another label", "another group", "another engine", "the same size"],
)
def test_what_is_not_the_same_collective_is_not_compared(other: Note) -> None:
    assert text_of(board(note(12)), board(other), board(note(12))) is None


def test_the_first_difference_is_the_cause() -> None:
    one, other = (
        board(note(4, "first"), note(8, "second"), at="first"),
        board(note(5, "first"), note(9, "second"), at="first"),
    )
    found = differing({0: one, 1: other})
    assert found is not None and (found.label, found.sizes) == ("first", {0: 4, 1: 5})


# -- who has left ----------------------------------------------------------------------------------------------------


def left(*notes: Note) -> Sight:
    return replace(board(*notes), phase=Phase.LEFT, batches=998)


def gathers(numbers: range, label: str = "gather") -> list[Note]:
    return [note(8, label, number) for number in numbers]


def test_a_rank_that_has_left_while_others_need_it() -> None:
    """They have begun two collectives more, the second of them in advance."""
    others = [board(*gathers(range(20, 32)), at="gather"), board(*gathers(range(20, 31)), at="gather")]
    found = left_early({0: others[0], 1: left(*gathers(range(15, 30))), 2: others[1]})
    assert found == (
        "rank 1 has come to the end of its script after 998 micro-batches, and then ranks 0, 2 began 'gather', which "
        f"needs all of them. {SAME_NUMBER}"
    )
    unbegun = replace(left(*gathers(range(15, 30))), batches=0)
    found = left_early({0: others[0], 1: unbegun, 2: others[1]})
    assert found is not None and found.endswith(NO_BATCH)


@pytest.mark.parametrize(
    "other",
    [
        board(*gathers(range(15, 30))),  # it ends by itself, and has made what it left with
        board(*gathers(range(29, 40)), note(8, "pair", 1, (0, 2, 2))),  # the last is between others
        board(),
        left(*gathers(range(15, 40))),
    ],
    ids=["an error of its own", "a group of others", "no collective", "has left too"],
)
def test_a_rank_that_has_left_and_is_not_needed(other: Sight) -> None:
    assert left_early({0: other, 1: left(*gathers(range(15, 30)))}) is None


# -- in the verdict --------------------------------------------------------------------------------------------------


def standing(rank: int, sight: Sight) -> Standing:
    wait_s = None if sight.wait_s is None else 50.0
    return Standing(rank, f"node{rank}", 50.0, replace(sight, wait_s=wait_s), False)


def test_ranks_in_different_collectives_because_of_a_size() -> None:
    """The one whose size was larger got less than it asked for, and went on."""
    ranks = [board(note(12), at="reduce"), board(note(24), at="gather"), board(note(12), at="reduce")]
    found = judge({rank: standing(rank, sight) for rank, sight in enumerate(ranks)}, {}, 3)
    assert found is not None and (found.cause, found.guilty, found.certain) == ("sizes", (1,), True)
    assert "rank 1 on node1 has 24 bytes, ranks 0, 2 have 12 bytes" in found.text


def test_a_rank_that_has_ended_of_it() -> None:
    here = {rank: standing(rank, board(note(12), at="reduce")) for rank in (0, 2)}
    found = judge(here, {1: Ended(1, 1, 5, board(note(24)))}, 3)
    assert found is not None and (found.cause, found.guilty) == ("sizes", (1,))
    found = judge(here, {1: Ended(1, 1, 5, None)}, 3)
    assert found is not None and found.cause == "ended"


def test_sizes_alone_are_no_hang() -> None:
    assert judge({0: standing(0, board(note(12))), 1: standing(1, board(note(24)))}, {}, 2) is None


@pytest.mark.parametrize(
    ("label", "limit_s", "ends"),
    [("gather", None, True), ("barrier of the script", None, False), ("barrier of the script", 5.0, True)],
)
def test_how_long_a_barrier_of_the_script_takes_is_for_the_script_to_say(
    label: str, limit_s: float | None, ends: bool
) -> None:
    """Without "hang_timeout_s" the user is told, and torch's own limit ends the job."""
    waits, works = (standing(rank, replace(board(at=at), limit_s=limit_s)) for rank, at in enumerate((label, "")))
    waits = Standing(0, None, 700.0, replace(waits.sight, wait_s=700.0), False)
    works = Standing(1, None, 700.0, works.sight, False)
    found = judge({0: waits, 1: works}, {}, 2)
    assert found is not None and (found.cause, found.guilty) == ("busy", (1,))
    assert found.ends_job({0: waits, 1: works}) == ends
