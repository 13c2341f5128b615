"""Collect: bring the elements of a tensor together on the rank that writes it, a stretch at a time.

Ranks of one host read one another's memory; others are sent what they need. The sends of a rank are all issued at the
beginning, from where its parts lie, and go when the writer asks for them: nobody works in step, and no writer holds more
than one part of one tensor beside its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .plan import Plan, Source, Task
from .ranks import Ranks
from .tensorfile import dtype_of

_STRETCH = 4 << 20  # bytes: stays in the processor's cache from reading to writing

PeerReader = Callable[[int, int, torch.Tensor], None]  # (rank, address, where to)


class Collector:
    """The tensors of ``plan``, from ``memory`` of all ranks: (set, name) -> this rank's part as a 1-D CPU tensor."""

    def __init__(
        self, plan: Plan, memory: dict[tuple[str, str], torch.Tensor], ranks: Ranks, read_peer: PeerReader | None
    ) -> None:
        self._memory, self._ranks, self._read_peer = memory, ranks, read_peer
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._sends = [] if read_peer is not None else list(self._send_all(plan))

    def _send_all(self, plan: Plan) -> Iterator[object]:
        for task in plan.tasks:
            for source in task.sources:
                if source.rank == self._ranks.rank != task.writer and source.numel:
                    yield self._ranks.send(self._own(task, source), task.writer, task.number)

    def _own(self, task: Task, source: Source) -> torch.Tensor:
        return self._memory[task.set, task.tensor.name][: source.numel]

    def stretches(self, task: Task) -> Iterator[torch.Tensor]:
        """The flattened tensor of ``task``, whose writer this rank is, in 1-D pieces that are valid until the next."""
        dtype = dtype_of(task.tensor.dtype)
        length = _STRETCH // dtype.itemsize
        for source in task.sources:
            if source.rank == self._ranks.rank:
                yield from self._own(task, source).split(length)
            elif self._read_peer is not None:
                for begin in range(0, source.numel, length):
                    piece = self._room(min(length, source.numel - begin), dtype)
                    self._read_peer(source.rank, source.address + begin * dtype.itemsize, piece)
                    yield piece
            elif source.numel:
                part = self._room(source.numel, dtype)
                self._ranks.receive(part, source.rank, task.number)
                yield from part.split(length)

    def _room(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size = numel * dtype.itemsize
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer[:size].view(dtype)

    def finish(self) -> None:
        """Return when everything that this rank had to send is on its way."""
        for send in self._sends:
            send.wait()  # type: ignore[attr-defined]
        self._sends = []
