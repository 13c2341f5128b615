"""Sizes: whether the ranks that make a collective have equally many bytes for it, by what is on their boards.

[Note: why sizes are noted]
Backends do not compare shapes. gloo ends the process that gets more than it expects, which mostly is another one than the
one that is wrong; who gets less goes on with what it has, or waits for the rest. NCCL waits, or mixes things up. So each
rank notes the sizes of its last collectives. They stay on its board, also when it has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..log import counted, ranks_in_words
from .board import Phase, Sight, SizeNote

_MOST_TOLD = 4  # different sizes
SAME_NUMBER = "Remedy: give all ranks the same number of batches, and leave the loop on all of them at the same step."
NO_BATCH = "Remedy: let all ranks run the same script to its end; this one ended before its first batch."


@dataclass(frozen=True)
class OtherSizes:
    """A collective for which ranks have different ``sizes``: rank -> bytes. ``label``: None if no board has it now."""

    label: str | None
    sizes: Mapping[int, int]

    @property
    def groups(self) -> list[list[int]]:
        """The ranks of each size, the fewest first."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank, size in sorted(self.sizes.items()):
            found[size].append(rank)
        return sorted(found.values(), key=len)

    @property
    def guilty(self) -> tuple[int, ...]:
        """Those that have another size than most; all of them where no size is that of most."""
        *others, most = self.groups
        several = 2 * len(most) <= len(self.sizes)
        return tuple(sorted(rank for group in ([*others, most] if several else others) for rank in group))

    def text(self, name: Callable[[int], str]) -> str:
        """Who has how much, in words. ``name``: how a rank is called."""
        told = []
        for ranks in self.groups[:_MOST_TOLD]:
            who = name(ranks[0]) if len(ranks) == 1 else ranks_in_words(ranks)
            told.append(f"{who} {'has' if len(ranks) == 1 else 'have'} {counted(self.sizes[ranks[0]], 'byte')}")
        place = "a collective" if self.label is None else f"'{self.label}'"
        return (
            f"ranks disagree on the size of {place}: {', '.join(told)}. "
            "Remedy: give it tensors of the same shape and dtype on all ranks."
        )


def differing(sights: Mapping[int, Sight]) -> OtherSizes | None:
    """Return the first collective for which ranks have different sizes; None if there is none, as far as boards tell."""
    found: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for rank, sight in sights.items():
        for note in sight.sizes:
            found[note.collective][rank] = note.size
    for sight in sights.values():
        for note in sight.sizes:
            sizes = found[note.collective]
            if len(set(sizes.values())) > 1:
                return OtherSizes(_label_of(note, sights), sizes)
    return None


def left_early(sights: Mapping[int, Sight]) -> str | None:
    """Say which rank has left its script before others, which then began a collective with it; None if none has.

    ``sights``: of ranks that have ended. Only who has started them knows how, but the others cannot have ended well.
    """
    left = {rank: sight for rank, sight in sights.items() if sight.phase == Phase.LEFT}
    for rank, sight in left.items():
        waited: dict[int, SizeNote] = {}
        for other in sights.keys() - left.keys():
            note = _first_without(rank, sight, sights[other], len(sights))
            if note is not None:
                waited[other] = note
        if waited:
            return _too_early(rank, sight, sorted(waited), _label_of(next(iter(waited.values())), sights))
    return None


def _first_without(rank: int, sight: Sight, other: Sight, world_size: int) -> SizeNote | None:
    """The first of the last collectives of ``other`` that needs ``rank``, which has not begun it."""
    known, first = {note.collective for note in sight.sizes}, None
    for note in reversed(other.sizes):
        if note.collective in known or rank not in note.members(world_size):
            break
        first = note
    return first


def _too_early(rank: int, sight: Sight, waited: Sequence[int], label: str | None) -> str:
    place = "a collective" if label is None else f"'{label}'"
    return (
        f"rank {rank} has come to the end of its script after {counted(sight.batches, 'micro-batch', 'es')}, and then "
        f"{ranks_in_words(waited)} began {place}, which needs all of them. {remedy_of_early_end(sight.batches)}"
    )


def remedy_of_early_end(batches: int | None) -> str:
    """What to do about a rank that has ended before others after so many micro-batches; None: nobody knows how many."""
    return NO_BATCH if batches == 0 else SAME_NUMBER


def _label_of(note: SizeNote, sights: Mapping[int, Sight]) -> str | None:
    return next((sight.label for sight in sights.values() if sight.label and note.is_of(sight.label)), None)
