"""A rank of the jobs of harness.py: calls functions for the test process, each on a clean slate.

``python rank_process.py DESCRIPTOR FOLDER [LIBRARY ...]`` is a *nursery*: a process with one thread that has imported
torch, zerorun, the libraries and the modules of tests that it is told of, and forks a rank whenever it is asked to. That
takes milliseconds, where a new interpreter takes a second and a half.

A rank reads a ``Job`` from its pipe, makes its process group, calls the function, and answers with what it returned or
raised. When all ranks have returned, it looks at what the job has left behind: engines, parts of the process group, open
files, threads, memory. Whatever it finds is the job's failure. Then everything that a job may have changed is put back:
environment, folder, seeds, threads, dtypes and modes of torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any, NoReturn

import forked_scripts
import torch
import torch._dynamo  # what optimizers and determinism import late: a second of each rank
import torch.distributed as dist
from follow_device import follow_the_device, packed
from harness import Job, device, of_this_job, stack_file

import zerorun.engine.initialize  # noqa: F401  (what engines need)
from zerorun import log
from zerorun.distributed.transport import communicator as comm
from zerorun.distributed.transport import open_shards
from zerorun.launcher import copy_keeper
from zerorun.zero import gathers, gradients

_LEAK_BYTES = 16 * 2**20  # that a job may keep: caches of libraries
_RARELY = 50_000  # objects more than before, until garbage is collected
_GRACE_S = 1.0  # for threads that are ending
_KEPT_THREADS = ("zerorun waits", "tqdm_monitor")  # one for the process


def serve(pipe: Connection, folder: str) -> None:
    """Do jobs until the test process closes the pipe."""
    rank = int(os.environ["RANK"])
    with stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then closes the pipe
        torch.set_num_threads(1)
        _join(Path(folder) / f"alone-{rank}", 0, 1)  # opens what stays open
        dist.destroy_process_group()
        if on_gpu():
            torch.ones(8, 8, device=device()).mm(torch.ones(8, 8, device=device()))  # opens what stays open, too
        slate = Slate()
        _answer(pipe, ("ok", None))
        while True:
            try:
                job: Job = pickle.loads(pipe.recv_bytes())
                os.environ.update(job.environment)
                try:
                    _join(Path(folder) / f"store-{job.number}", rank, job.world_size)
                    _answer(pipe, ("ok", _call(job)))
                except BaseException:
                    _answer(pipe, ("error", traceback.format_exc()))
                    continue  # the test process ends this one
                pipe.recv_bytes()  # all ranks have returned
            except EOFError:
                os._exit(0)
            try:
                slate.clean()
                _answer(pipe, ("ok", None))
            except BaseException:
                _answer(pipe, ("error", traceback.format_exc()))


def on_gpu() -> bool:
    return device().startswith("cuda")


def _join(store: Path, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)


def _answer(pipe: Connection, answer: tuple[str, Any]) -> None:
    try:
        message = packed(answer)
    except Exception:
        message = pickle.dumps(("error", f"the result cannot be pickled\n{traceback.format_exc()}"))
    pipe.send_bytes(message)


def _call(job: Job) -> Any:
    value: Any = _load(job.module, job.file)
    for part in job.function.split("."):
        value = getattr(value, part)
    return value(*pickle.loads(job.args))


def _load(module_name: str, file: str) -> Any:
    """The module as the test process knows it, also if pytest put its folder on the path only there."""
    if module_name not in sys.modules:
        folder = str(Path(file).parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


class Slate:
    """How this process was before its first job, and what a job may not leave behind."""

    def __init__(self) -> None:
        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)}
        self._is_new = True  # what a first job uses, as each optimizer, keeps caches: 23 MiB where it uses all
        self._note()

    def _note(self) -> None:
        self._modules, self._threads = len(sys.modules), set(threading.enumerate())
        self._files, self._bytes = open_files(), bytes_in_use()
        gc.freeze()  # what is there now need not be looked through after each job

    def clean(self) -> None:
        """Undo what a job may do. Raises AssertionError if it has left something behind that cannot be undone."""
        of_this_job.clear()
        self._end_engines()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        torch.manual_seed(0)
        random.seed(0)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        log._warned.clear()
        copy_keeper.forget_folder()
        left, self._is_new = self._left(), False
        self._note()
        assert not left, "the job has left behind: " + "; ".join(left)

    def _end_engines(self) -> None:
        """No engine may outlive its test: neither its communicator nor collectives in flight."""
        if comm._live or open_shards._open:
            gc.collect()
        if comm._live:  # a ring that goes by something frozen, such as a function that torch has compiled for this job
            gc.unfreeze()
            gc.collect()
        alive, opened = len(comm._live), len(open_shards._open)
        for communicator in list(comm._live):
            for pending in list(communicator.statistics.in_flight):
                pending.wait(timedelta(seconds=1))
        comm._live.clear()
        assert not alive, f"{alive} engine(s) are still alive after the function has returned: destroy() does not free them"
        assert not opened, f"{opened} block(s) that show whole parameters are still open"

    def _left(self) -> list[str]:
        """What is there now and was not before: threads, and open files and memory that nothing but garbage holds."""
        found = self._look()
        if found:
            gc.collect()
            for thread in filter(self._is_of_job, threading.enumerate()):
                thread.join(_GRACE_S)
            found = self._look()
        return found

    def _look(self) -> list[str]:
        library = len(sys.modules) > self._modules  # one that has just been imported may keep what it likes
        threads = [thread.name for thread in threading.enumerate() if self._is_of_job(thread)]
        found = [f"thread {name}" for name in threads if not library or name.startswith("zerorun")]
        if library:
            return found
        if on_gpu():  # whose driver opens and takes what it likes
            return found
        found += [f"open {what} (descriptor {number})" for number, what in sorted(open_files() - self._files)]
        grown = bytes_in_use() - self._bytes
        if grown > _LEAK_BYTES and not self._is_new:
            found.append(f"{grown / 2**20:.0f} MiB of memory")
        return found

    def _is_of_job(self, thread: threading.Thread) -> bool:
        if isinstance(thread, threading._DummyThread):  # autograd's for a GPU
            return False
        return thread not in self._threads and thread.name not in _KEPT_THREADS


def open_files() -> set[tuple[int, str]]:
    """Each open descriptor and what it stands for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:  # the folder that is just being read
            continue
    return found


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keep")
    ]


def bytes_in_use() -> int:
    """Bytes that the C library has given out, tensors among them; 0 where it does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    told = mallinfo()
    return int(told.uordblks + told.hblkhd)


def threads() -> list[str]:
    """The names of this process' threads."""
    return [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")]


def nursery(control: Connection, folder: str) -> None:
    """Fork ranks, and tell how they ended, until the test process closes the pipe. They end with this process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_RARELY)  # which takes a twentieth less time: jobs are short, and after each all is looked through
    while True:
        try:
            what, *about = control.recv()
        except EOFError:
            os._exit(0)
        if what == "load":
            _load(*about)
            assert len(threads()) == 1, f"{about} starts threads, which ranks would not have: {threads()}"
            gc.collect()
            gc.freeze()
        elif what == "rank":
            descriptor = recv_handle(control)
            pid = os.fork()
            if not pid:
                control.close()
                be_rank(*about, Connection(descriptor), folder)
            os.close(descriptor)
            control.send(pid)
        else:
            found, status = os.waitpid(*about, os.WNOHANG if what == "poll" else 0)
            control.send(os.waitstatus_to_exitcode(status) if found else None)


def be_rank(rank: int, pipe: Connection, folder: str) -> NoReturn:
    """What a forked process does."""
    forked_scripts.end_with_parent()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    random.seed()
    code = 1
    try:
        serve(pipe, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def prepare(folder: str, *libraries: str) -> None:
    """Import what nurseries share."""
    forked_scripts.prepare(*libraries)


def main(control: Connection, folder: str, *libraries: str) -> None:
    """Be the nursery of a process of tests."""
    for module in (gathers, gradients):  # zerorun may have been imported in another environment
        module.ORDER_TIMEOUT_S = float(os.environ["ZERORUN_ORDER_TIMEOUT_S"])
        module.IN_TIME = f"within {module.ORDER_TIMEOUT_S:.0f} s"
    if on_gpu():
        follow_the_device()
    nursery(control, folder)


if __name__ == "__main__":
    forked_scripts.end_with_parent()
    prepare(*sys.argv[2:])
    main(Connection(int(sys.argv[1])), *sys.argv[2:])
