"""The process group itself: torch's own collectives, over all ranks, for whoever has no engine yet, or checks the network.

Engines move their data by transports, which count it, and decide by control.py. No other file calls torch's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic_ns, perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist

from ...errors import MessageError
from ...watch.board import ALL, Span, only
from ..device import is_simulated, on_gpu, synchronize
from ..topology import everyone
from ..waits import waiting
from ..wire import decode, encode
from .statistics import unanswered

T = TypeVar("T")
_LENGTH = 8  # bytes of the length of a value
_TRIPS = 16  # to another rank and back
_HEAD = 512  # bytes of a message that has the length and the beginning of a value: most have no more
_MUCH = 65536  # bytes that are not worth a collective of their own
_MESSAGE = "a message between two ranks"


def size() -> int:
    """How many ranks there are."""
    return dist.get_world_size()


def rank() -> int:
    """This rank's number."""
    return dist.get_rank()


def seconds_of(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Mean seconds of ``count`` calls, until ``device`` has done them. Ranks of a process group begin at once."""
    if dist.is_initialized():
        barrier("before a time is taken")
    synchronize(device)
    begun = perf_counter()
    for _ in range(count):
        run()
    synchronize(device)
    return (perf_counter() - begun) / count


def uses_nccl(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """True if tensors on ``device`` go through NCCL, or what stands for it, in ``group`` (None: the world)."""
    return is_simulated(device) or (on_gpu(device) and "nccl" in str(dist.get_backend_config(group or dist.group.WORLD)))


@contextmanager
def with_others(what: str, missing: Callable[[], list[int]] | None = None, span: Span = ALL) -> Iterator[None]:
    """Around a collective or a message, which is a wait, see ``waiting``. Raises OrderError if a rank is gone."""
    try:
        with waiting(what, missing, span):
            yield
    except RuntimeError as error:
        raise unanswered(what, rank(), error) from error


# -- values ------------------------------------------------------------------------------------------------------------


def gather_values(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ranks' values (see wire.py), by rank of ``group`` (None: the world). Tensors arrive on the CPU. All its ranks
    must call it.

    Raises MessageError, on all ranks alike, if a rank's value is of a type that cannot be told, and OrderError if a rank is
    gone.
    """
    try:
        return _gather_values(value, group)
    except MessageError:
        raise
    except RuntimeError as error:
        raise unanswered("values of all ranks", dist.get_rank(), error) from error


def _gather_values(value: T, group: dist.ProcessGroup | None) -> list[T]:
    try:
        content = encode((value, None))
    except MessageError as error:
        content = encode((None, str(error)))
    found = [decode(other) for other in _gather_bytes(content, group)]
    for number, (_, problem) in enumerate(found):
        if problem is not None:
            raise MessageError(f"rank {number}: {problem}")
    return [other for other, _ in found]


def _gather_bytes(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Short ones take one collective: with their length they fit into its messages. Longer ones take a second.

    In that, all are padded to one length. What few ranks have beyond what the others have is broadcast by each of them:
    padded, the manifest of one rank would take as much memory for each rank of thousands, on all of them.
    """
    group = group or everyone()
    message = len(content).to_bytes(_LENGTH, "little") + content
    heads = _gather_padded(message[:_HEAD], _HEAD, group)
    ends = [_LENGTH + int.from_bytes(head[:_LENGTH], "little") for head in heads]
    usual = max(_usual(ends), _HEAD)
    rests = _gather_padded(message[_HEAD:usual], usual - _HEAD, group) if usual > _HEAD else [b""] * len(heads)
    found = [(head + rest)[_LENGTH:end] for head, rest, end in zip(heads, rests, ends, strict=True)]
    for rank, end in enumerate(ends):
        if end > usual:
            found[rank] += _broadcast(message[usual:], end - usual, rank, group)
    return found


def _usual(ends: Sequence[int]) -> int:
    """The longest of ``ends`` that is not much longer than what half of them are."""
    most = 2 * sorted(ends)[(len(ends) - 1) // 2] + _MUCH
    return max(end for end in ends if end <= most)


def _broadcast(content: bytes, size: int, rank: int, group: dist.ProcessGroup) -> bytes:
    """The ``content`` of ``rank``, of ``size`` bytes."""
    if dist.get_rank(group) == rank:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), group=group, group_src=rank)
        return content
    received = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(received, group=group, group_src=rank)
    return bytes(received.numpy())


def _gather_padded(content: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
    """The ranks' ``content``, each with zeros up to ``size`` bytes."""
    padded = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, padded, group=group)
    return [bytes(part.numpy()) for part in found]


# -- tensors -----------------------------------------------------------------------------------------------------------
#
# They are contiguous, and all ranks must call what is called "all". Each returns when the result is in place. What is not
# added up travels as bytes: neither NCCL nor gloo knows all dtypes. The group is that of ``everyone``, because a script's
# own may serve GPUs only.


def all_gather(mine: torch.Tensor, what: str) -> list[torch.Tensor]:
    """The ranks' tensors of one shape and dtype, by rank. ``what``: the words for a long wait."""
    found = [torch.empty_like(mine) for _ in range(size())]
    with with_others(what):
        dist.all_gather([_bytes_of(other) for other in found], _bytes_of(mine), group=everyone())
    return found


def all_gather_flat(flat: torch.Tensor, mine: torch.Tensor, what: str) -> None:
    """Fill ``flat`` [ranks * numel] with the ranks' ``mine`` [numel]."""
    with with_others(what):
        dist.all_gather(list(_bytes_of(flat).chunk(size())), _bytes_of(mine), group=everyone())


def all_gather_in_one(flat: torch.Tensor, mine: torch.Tensor) -> None:
    """``all_gather_flat`` by the call that engines make on GPUs."""
    _world()._allgather_base(flat, mine).wait()


def all_reduce(buffer: torch.Tensor, what: str, *, largest: bool = False) -> None:
    """Replace every rank's ``buffer`` by the sum over ranks, or by the largest of each element."""
    with with_others(what):
        dist.all_reduce(buffer, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=everyone())


def reduce_scatter(full: torch.Tensor, own: torch.Tensor) -> None:
    """Set ``own`` [numel] to this rank's part of the sum of the ranks' ``full`` [ranks * numel]."""
    _world()._reduce_scatter_base(own, full, dist.ReduceScatterOptions()).wait()


def broadcast(tensor: torch.Tensor, source: int, what: str) -> None:
    """Replace every rank's ``tensor`` by that of rank ``source``."""
    with with_others(what):
        dist.broadcast(_bytes_of(tensor), source, group=everyone())


def barrier(what: str) -> None:
    """Return when all ranks have called it."""
    with with_others(what):
        dist.barrier(group=everyone())


def send(tensor: torch.Tensor, peer: int) -> None:
    """Send a tensor to one rank, which calls ``receive``."""
    with with_others(_MESSAGE, lambda: [peer], only(peer)):
        dist.send(tensor, peer)


def receive(tensor: torch.Tensor, peer: int) -> None:
    """Fill ``tensor`` with what one rank sends."""
    with with_others(_MESSAGE, lambda: [peer], only(peer)):
        dist.recv(tensor, peer)


def pass_on(mine: torch.Tensor, came: torch.Tensor) -> None:
    """Send ``mine`` to the next rank and receive ``came`` from the previous one, on all ranks at once."""
    following, previous = (rank() + 1) % size(), (rank() - 1) % size()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, came, previous)]):
        work.wait()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


# -- what goes to rank 0 -----------------------------------------------------------------------------------------------


def collect(content: bytes, what: str) -> list[bytes]:
    """Rank 0: the ranks' contents, by rank, which come one after the other; nothing elsewhere. All ranks must call it."""
    group = everyone()
    with with_others(what):
        if rank():
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            group.send([torch.tensor([flat.numel()])], 0, 0).wait()
            group.send([flat], 0, 0).wait()
            return []
        found = [content]
        for peer in range(1, size()):
            numel = torch.zeros(1, dtype=torch.int64)
            group.recv([numel], peer, 0).wait()
            flat = torch.empty(int(numel), dtype=torch.uint8)
            group.recv([flat], peer, 0).wait()
            found.append(bytes(flat.numpy()))
    return found


def nanoseconds_ahead(peers: Sequence[int]) -> dict[int, int]:
    """Rank 0: how far the monotonic clocks of ``peers`` are ahead of its own; 0 for itself. All ranks must call it.

    By the shortest of some ways there and back, as if the answer was given half-way.
    """
    group, ahead, word = everyone(), {0: 0}, torch.zeros(1, dtype=torch.int64)
    for peer in peers:
        trips = []
        for _ in range(_TRIPS if rank() in (0, peer) else 0):
            asked = monotonic_ns()
            if rank():
                group.recv([word], 0, 0).wait()
                group.send([torch.tensor([monotonic_ns()])], 0, 0).wait()
            else:
                group.send([word], peer, 0).wait()
                group.recv([word], peer, 0).wait()
            answered = monotonic_ns()
            trips.append((answered - asked, int(word) - (asked + answered) // 2))
        ahead[peer] = min(trips, default=(0, 0))[1]
    return ahead


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised")
    return group


class HostGroup:
    """A process group of its own for data in host memory, with its own ``timeout``. All ranks must make it.

    Ranks leave word in the store where they met of how often they have called ``values``: ``absent`` reads it, which
    only those do who wait long.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._store: dist.Store = dist.distributed_c10d._get_default_store()
        self._name, self._calls = f"zerorun: calls in group {self._group.group_name}, rank", 0

    def close(self) -> None:
        """Destroy the group."""
        dist.destroy_process_group(self._group)

    def values(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        self._calls += 1
        with suppress(RuntimeError):  # rank 0, which has the store, has ended: the exchange says so
            self._store.set(f"{self._name} {rank()}", str(self._calls))
        return _gather_values(value, self._group)

    def absent(self) -> list[int]:
        """The ranks that have not come to the newest ``values``. For another thread: it has a connection of its own."""
        store, ranks = self._store.clone(), range(self._group.size())  # type: ignore[attr-defined]
        keys = {rank: f"{self._name} {rank}" for rank in ranks}
        return [rank for rank, key in keys.items() if not store.check([key]) or int(store.get(key)) < self._calls]

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        dist.barrier(group=self._group)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a contiguous tensor to one rank. Not collective."""
        return self._group.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Fill a contiguous tensor with what ``peer`` sends. Not collective."""
        self._group.recv([tensor], peer, tag).wait()
