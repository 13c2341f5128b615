"""The simulated device in tests: how a job switches it on, and what it writes down."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerorun.distributed import simulated

Call = tuple[str, int, str]  # operation, elements, dtype


class Recorder(simulated.Nobody):
    """Writes down the calls of each process group, by the name of its stream."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = defaultdict(list)

    def begin(
        self,
        stream: simulated.SimulatedStream,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        what: str,
    ) -> None:
        if stream.name.startswith("collectives"):
            moved = [*reads, *writes]
            self.calls[stream.name].append((what, sum(tensor.numel() for tensor in moved), str(moved[0].dtype)))


@contextlib.contextmanager
def simulated_device(observer: simulated.Observer | None = None) -> Iterator[dict[str, list[Call]]]:
    """Engines made in the block are on the simulated device. Gives the calls of each process group, as they come."""
    recorder = Recorder()
    before = os.environ.get("ZERORUN_DEVICE")
    os.environ["ZERORUN_DEVICE"] = simulated.NAME
    watched = simulated.watch(observer or recorder)
    try:
        yield recorder.calls
    finally:
        simulated.watch(watched)
        os.environ.pop("ZERORUN_DEVICE")
        if before is not None:
            os.environ["ZERORUN_DEVICE"] = before


def refuse_different_calls(calls: dict[str, list[Call]]) -> None:
    """Raise AssertionError unless the ranks of each group have made the same collectives in the same order."""
    mine = {name: [call for call in made if call[0] not in ("send", "receive")] for name, made in calls.items()}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, theirs in enumerate(found):
        for name in mine.keys() & theirs.keys():
            assert mine[name] == theirs[name], f"{name}: other calls than rank {rank}"
