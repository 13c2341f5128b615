"""Reductions: which ends when. What they do is told by the caller, so that no rank is needed."""

from __future__ import annotations

from dataclasses import dataclass

from zerorun.plan.reductions import MAX_REDUCING, Reductions


@dataclass(frozen=True)
class Unit:
    name: str
    grad_slot: int = -1


def recorded(*, overlap: bool = True) -> tuple[Reductions[Unit], list[str]]:
    told: list[str] = []
    made = Reductions[Unit](
        lambda unit: told.append(f"start {unit.name}"),
        lambda unit: told.append(f"finish {unit.name}"),
        lambda unit: told.append(f"vacate {unit.name}"),
        overlap=overlap,
    )
    return made, told


def test_a_slot_is_free_when_what_was_in_it_is_reduced() -> None:
    reductions, told = recorded()
    first, second, third = Unit("first", 0), Unit("second", 1), Unit("third", 0)
    for unit in (first, second):
        reductions.free_slot(unit)
        reductions.begin(unit)
    assert told == ["start first", "start second"]
    reductions.free_slot(third)
    assert told[2:] == ["finish first", "vacate first"]
    reductions.free_slot(third)  # its own already
    assert len(told) == 4
    reductions.begin(third)
    reductions.end()
    assert told[4:] == ["start third", "finish second", "finish third"]


def test_no_more_are_on_their_way_than_there_may_be() -> None:
    reductions, told = recorded()
    for number in range(MAX_REDUCING + 1):
        reductions.begin(Unit(str(number)))
    assert told == [*(f"start {number}" for number in range(MAX_REDUCING)), "finish 0", f"start {MAX_REDUCING}"]


def test_without_overlap_nothing_is_on_its_way() -> None:
    reductions, told = recorded(overlap=False)
    for name in "ab":
        reductions.begin(Unit(name))
    assert told == ["start a", "finish a", "start b", "finish b"]


def test_those_before_a_unit_end_with_it() -> None:
    reductions, told = recorded()
    units = [Unit(name) for name in "ab"]
    for unit in units:
        reductions.begin(unit)
    reductions.end(of=units[0])
    assert told[2:] == ["finish a"]
    reductions.end(of=units[0])  # it has ended
    assert len(told) == 3
