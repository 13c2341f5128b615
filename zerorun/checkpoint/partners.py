"""Partners: each rank sends the files that it has written to a rank of another host, so that no host has the only copy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..errors import DamagedError
from .files import create
from .ranks import Ranks
from .tensorfile import BLOCK_BYTES, FileRecord, memory_of

_CHUNK = 8 * BLOCK_BYTES  # bytes of a message


def partners(places: Sequence[int]) -> list[int]:
    """Return for each rank the one on the next host that takes its files; the rank itself if there is but one host.

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
    ranks: Ranks, places: Sequence[int], written: Sequence[Mapping[str, FileRecord]], folder: Path
) -> dict[str, FileRecord]:
    """Send this rank's files to its partner, write those that come into ``folder``, and return their records. Collective.

    ``written``: the records of each rank's files. What comes is compared with them: so both copies are checked.
    Raises DamagedError, OSError.
    """
    to, own = partners(places), ranks.rank
    if to[own] == own:
        return {}
    sent = [_content(folder / name, record) for name, record in sorted(written[own].items())]
    chunks = [chunk for content in sent for chunk in content.split(_CHUNK)]
    sends = [ranks.send(chunk, to[own], number) for number, chunk in enumerate(chunks)]
    came: dict[str, FileRecord] = {}
    problem: Exception | None = None
    for rank, records in enumerate(written):
        number = 0
        for name, record in sorted(records.items()) if to[rank] == own else ():
            incoming = _Incoming(folder / name, record)
            for size in _sizes(record.nbytes):
                incoming.take(ranks, rank, number, size)
                number += 1
            wrong = incoming.end()
            problem, came[name] = problem or wrong, record
    for send in sends:
        send.wait()
    if problem is not None:
        raise problem
    return came


def _sizes(nbytes: int) -> list[int]:
    return [min(_CHUNK, nbytes - begin) for begin in range(0, nbytes, _CHUNK)]


def _content(path: Path, record: FileRecord) -> torch.Tensor:
    """Return the bytes of a file in place. Files of a memory file system are mapped, not copied."""
    return torch.from_file(str(path), shared=False, size=record.nbytes, dtype=torch.uint8)


class _Incoming:
    """A file that another rank sends. It goes on to take what comes after a problem: the sender waits for that."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path, self._record = path, record
        self._blocks = 0
        self._file = -1
        self._problem: Exception | None = None
        self._buffer = torch.empty(min(_CHUNK, record.nbytes), dtype=torch.uint8)
        try:
            self._file = create(path)
        except OSError as error:
            self._problem = error

    def take(self, ranks: Ranks, rank: int, number: int, size: int) -> None:
        """Receive message ``number`` of ``rank``, check it and write it."""
        part = self._buffer[:size]
        ranks.receive(part, rank, number)
        try:
            if self._problem is None:
                data = memory_of(part)
                self._blocks = self._record.check_blocks(data, self._blocks, self._path)
                while data.nbytes:
                    data = data[os.write(self._file, data) :]
        except (OSError, DamagedError) as error:
            self._problem = error

    def end(self) -> Exception | None:
        """Close the file, and return what went wrong."""
        if self._file >= 0:
            os.close(self._file)
        return self._problem
