"""Partners: each rank sends what it keeps to a rank of another host, so that no host has the only copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..distributed.wire import decode
from ..errors import DamagedError
from .kept_parts import BLOCK_BYTES, block_sums
from .ranks import Problem, Ranks, attempt

_CHUNK = 128 * BLOCK_BYTES  # bytes of a message


def partners(places: Sequence[int]) -> list[int]:
    """Return for each rank the one on the next host that takes its parts; the rank itself if there is but one host.

    ``places``: for each rank, the first rank of its host.
    """
    hosts: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place, []).append(rank)
    order = list(hosts)
    if len(order) == 1:
        return list(range(len(places)))
    following = {place: hosts[order[(index + 1) % len(order)]] for index, place in enumerate(order)}
    return [following[place][hosts[place].index(rank) % len(following[place])] for rank, place in enumerate(places)]


def exchange(
    ranks: Ranks,
    to: Sequence[int],
    own: tuple[bytes, torch.Tensor] | None,
    room: Callable[[int, int], torch.Tensor],
    take: Callable[[int, bytes], object],
) -> Problem | None:
    """Send ``own``, a record and the parts that it is of, to this rank's partner, and receive what comes. Collective.

    ``own``: None if there is nothing, because something went wrong. ``room(rank, nbytes)`` returns memory for the parts of
    a rank; ``take(rank, record)`` is called when they have come and are checked. Return what went wrong here: no rank waits
    for this one then, whatever it was.
    """
    sends = []
    if to[ranks.rank] != ranks.rank:
        record, memory = own or (b"", torch.empty(0, dtype=torch.uint8))
        head = torch.tensor([len(record), memory.numel()])
        messages = [head, *([torch.frombuffer(bytearray(record), dtype=torch.uint8)] if record else [])]
        messages += memory.split(_CHUNK) if memory.numel() else []
        sends = [ranks.send(message, to[ranks.rank], number) for number, message in enumerate(messages)]
    problem: Problem | None = None
    for rank, partner in enumerate(to):
        if partner == ranks.rank != rank:
            problem = _receive(ranks, rank, room, take) or problem
    for send in sends:
        send.wait()
    return problem


def _receive(
    ranks: Ranks, rank: int, room: Callable[[int, int], torch.Tensor], take: Callable[[int, bytes], object]
) -> Problem | None:
    """Take what ``rank`` sends. It goes on after a problem, which it returns: the sender waits for that."""
    head = torch.empty(2, dtype=torch.int64)
    ranks.receive(head, rank, 0)
    size, nbytes = head.tolist()
    if size == 0:
        return None  # it tells all ranks itself
    content = torch.empty(size, dtype=torch.uint8)
    ranks.receive(content, rank, 1)
    memory, problem = attempt(lambda: room(rank, nbytes))
    sums = [torch.empty(0, dtype=torch.int64)]
    for number, begin in enumerate(range(0, nbytes, _CHUNK)):
        length = min(_CHUNK, nbytes - begin)
        part = torch.empty(length, dtype=torch.uint8) if memory is None else memory[begin : begin + length]
        ranks.receive(part, rank, 2 + number)
        sums.append(block_sums(part))

    def check_and_take() -> None:
        record = bytes(content.numpy())
        if not torch.equal(torch.cat(sums), decode(record).sums):
            raise DamagedError(f"the parts of rank {rank} have come with other checksums than they were sent with.")
        take(rank, record)

    return problem or attempt(check_and_take)[1]
