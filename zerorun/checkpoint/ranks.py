"""Ranks: how ranks talk to each other about a checkpoint, on the CPU, in a process group that waits as long as a disk does.

[Note: a group of its own]
Saving goes on in a thread while training communicates, and a disk may take longer than any collective should. So every
engine has a separate gloo group for its checkpoints, made at the first save or load, with a timeout of one day. A rank that
dies closes its connections, so that the others stop waiting for it at once. No collective of the device is pending while
files are written.
"""

from __future__ import annotations

import errno
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..distributed.agreement import first_other
from ..distributed.topology import Topology
from ..distributed.transport.world import HostGroup
from ..distributed.waits import waiting
from ..errors import CheckpointError, DamagedError, MessageError, ZerorunError
from ..log import in_bytes, logger
from ..watch.board import only

_PATIENCE = timedelta(days=1)
_MEET_S = 30.0
T = TypeVar("T")


class Ranks:
    """The ranks of ``topology``. Every method is collective unless it says otherwise."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rank, self.size = topology.rank, topology.world_size
        with waiting("checkpoint: a process group"):
            self._group = HostGroup(_PATIENCE) if self.size > 1 else None

    def close(self) -> None:
        """Release the process group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank."""
        if self._group is None:
            return [value]
        try:
            with waiting("checkpoint: what all ranks have to say or to write", self._group.absent):
                return self._group.values(value)
        except MessageError as error:
            raise CheckpointError(str(error)) from error
        except RuntimeError as error:
            raise CheckpointError(f"another rank ended, or gave up, during a checkpoint ({error}).") from error

    def first(self, make: Callable[[], T]) -> T:
        """Return on all ranks what ``make`` returns on rank 0, or raise its CheckpointError on all ranks."""
        value, problem = attempt(make) if self.rank == 0 else (None, None)
        value, problem = self.gather((value, problem))[0]
        if problem is not None:
            self._let_all_hear()
            raise problem.error()
        return value  # type: ignore[return-value]

    def agree(self, problem: Problem | None) -> None:
        """Raise CheckpointError, or DamagedError, on all ranks if any rank has a problem. It names the first such rank."""
        self.gather_unless(problem, None)

    def gather_unless(self, problem: Problem | None, value: T | None) -> list[T]:
        """Every rank's ``value``, by rank. Where ``problem`` is not None, it has none: then the same as ``agree``."""
        gathered = self.gather((problem, value))
        found = [(rank, other) for rank, (other, _) in enumerate(gathered) if other is not None]
        if found:
            self._let_all_hear()
            rank, first = found[0]
            more = len(found) - 1
            others = f" ({more} more rank{'s have' if more > 1 else ' has'} a problem, too)" if more else ""
            raise Problem(f"rank {rank}: {first.text}{others}" if self.size > 1 else first.text, first.damaged).error()
        return [value for _, value in gathered]  # type: ignore[misc]

    def _let_all_hear(self) -> None:
        """Wait until every rank knows of the problem: the first to end must not cut off what the others still receive."""
        if self._group is not None:
            with suppress(RuntimeError):  # a rank has ended, which it does only after it has heard
                self._group.barrier()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to send a contiguous CPU tensor to one rank. Not collective."""
        assert self._group is not None
        return self._group.send(tensor, rank, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        """Fill a contiguous CPU tensor with what ``rank`` sends. Not collective."""
        assert self._group is not None
        with waiting("checkpoint: a part of a tensor", lambda: [rank], only(rank)):
            self._group.receive(tensor, rank, tag)

    def volumes(self, directory: Path) -> list[int]:
        """For each rank, the first rank that has the same ``directory``, as far as its path and the host's name tell."""
        places = self.gather((socket.gethostname(), str(directory.absolute())))
        return [places.index(place) for place in places]


def refuse_other(ranks: Ranks, wanted: object, what: str) -> None:
    """Raise CheckpointError, on all ranks alike, unless all ask ``what`` for the same, which reads so. Collective."""
    asked = ranks.gather(str(wanted))
    other = first_other(asked)
    if other is not None:
        raise CheckpointError(
            f"{what} was asked for {asked[other]} on rank {other}, and for {asked[0]} on rank 0. Remedy: pass the same "
            "arguments on all ranks."
        )


def leads_stage(topology: Topology) -> bool:
    """True on the first rank of each pipeline stage, which speaks for what all ranks of the stage know."""
    return topology.replicate_rank == topology.shard_rank == topology.tensor_rank == 0


def is_by_rank(topology: Topology, layout: Mapping[str, Any], count: int | None) -> bool:
    """True if what ``count`` ranks saved is by rank for these: they are as many, with the degrees of then.

    ``layout``: the manifest's. Ranks that divide layers or sequences draw the same numbers outside of them.
    """
    same = all(layout.get(axis, 1) == topology.size(axis) for axis in ("pipe", "tensor", "context"))
    return same and count == topology.world_size


def alone() -> Ranks:
    """The ranks of a process that is the only one. Needs no process group."""
    return Ranks(Topology(1, 1, 0))


@contextmanager
def speaking_up(rank: int, what: str) -> Iterator[None]:
    """Log a warning if the block, in which ``rank`` waits for other ranks to call ``what``, takes long."""
    text = f"rank {rank} has waited {_MEET_S:.0f} s in {what} for other ranks: all ranks must call it."
    timer = threading.Timer(_MEET_S, logger.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class Problem:
    """What went wrong on a rank, for all ranks to raise. ``damaged``: as DamagedError, since a stored file is at fault."""

    text: str
    damaged: bool = False

    def error(self) -> CheckpointError:
        return DamagedError(self.text) if self.damaged else CheckpointError(self.text)


_FORBIDDEN = ". Remedy: let this user read and write there, or name another directory"
_IN_THE_WAY = ". Remedy: something else has that name, so name another directory"
_GONE = ". Remedy: see that its file system is mounted on this host, and that nothing removes files there meanwhile"
_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _FORBIDDEN),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), _IN_THE_WAY),
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), _GONE),
    errno.EDQUOT: ". Remedy: make room, or let this user have more: the quota is used up",
    errno.EIO: ". Remedy: the disk, or the way to it, has failed, so look into the kernel's log (dmesg)",
}


def _remedy(error: OSError) -> str:
    """What may be done about ``error``; empty if that is not known. If the disk is full, also how much room there is."""
    if error.errno == errno.ENOSPC and error.filename:
        with suppress(OSError):
            free = shutil.disk_usage(Path(error.filename).parent).free
            return f" ({in_bytes(free)} are free). Remedy: make room"
    return _REMEDIES.get(error.errno or 0, "")


def attempt(make: Callable[[], T]) -> tuple[T | None, Problem | None]:
    """Call ``make``. Return (its value, None), or (None, what went wrong)."""
    try:
        return make(), None
    except CheckpointError as error:
        return None, Problem(str(error), isinstance(error, DamagedError))
    except ZerorunError as error:
        return None, Problem(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return None, Problem(f"{where}{error.strerror or error}{_remedy(error)}")
    except Exception as error:  # whatever it is, the other ranks must not wait
        logger.exception("an unexpected error in a checkpoint")
        return None, Problem(f"{type(error).__name__}: {error}")
