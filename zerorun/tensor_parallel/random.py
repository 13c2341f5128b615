"""Random numbers in tensor-parallel regions: a stream of its own for each rank inside, the common one outside.

[Note: streams]
Outside a region, all tensor ranks hold the same activations and must draw the same numbers, from the default generators,
which initialize() makes equal. Inside a region, each rank has different heads or columns and must draw its own numbers. So
on entry one number is drawn from the default generator, the same on all ranks; this number and the rank give the seed of
the region. On leaving, the default generator is set back to its state after that draw. Everything follows from the state of
the default generator on entry. So whatever restores that state for a recomputation also restores the region's numbers, and
checkpoints need to save nothing else.

A recomputation may stop half-way and never leave the region. Its caller then restores the generator, which no longer has
the region's seed: that is how ``enter`` knows that it is not inside. A forward that raises, or that ends with divided
logits, does not leave it either. So each forward of a divided model begins and ends outside, and so does the loss of such
logits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn

from ..distributed.device import generators
from ..plan.replaced_forwards import uncompiled

_MULTIPLIER, _MODULUS = 6364136223846793005, 2**63 - 1


class CommonDraws:
    """What a forward draws from the common stream, beside the numbers for regions' seeds, on one device.

    Ranks draw the same only if their default generators are equal. Whoever draws on one rank alone makes them others.
    """

    def __init__(self, device: torch.device) -> None:
        """To be made where the forward begins."""
        self._generators = generators(device)
        self._before = [generator.get_state() for generator in self._generators]
        self._entries = Streams.entries

    def mark(self) -> float:
        """A number in [1, 2) that stands for what was drawn, where the forward ends; 0 if nothing was."""
        expected = torch.Generator()
        expected.set_state(self._before[0])
        for _ in range(Streams.entries - self._entries):
            _draw(expected)
        unused = [expected.get_state(), *self._before[1:]]
        if all(torch.equal(g.get_state(), state) for g, state in zip(self._generators, unused, strict=True)):
            return 0.0
        return 1 + zlib.crc32(b"".join(bytes(state.tolist()) for state in self._before)) / 2**32


class Streams:
    """The streams of one tensor rank, on one device. ``entries``: how often any has been entered."""

    entries = 0

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seed: int | None = None
        self._outside: list[tuple[torch.Generator, torch.Tensor]] = []

    @property
    def inside(self) -> bool:
        """True between ``enter`` and ``leave``."""
        return self._seed is not None and torch.default_generator.initial_seed() == self._seed

    @uncompiled
    def enter(self, device: torch.device) -> None:
        """Draw from this rank's own stream from here on. This has no effect if already inside."""
        if self.inside:
            return
        drawn = _draw(torch.default_generator)
        Streams.entries += 1
        self._seed = region_seed(drawn, self._rank)
        drawn_from = generators(device)
        self._outside = [(generator, generator.get_state()) for generator in drawn_from]
        for generator in drawn_from:
            generator.manual_seed(self._seed)

    @uncompiled
    def leave(self) -> None:
        """Return to the common stream."""
        if self.inside:
            for generator, state in self._outside:
                generator.set_state(state)
        self._seed, self._outside = None, []


def any_trains(modules: Iterable[nn.Module | None]) -> bool:
    """True if one of ``modules``, or a module within one, is in training, and so may draw numbers.

    Scripts put parts of a model into another mode than what is around them: the first layers of fine-tuning into
    evaluation, or the dropouts of an evaluation into training (Monte Carlo dropout).
    """
    return any(module is not None and (module.training or any_trains(module._modules.values())) for module in modules)


def _draw(generator: torch.Generator) -> int:
    return int(torch.randint(_MODULUS, (), dtype=torch.int64, generator=generator, device="cpu"))


def region_seed(drawn: int, rank: int) -> int:
    """Return the seed of a region for tensor rank ``rank``. ``drawn``: the number from the common stream on entry."""
    return (drawn * _MULTIPLIER + rank + 1) % _MODULUS
