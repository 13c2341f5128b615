"""Sizes: whether the ranks that make a collective have equally many bytes for it, by what is on their boards.

[Note: why sizes are noted]
Backends do not compare shapes. gloo ends the process that gets more than it expects, which mostly is another one than the
one that is wrong; who gets less goes on with what it has, or waits for the rest. NCCL waits, or mixes things up. So each
rank notes the sizes of its last collectives. They stay on its board, also when it has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..log import counted, ranks_in_words
from .board import Sight, SizeNote

_MOST_TOLD = 4  # different sizes


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
            found[note[:-1]][rank] = note.size
    for sight in sights.values():
        for note in sight.sizes:
            sizes = found[note[:-1]]
            if len(set(sizes.values())) > 1:
                return OtherSizes(_label_of(note, sights), sizes)
    return None


def _label_of(note: SizeNote, sights: Mapping[int, Sight]) -> str | None:
    return next((sight.label for sight in sights.values() if sight.label and note.is_of(sight.label)), None)
