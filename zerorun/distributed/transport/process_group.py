"""The process group: how a process joins it, and how it leaves.

[Note: pending work and the end of a process]
gloo's threads drop the last references to tensors a little after the main thread has seen the result. A thread that does
so while the interpreter goes down is ended in the middle of C++ code, and the process aborts: its exit code is 134 and
not that of the error. So ``shutdown`` (called at exit) finishes what is in flight and then drops every process group,
which joins its threads. After an unhandled exception peers may never answer. Then it waits for nothing in flight, gives
the threads a moment to end, and ends the process without the interpreter if they do not.

[Note: a room for each start]
torchrun's store outlives the ranks that it starts again, and no number in the environment is another for each start. What
ranks of an earlier start have left there, addresses and counts, would be taken for that of this one. So rank 0 gives each
start a room, a prefix that nobody has used, and a rank takes it for this start's when rank 0 has answered its own word.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...errors import TopologyError
from ...launcher.copy_keeper import own_folder
from ...log import logger, warn_once
from ...watch.board import RENDEZVOUS, Phase, board, is_read, show_board, watch_other_hosts
from ...watch.launch_environment import choose_interface, launched
from ...watch.launch_environment import is_on_one_host as ranks_on_one_host
from ..device import default_device, device_of_rank, name_of, on_gpu, select
from ..script_calls import show_script_calls
from ..topology import forget_everyone
from ..waits import RollCall, waiting
from .communicator import forget_all_groups, has_communicators
from .control import given_up_is_over
from .message_waits import Waiter
from .statistics import caught_error
from .transport import drain_all

# Seconds that an exiting process gives collectives in flight to finish.
_EXIT_TIMEOUT = timedelta(seconds=10)
# Seconds that the threads of process groups have to end after an unhandled exception.
_EXIT_FAILED_TIMEOUT_S = 2.0
# Seconds that rank 0's host may take to answer. Between two looks out for its rendezvous: at least, at most, and as a share
# of the wait so far.
_LISTEN_TIMEOUT_S = 5.0
_LISTEN_RETRY_S, _LISTEN_MOST_S, _LISTEN_SHARE = 0.01, 0.5, 0.02
_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048  # ranks that may connect at once
_ANSWER_TIMEOUT = timedelta(seconds=0.5)  # of rank 0, before a rank looks whether it was an earlier one that it asked
_MOST_NAMED = 8  # ranks without a GPU that an error names
_LIMIT = timedelta(minutes=30)  # of a rendezvous and a collective, unless somebody says another: that of torch for gloo
_owns_process_group = False

_BACKENDS = ("nccl", "gloo", "mpi", "ccl")  # that scripts name


def init_distributed(
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
    *,
    dist_backend: str | None = None,
    timeout: timedelta | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    dist_init_required: bool | None = None,
    config: Any = None,
) -> None:
    """Join the process group that the launcher describes in the environment; alone, make a group of one.

    ``device``: or, as in scripts made for DeepSpeed, the backend. ``dist_backend``: "nccl" or "gloo", for tensors on a GPU;
    by default NCCL, unless ranks share a GPU, which it does not serve. On a CPU it is gloo, whatever is named. The keywords
    after ``timeout`` have no effect.

    Understands ``zerorun`` and ``torchrun`` (RANK, WORLD_SIZE, ...), ``srun``, ``mpirun`` with MASTER_ADDR and MASTER_PORT,
    and plain ``python``. If torch.distributed is initialised, only lets this rank's GPU be the one that "cuda" means.
    Raises TopologyError for a half-set environment, and on all ranks alike where only some have a GPU, and for NCCL where
    ranks share one.
    """
    global _owns_process_group
    show_board()
    own_folder()
    if device in _BACKENDS:
        device, dist_backend = None, str(device)
    device = device_of_rank(torch.device(device)) if device is not None else default_device()
    select(device)
    if is_read():
        show_script_calls()
    if dist.is_initialized():
        _watch_in_a_group_of_others()
        return
    limit = timeout if timeout is not None else timedelta(seconds=timeout_s) if timeout_s else _LIMIT
    rank, world_size, address = _rendezvous()
    if _is_one_host(address) and sys.platform == "linux":
        choose_interface(os.environ, "lo")  # it stays: gloo reads it again for each further group
    roll, words = RollCall("rendezvous", world_size), f"{RENDEZVOUS} {world_size} ranks at {address or 'this process'}"
    with waiting(words, roll.missing), _naming(roll, words, limit):
        meeting = _meet(rank, address, limit)
        room = _room(meeting, rank, limit)
        store = dist.PrefixStore(room, meeting)
        roll.sign(store, rank)
        watch_other_hosts(store, (address or "").rpartition(":")[0].strip("[]"))
        if rank == 0:
            _let_in(meeting, room, world_size)
        backends = _backends(device, store, rank, world_size, dist_backend)
        dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=limit)
    board.write(MET=time.monotonic_ns())
    _owns_process_group = True


def meet_at(url: str, rank: int, world_size: int, *, dist_backend: str | None, timeout: timedelta | None) -> None:
    """Join the process group of the ranks that meet at ``url``: torch's own rendezvous, such as "tcp://" or "file://".

    ``rank`` and ``world_size`` are -1 where ``url`` or the environment says them. The rest is as in ``init_distributed``.
    """
    global _owns_process_group
    device, limit = default_device(), timeout or _LIMIT
    select(device)
    with waiting(f"{RENDEZVOUS} ranks at {url}"):
        store, given_rank, given_size = next(rendezvous(url, rank, world_size, timeout=limit))
        store.set_timeout(limit)
        store = dist.PrefixStore("zerorun", store)
        backends = _backends(device, store, given_rank, given_size, dist_backend)
        dist.init_process_group(backends, store=store, rank=given_rank, world_size=given_size, timeout=limit)
    _owns_process_group = True


def _watch_in_a_group_of_others() -> None:
    """Have ranks on several hosts watched that have met before zerorun came."""
    if "MASTER_ADDR" in os.environ:
        watch_other_hosts(dist.distributed_c10d._get_default_store(), os.environ["MASTER_ADDR"])


@contextlib.contextmanager
def _naming(roll: RollCall, words: str, limit: timedelta) -> Iterator[None]:
    """Raise TopologyError, with the ranks that have not come, where torch would speak of its store.

    The rank that keeps the store is often the first whose time is over. The store ends with it, under the others' feet.
    """
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        absent, store_is_there = roll.missing_at_the_end()
        named = ", ".join(map(str, absent[:_MOST_NAMED])) + (", ..." if absent[_MOST_NAMED:] else "")
        told = f"rank{'s'[: len(absent) > 1]} {named} had not come"
        if not store_is_there:
            told = "the process that keeps the store of all, rank 0 or torchrun, has ended" + f"; {told}" * bool(absent)
        elif absent:
            told = f"after {limit.total_seconds():g} s {told}"
        else:
            raise
        raise TopologyError(
            f"{words}: {told} ({error}). "
            "Remedy: see what became of them in their output, and whether their hosts reach this address. Where ranks "
            "need longer before they call initialize(): init_distributed(timeout_s=...)."
        ) from error


def _meet(rank: int, address: str | None, timeout: timedelta) -> dist.Store:
    """Where the ranks leave words for one another. It waits for nobody but rank 0: so who is missing can be told."""
    if address is None:
        return dist.PrefixStore("zerorun", dist.HashStore())
    name, _, port = address.rpartition(":")
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    on_loopback = _is_one_host(address) and not kept_by_torchrun
    host = _LOOPBACK if on_loopback else name.strip("[]")  # torch itself would listen on every interface of the host
    serves, listener = rank == 0 and not kept_by_torchrun, None
    if serves and on_loopback:
        # Where it cannot be had, an earlier group of this process has it, and shares it; else torch says why not.
        with contextlib.suppress(OSError):
            listener = socket.create_server((host, int(port)), backlog=_BACKLOG).detach()
    elif not serves:
        _await_listener(host, int(port), timeout)
    try:
        store = dist.TCPStore(
            host,
            int(port),
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener,
        )
    except dist.DistNetworkError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        raise TopologyError(
            f"rank 0 keeps the rendezvous at {address}, and another process has port {port} already. Remedy: if a rank has "
            "started this program, start it without RANK and WORLD_SIZE, which it has from that rank (`env -u RANK -u "
            "WORLD_SIZE python ...`); else another MASTER_PORT."
        ) from error
    return dist.PrefixStore("zerorun", store)


def _room(store: dist.Store, rank: int, timeout: timedelta) -> str:
    """A prefix of keys that ranks of this start alone use; see [Note: a room for each start]. Raises DistStoreError."""
    word, asked = secrets.token_hex(8), ""
    if rank == 0:
        store.set("room", word)
        return word
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        room = store.get("room").decode()
        if room != asked:
            store.set(f"{room} is asked {store.add(f'{room} asks', 1)}", word)
            asked = room
        with contextlib.suppress(RuntimeError):  # nobody is in that room any more, or not all of them have come
            store.wait([f"{room} is open to {word}"], _ANSWER_TIMEOUT)
            return room
    raise dist.DistStoreError("rank 0 has not answered")


def _let_in(store: dist.Store, room: str, world_size: int) -> None:
    """Rank 0: answer the others, in the order in which they come."""
    for number in range(1, world_size):
        store.set(f"{room} is open to {store.get(f'{room} is asked {number}').decode()}", "")


def _is_one_host(address: str | None) -> bool:
    """True if all ranks are certainly on this host, so that nothing has to listen for others."""
    if address is None or address.startswith(("127.", "localhost:", "::1:", "[::1]:")):
        return True
    return ranks_on_one_host(os.environ)


def _await_listener(host: str, port: int, timeout: timedelta) -> None:
    """Return when rank 0 listens. torch itself would try again only after about 0.6 s, and print where it is in C++.

    Raises DistNetworkError if nobody does within ``timeout``.
    """
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < timeout.total_seconds():
        try:
            socket.create_connection((host, port), timeout=_LISTEN_TIMEOUT_S).close()
        except ConnectionRefusedError:
            time.sleep(min(max(_LISTEN_RETRY_S, waited * _LISTEN_SHARE), _LISTEN_MOST_S))
        except OSError:  # torch's own words for it are as good
            return
        else:
            return
    raise dist.DistNetworkError(f"nobody listens at port {port} of {host}")


def _backends(device: torch.device, store: dist.Store, rank: int, world_size: int, named: str | None) -> str:
    """Which backend serves which device. NCCL cannot serve two ranks that share one GPU; gloo can."""
    some_share = world_size > 1 and _some_share_a_gpu(device, store, rank, world_size)
    if not on_gpu(device):
        return "gloo"
    shared = some_share and not _nccl_serves_shared_gpus()
    if named == "nccl" and (shared or not dist.is_nccl_available()):
        reason = (
            "ranks share a GPU, which NCCL serves only with NCCL_MULTI_RANK_GPU_ENABLE=1"
            if shared
            else "this torch is built without NCCL"
        )
        raise TopologyError(
            f"init_distributed was told to use nccl, but {reason}. Remedy: start one rank for each GPU, or name no backend."
        )
    if shared and named is None:
        warn_once("ranks share a GPU, which NCCL does not serve: what they exchange goes through host memory, by gloo.")
    slow = shared or named == "gloo" or not dist.is_nccl_available()
    return "gloo" if slow else "cpu:gloo,cuda:nccl"


def _nccl_serves_shared_gpus() -> bool:
    """True if the user has told NCCL to do so: from version 2.30 on it can, as an experiment."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def _some_share_a_gpu(device: torch.device, store: dist.Store, rank: int, world_size: int) -> bool:
    """True, on all ranks alike, if two of them have the same GPU. What each can see may be a part of its host's.

    Raises TopologyError, on all ranks alike, if only some have a GPU.
    """
    if on_gpu(device):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        name = name_of(device, f"{device} of {visible!r} on {socket.gethostname()}")
        if store.add(f"gpu {name}", 1) > 1:
            store.set("shared", "")
    else:
        store.set(f"without {store.add('without', 1)}", f"rank {rank} on {socket.gethostname()}")
    if store.add("named", 1) == world_size:
        store.set("all named", "")
    store.wait(["all named"])
    without = store.add("without", 0)
    if 0 < without < world_size:
        named = ", ".join(store.get(f"without {number}").decode() for number in range(1, min(without, _MOST_NAMED) + 1))
        more = f" and {without - _MOST_NAMED} more" if without > _MOST_NAMED else ""
        raise TopologyError(
            f"{without} of {world_size} ranks use no GPU, and the others do: {named}{more}. Remedy: see why torch sees no "
            "GPU there (`nvidia-smi`, `zerorun-report`), or let all ranks compute on the CPU with ZERORUN_DEVICE=cpu."
        )
    return bool(store.check(["shared"]))


def _rendezvous() -> tuple[int, int, str | None]:
    """(rank, world size, "host:port" or None for a process on its own), from the environment."""
    told = launched(os.environ)
    if "WORLD_SIZE" not in told and "RANK" not in told:
        return 0, 1, None
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in told]
    if missing and "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        raise TopologyError(
            f"mpirun has started {told['WORLD_SIZE']} ranks, but the environment lacks {' and '.join(missing)}, where they "
            "meet. Remedy: start with `zerorun`, or give the ranks the host of rank 0 and a free port: "
            "`mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...`, in MPICH `-genv MASTER_ADDR HOST`."
        )
    if missing:
        raise TopologyError(
            f"the environment describes a distributed job but lacks {', '.join(missing)}. "
            "Remedy: start with `zerorun`, `torchrun` or `srun`, or unset RANK and WORLD_SIZE for one process."
        )
    os.environ.update(told)  # for the script, and all that asks for torchrun's variables
    return int(told["RANK"]), int(told["WORLD_SIZE"]), f"{told['MASTER_ADDR']}:{told['MASTER_PORT']}"


def shutdown() -> None:
    """Finish what is in flight and leave the process groups. Called at exit; afterwards engines are of no use."""
    if _inherited:
        return
    failed = hasattr(sys, "last_value")  # an unhandled exception
    if not failed:
        board.enter(Phase.LEFT)
        _tell_of_caught_error()
    drain_all(None if failed else _EXIT_TIMEOUT)
    if not (has_communicators() or _owns_process_group):
        return
    if not failed:
        _leave_groups()
    elif not _leaves_groups_soon():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(sys.last_value, KeyboardInterrupt) else 1)


def _tell_of_caught_error() -> None:
    """A script that catches RuntimeError for a lack of memory catches what ranks have to say of each other, too."""
    error = caught_error()
    if error is not None:
        logger.error(
            "the script has come to its end, but it has caught an error of zerorun, after which its ranks may have gone "
            f"different ways: {error} To catch a lack of memory alone, catch torch.OutOfMemoryError."
        )


def _leave_groups() -> None:
    forget_all_groups()
    forget_everyone()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group in a reference cycle keeps its threads


def _leaves_groups_soon() -> bool:
    """False if threads still wait for what may never come."""
    if Waiter.waiting() or not given_up_is_over():
        return False
    leaving = threading.Thread(target=_leave_groups, name="zerorun leaves", daemon=True)
    try:
        leaving.start()
    except RuntimeError:  # some versions of Python start no thread at exit
        return False
    leaving.join(_EXIT_FAILED_TIMEOUT_S)
    return not leaving.is_alive()


# The groups of the process from which this one was forked. Others wait for its end there, and not for that of this one.
_inherited: list[Any] = []


def _keep_inherited() -> None:
    """Never let go of groups in a forked process: that waits for threads which it does not have."""
    if dist.is_available() and dist.is_initialized():
        _inherited.extend(dist.distributed_c10d._world.pg_map)
        for group in _inherited:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # for the interpreter's end, too


atexit.register(shutdown)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_inherited)
