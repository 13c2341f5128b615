"""Streams of random numbers beside the default one (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

Ranks that divide a layer drop the same elements of what all of them have, and others of what each has a part of. The
first come from the default generator of the device, which has one seed on all ranks, and the others from a named stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ..distributed.device import default_device, generators
from ..errors import ModelError

_APART = 1_000_003  # a prime: seeds that are near one another, times this, plus those of streams, are all different
MODEL_PARALLEL = "model-parallel-rng"  # Megatron's name of the stream that differs from one tensor rank to the next


class RandomStreams:
    """The streams of a rank, by name, for its device.

    A checkpointed call that draws from them draws the same numbers when it is run again, and an engine's checkpoint has
    their states.
    """

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}  # a tensor in it never changes
        self._seeds: dict[str, int] = {}  # with which they were added

    def add(self, name: str, seed: int) -> None:
        """Begin the stream ``name`` with ``seed``. Raises ModelError if there is one of that name."""
        if name in self._states:
            raise ModelError(
                f"there is already a stream of random numbers called {name!r}. Remedy: another name, or reset() before."
            )
        self._seeds[name] = seed
        self._states[name] = _beginning(seed)

    def reset(self) -> None:
        """Forget all streams."""
        self._states, self._seeds = {}, {}

    def begin_anew(self, seed: int) -> None:
        """Let each stream begin anew by ``seed`` and its own: what differs from rank to rank still does."""
        own = {name: self._seeds.get(name, zlib.crc32(name.encode())) for name in self._states}
        self._states = {name: _beginning(seed * _APART + own[name]) for name in own}

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return name -> state, uint8 [bytes]."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Go on from ``states``, as ``get_states`` has returned them. Streams that they do not have are forgotten."""
        self._states = dict(states)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """In the block, the device's random numbers come from the stream ``name``. Raises ModelError if there is none."""
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise ModelError(f"there is no stream of random numbers called {name!r}; there are: {known}. Remedy: add() it.")
        generator = device_generator()
        before = generator.get_state()
        generator.set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generator.get_state()
            generator.set_state(before)

    @contextmanager
    def as_before(self, states: Mapping[str, torch.Tensor] | None = None) -> Iterator[None]:
        """After the block, the streams are where they were. It begins with ``states``, if it runs a call again."""
        now = self.get_states()
        if states is not None:
            self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)


def _beginning(seed: int) -> torch.Tensor:
    return torch.Generator(device_generator().device).manual_seed(seed % (1 << 63)).get_state()


def device_generator() -> torch.Generator:
    """The default generator of this rank's device."""
    return generators(default_device())[-1]


streams = RandomStreams()  # of this rank, which has one device
