"""What a GPU is busy in a step: of one step in WINDOW its time from end to end, without the waits for other ranks.

The host runs ahead of a GPU, and waits for it wherever a script reads a value. So its own times say little there.
"""

from __future__ import annotations

import torch

from ..distributed.device import queues
from ..distributed.stopwatch import Stopwatch, covered
from ..distributed.transport.communicator import Communicator
from ..watch.board import WINDOW, board
from .breakdown import watch_communication

_STEP = "step"


class DeviceSample:
    """Times a step now and then, for the board of this rank."""

    def __init__(self, device: torch.device, comm: Communicator) -> None:
        self._device, self._comm = device, comm
        self._steps = 0
        self._watch: Stopwatch | None = None  # of the step that is timed, and until it is read
        self._begun: object = None
        board.note_device(-1)

    @classmethod
    def make(cls, device: torch.device, comm: Communicator) -> DeviceSample | None:
        """None where the host's own times say it all."""
        return cls(device, comm) if queues(device) and comm.topology.world_size > 1 else None

    def end_step(self) -> None:
        """A step is over. Nobody waits for the device: a step is read when it has passed."""
        self._steps += 1
        if self._steps % WINDOW == 1 and self._comm.statistics.watch is None:
            self._watch = Stopwatch(self._device)
            watch_communication(self._comm, self._watch)
            self._begun = self._watch.now()
        elif self._watch is not None:
            if self._begun is not None:
                self._watch.add(_STEP, self._begun)
                self._watch.end_step(_STEP)
                self.stop()
            for step in self._watch.read():
                waits = [(one.waited_from, one.ended) for one in step if one.waited_from is not None]
                board.note_device(round(1e9 * (step[-1].seconds - covered(waits))))

    def stop(self) -> None:
        """Time nothing more of this step."""
        if self._begun is not None:
            self._begun = None
            watch_communication(self._comm, None)
