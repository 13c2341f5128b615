"""A tensor axis whose ranks are threads of one process, to try out plans and to test layers without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Outcome = dict[str, torch.Tensor]  # what a rank computes, by name


class _Meeting:
    """Where the threads leave tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.left: list[Any] = [None] * size


class _Done:
    """A collective that is over."""

    def wait(self) -> None:
        pass


class ThreadAxis:
    """Rank ``rank`` of ``size`` threads, with the methods of ``axis.Axis``. ``sent``: bytes by label, as over a network."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, size
        self.sent: dict[str, int] = {}
        self._meeting = meeting

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadAxis:
        return self

    def _exchange(self, given: T) -> list[T]:
        self._meeting.left[self.rank] = given
        self._meeting.barrier.wait()
        found = list(self._meeting.left)
        self._meeting.barrier.wait()
        return found

    def _count(self, label: str, elements: int, tensor: torch.Tensor) -> None:
        self.sent[label] = self.sent.get(label, 0) + elements * tensor.element_size()

    def all_reduce(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        self._count(label, 2 * tensor.numel() * (self.size - 1) // self.size, tensor)
        total = torch.stack(self._exchange(tensor.detach())).to(torch.promote_types(tensor.dtype, torch.float32)).sum(0)
        return total.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        self._count(label, tensor.numel() * (self.size - 1), tensor)
        return torch.cat(self._exchange(tensor.detach()), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        low, high = list(pairwise(bounds))[self.rank]
        self._count(label, tensor.numel() * (bounds[-1] - high + low) // max(bounds[-1], 1), tensor)
        total = torch.stack(self._exchange(tensor.detach())).to(torch.promote_types(tensor.dtype, torch.float32)).sum(0)
        return total.to(tensor.dtype).narrow(dim, low, high - low).contiguous()

    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str) -> _Done:
        self._count(label, sum(flat.numel() for peer, flat in enumerate(sent) if peer != self.rank), sent[0])
        self._meeting.left[self.rank] = [flat.detach() for flat in sent]
        self._meeting.barrier.wait()
        for flat, theirs in zip(received, self._meeting.left, strict=True):
            flat.copy_(theirs[self.rank])
        self._meeting.barrier.wait()
        return _Done()

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        self._count(label, tensor.numel() * (self.size - 1) if self.rank == 0 else 0, tensor)
        tensor.detach().copy_(self._exchange(tensor.detach())[0])
        self._meeting.barrier.wait()


def on_threads(size: int, work: Callable[[ThreadAxis], T]) -> list[T]:
    """Run ``work(axis)`` on ``size`` threads, the ranks of one axis. Return the results by rank.

    If ranks fail, the error of the lowest one is raised.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadAxis(rank, size, meeting))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results


def in_short(error: Exception) -> str:
    """What ``error`` says first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def first_difference(
    outcomes: Sequence[Outcome], expected: Outcome, tolerance: float, tolerance_of_all: float
) -> str | None:
    """The name of a value in which one of ``outcomes`` is not as ``expected``, or None.

    ``tolerance`` is relative to the largest element of that value, and ``tolerance_of_all`` to that of all values.
    """
    largest = max(float(value.abs().max()) for value in expected.values() if value.numel())
    for name, value in expected.items():
        near = tolerance * (float(value.abs().max()) if value.numel() else 0.0) + tolerance_of_all * largest
        for outcome in outcomes:
            found = outcome[name]
            if found.shape != value.shape or not bool(((found - value).abs() <= near).all()):
                return name
    return None
