"""Ranks from a notebook: a function of a cell is called in forked processes, because no other process knows the cell."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from zerorun.launcher.bootstrap import die_with_parent
from zerorun.launcher.this_host import reserve_port, visible_gpus

from ..distributed.device import is_in_use
from ..distributed.transport.process_group import shutdown
from ..errors import LaunchError
from ..watch.launch_environment import launched
from ..zero.offload.host_link import interrupts_later

_END_S = 5.0  # what ranks have to end by themselves, once one has failed or they were told to


def notebook_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None) -> None:
    """Call ``function(*args)`` on ``num_processes`` ranks of this host, and return when all have ended.

    ``num_processes``: by default one for each GPU, or one. What the function returns is dropped. The ranks are forks of
    this process: they have its modules and variables as they are now, and change only their own. Each computes on one
    thread of the processor, because threads of this process are not in a fork. An interrupt ends them all.

    Raises LaunchError if a rank fails, with the whole traceback of the one that failed first; or before any is started, if
    this process has used a GPU or has joined a process group.
    """
    count = num_processes if num_processes is not None else visible_gpus(os.environ) or 1
    _refuse_what_forks_cannot(count)
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory(prefix="zerorun_notebook_") as folder, reserve_port(None) as port:
        job = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [
            context.Process(target=_work, args=(function, args, {**job, "RANK": rank, "LOCAL_RANK": rank}, Path(folder)))
            for rank in range(count)
        ]
        try:
            with interrupts_later():  # Python ignores what is raised in its hooks of a fork
                for process in ranks:
                    process.start()
            _wait_for(ranks)
        finally:
            _end(ranks)
        _raise_first_error(ranks, Path(folder))


def _refuse_what_forks_cannot(count: int) -> None:
    if count < 1:
        raise LaunchError(f"notebook_launcher was told to start {count} ranks. Remedy: 1 or more.")
    reason = ""
    if "fork" not in multiprocessing.get_all_start_methods():
        reason = "this system cannot fork processes. Remedy: write a script, and start it by `zerorun`."
    elif "RANK" in launched(os.environ) or dist.is_initialized():
        reason = "this process is a rank itself. Remedy: call the function, or restart the notebook's kernel."
    elif is_in_use():
        reason = (
            "this process has used its GPU, which forks of it could not use. Remedy: restart the notebook's kernel, and "
            "leave everything on a GPU to the function."
        )
    if reason:
        raise LaunchError(f"notebook_launcher cannot start ranks: {reason}")


def _work(function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, Any], folder: Path) -> None:
    """Be a rank: call the function, and leave its traceback in ``folder`` if it fails."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the notebook, which ends its ranks
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)  # more would wait for those of the parent
    atexit._clear()  # what is to be done when the notebook ends
    atexit.register(shutdown)
    with contextlib.suppress(AttributeError):
        del sys.last_value  # an error of an earlier cell
    try:
        function(*args)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        (folder / f"{time.time():.6f} {environment['RANK']}").write_text(traceback.format_exc())
        sys.last_value = error
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def _wait_for(ranks: Sequence[ForkProcess]) -> None:
    """Return when all have ended, or soon after one has failed."""
    until = None
    while running := [process for process in ranks if process.is_alive()]:
        connection.wait([process.sentinel for process in running], None if until is None else until - time.monotonic())
        if until is None and any(process.exitcode for process in ranks):
            until = time.monotonic() + _END_S
        if until is not None and time.monotonic() >= until:
            return


def _end(ranks: Sequence[ForkProcess]) -> None:
    started = [process for process in ranks if process.pid is not None]
    for tell in (ForkProcess.terminate, ForkProcess.kill):
        for process in started:
            if process.is_alive():
                tell(process)
        until = time.monotonic() + _END_S
        for process in started:
            process.join(max(0.0, until - time.monotonic()))


def _raise_first_error(ranks: Sequence[ForkProcess], folder: Path) -> None:
    ends = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode}
    if not ends:
        return
    told = sorted(folder.iterdir(), key=lambda path: float(path.name.split()[0]))
    if told:
        rank = int(told[0].name.split()[1])
        others = f" {len(ends) - 1} more ended after it." if len(ends) > 1 else ""
        raise LaunchError(f"rank {rank} of {len(ranks)} failed first.{others}\n\n{told[0].read_text()}")
    rank, code = next(iter(ends.items()))
    why = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    raise LaunchError(f"rank {rank} of {len(ranks)} ended {why}, and said nothing.")
