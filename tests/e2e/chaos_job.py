"""Jobs that are killed, starved and misled, and the process that starts them. For test_checkpoint_chaos.py.

``python chaos_job.py DESCRIPTOR`` is a *nursery*: a process with one thread that has imported torch and zerorun. For every
``Order`` that it reads from the pipe it forks the ranks of a job, which makes a fresh process cost milliseconds instead of
seconds. It kills them as the order says and answers with what each rank returned, raised, or died of.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import hashlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerorun
import zerorun.engine.initialize
from zerorun.checkpoint.directory import REPLACED, newest_first
from zerorun.checkpoint.manifest import MANIFEST, read_manifest
from zerorun.checkpoint.save import versions
from zerorun.errors import CheckpointError, DamagedError
from zerorun.zero.value_access import safe_get_full_fp32_param, safe_get_full_optimizer_state

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.002
_GRACE_S = 8.0  # for the other ranks, after one has ended
GIVEN_UP = 3  # exit code of a rank that noticed that another one was killed


# -- orders and answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """SIGKILL to ``ranks``: ``delay_s`` after all ranks are ready, by the nursery. The job's own kills are ``Strike``."""

    ranks: tuple[int, ...]
    delay_s: float


@dataclass(frozen=True)
class Strike:
    """SIGKILL by a rank to itself, in its save number ``save``: at the ``nth`` event of the name ``event``.

    Names are those of ``check_point``, or "any": any change of the file system. Asynchronous saves count as one.
    """

    rank: int
    save: int
    event: str
    nth: int


@dataclass(frozen=True)
class Order:
    """Call the function ``job`` of this file on ``world`` ranks."""

    job: str
    world: int
    options: dict[str, Any]
    kill: Kill | None = None
    timeout_s: float = 60.0
    group_timeout_s: float = 60.0  # of the default process group
    peer_memory: bool = True
    uid: int | None = None


@dataclass
class Ended:
    """How one rank ended: "ok" with what it returned, "error" with the stack, "killed" with the signal, or "hung"."""

    kind: str
    value: Any = None
    log: str = ""


# -- the nursery -------------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(pipe: Connection) -> None:
    """Carry out orders until the pipe is closed."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _import_the_rest()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: forking is not safe"
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        pipe.send(_carry_out(order))


def _import_the_rest() -> None:
    """What a job imports late, so that no child has to."""
    import numpy.random  # noqa: F401
    import torch._dynamo  # optimizers do
    import torch._subclasses.schema_check_mode
    import torch.distributed.device_mesh
    import torch.utils._device
    import torch.utils.serialization  # noqa: F401


def _carry_out(order: Order) -> list[Ended]:
    with tempfile.TemporaryDirectory(prefix="zerorun-chaos-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        processes: dict[int, int] = {}
        for rank in range(order.world):
            process = os.fork()
            if process == 0:
                _child(order, rank, folder)
            processes[rank] = process
        codes = _attend(order, processes, folder)
        return [_ended(codes[rank], folder, rank) for rank in range(order.world)]


def _import_what_comes_later() -> None:
    """Somebody else may not be allowed to read the folder that Python's packages are in."""
    versions()


def _child(order: Order, rank: int, folder: Path) -> None:
    """One rank. Does not return."""
    code = 1
    try:
        _die_with_parent()
        log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if order.uid is not None:
            _import_what_comes_later()
            os.setgid(order.uid)
            os.setuid(order.uid)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(order.world),
            LOCAL_WORLD_SIZE=str(order.world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",  # the group is made from a file
            ZERORUN_DEVICE="cpu",
            ZERORUN_PEER_MEMORY=str(int(order.peer_memory)),
        )
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), order.world),
            rank=rank,
            world_size=order.world,
            timeout=timedelta(seconds=order.group_timeout_s),
        )
        value = globals()[order.job](Rank(rank, order.world, folder), **order.options)
        (folder / f"value.{rank}").write_bytes(pickle.dumps(value))
        code = 0
    except GaveUp:
        traceback.print_exc()
        code = GIVEN_UP
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _attend(order: Order, processes: dict[int, int], folder: Path) -> dict[int, int | None]:
    """Wait for the ranks, and kill them as asked: rank -> wait status; None for one that had to be ended."""
    codes: dict[int, int | None] = {}
    deadline, strike = time.monotonic() + order.timeout_s, None
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for rank, process in processes.items():
            if rank not in codes:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    codes[rank] = status
                    if status:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
        if order.kill is not None and strike is None and all((folder / f"ready.{rank}").exists() for rank in processes):
            strike = time.monotonic() + order.kill.delay_s
        if strike is not None and time.monotonic() >= strike:
            assert order.kill is not None
            for rank in order.kill.ranks:
                if rank not in codes:
                    os.kill(processes[rank], signal.SIGKILL)
            strike = float("inf")
        time.sleep(_POLL_S)
    for rank, process in processes.items():
        if rank not in codes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGUSR1)
    if len(codes) < len(processes):
        time.sleep(0.3)  # for the stacks
    for rank, process in processes.items():
        if rank not in codes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            codes[rank] = None
    return codes


def _ended(status: int | None, folder: Path, rank: int) -> Ended:
    path = folder / f"log.{rank}"
    log = path.read_text(errors="replace") if path.exists() else ""
    if status is None:
        return Ended("hung", None, log)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return Ended("ok", pickle.loads((folder / f"value.{rank}").read_bytes()), log)
    return Ended("killed", -code, log) if code < 0 else Ended("gave up" if code == GIVEN_UP else "error", code, log)


# -- what jobs share ---------------------------------------------------------------------------------------------


class GaveUp(Exception):
    """This rank cannot go on, because another one was killed."""


@dataclass(frozen=True)
class Rank:
    """Who a job function is."""

    rank: int
    world: int
    folder: Path

    def ready(self) -> None:
        """The nursery may kill from now on."""
        (self.folder / f"ready.{self.rank}").touch()

    def together(self) -> None:
        """Wait for the other ranks."""
        dist.barrier()


class Description:
    """The configuration of a Hugging Face model, as far as checkpoints look at it."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "net", "hidden_size": 12}


class Layer(nn.Module):
    """A linear layer that drops random elements, so that a run shows whether its random numbers go on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * (torch.rand(x.shape[-1]).to(x.dtype) + 0.5)


class Net(nn.Module):
    """Layers, and a buffer that counts the forwards."""

    def __init__(self, width: int = 12, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.config = Description()

    def save_pretrained(self) -> None:
        """There, so that a checkpoint has a config.json."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = layer(x)
        return x


class Counting(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


SAMPLES = 64


def make_engine(
    module: nn.Module | None = None,
    *,
    stage: int = 2,
    bf16: bool = False,
    keep: int | None = None,
    width: int = 12,
    layers: int = 3,
    scheduler: bool = True,
    data: bool = True,
    topology: Any = None,
    **changes: Any,
) -> zerorun.Engine:
    """An engine with all the components that a checkpoint can hold, on this rank."""
    torch.manual_seed(7)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"keep_last": keep} if keep else {},
    }
    if scheduler:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 1e-2}}
    if bf16:
        config["bf16"] = {"enabled": True}
    config |= changes
    samples = list(torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(1)))
    engine = zerorun.initialize(
        module or Net(width, layers), config, training_data=samples if data else None, topology=topology
    )
    torch.manual_seed(100 + dist.get_rank())
    return engine


def train(engine: zerorun.Engine, batches: Any = None, scale: float = 1.0) -> None:
    """One optimizer step."""
    batch = next(batches) if batches is not None else torch.ones(2, 12)
    engine.backward(engine(batch).square().mean() * scale)
    engine.step()


class Batches:
    """The batches of the engine's loader, without end."""

    def __init__(self, engine: zerorun.Engine) -> None:
        self._loader: Any = engine.dataloader
        self._now: Any = iter(())

    def __next__(self) -> torch.Tensor:
        for _ in range(2):
            for batch in self._now:
                return batch
            self._now = iter(self._loader)
        raise AssertionError("no data")


def digest(engine: zerorun.Engine) -> str:
    """A checksum of weights, buffers, masters, moments, learning rate and position in the data. Collective."""
    summed = hashlib.sha256()
    for name, value in sorted(engine.state_dict().items()):
        summed.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for name, param in engine.module.named_parameters():
        for value in (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
            safe_get_full_optimizer_state(param, "exp_avg_sq"),
        ):
            summed.update(name.encode() + (value.contiguous().numpy().tobytes() if value is not None else b"none"))
    position = engine.dataloader.state_dict() if engine.dataloader is not None else {}
    summed.update(repr((engine.get_lr(), engine.counters(), sorted(position.items()))).encode())
    return summed.hexdigest()[:16]


class Journal:
    """What a job says of its saves, in a file that is durable before the save begins."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())
        os.fsync(self._file)

    @staticmethod
    def read(path: Path) -> tuple[dict[int, str], list[int]]:
        """(step -> digest of all saves that began, steps of the saves that returned)."""
        begun: dict[int, str] = {}
        returned = []
        for line in path.read_text().splitlines() if path.exists() else []:
            kind, step, *rest = line.split()
            if kind == "about":
                assert begun.setdefault(int(step), rest[0]) == rest[0], f"a resumed run has another state at step {step}"
            else:
                returned.append(int(step))
        return begun, returned


_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.utime", "os.chmod", "os.link"}


@dataclass
class Striker:
    """Counts what happens in a save, and carries out a ``Strike``."""

    rank: int
    strike: Strike | None
    counts: Counter[str] = field(default_factory=Counter)
    save: int = 0
    inside: bool = False

    def begin(self) -> None:
        """A save begins."""
        self.save += 1
        self.inside = True
        self.counts = Counter()

    def end(self) -> None:
        self.inside = False

    def happens(self, name: str) -> None:
        if not self.inside:
            return
        self.counts[name] += 1
        plan = self.strike
        if plan is not None and (plan.rank, plan.save, plan.event, plan.nth) == (
            self.rank,
            self.save,
            name,
            self.counts[name],
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Notice every change of the file system in this process from now on."""
        write, pwrite, fsync = os.write, os.pwrite, os.fsync

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
                self.happens("any")

        def writing(file: int, data: Any, *at: int) -> int:
            self.happens("any")
            return pwrite(file, data, *at) if at else write(file, data)

        def syncing(fd: Any) -> None:
            self.happens("any")
            fsync(fd)

        sys.addaudithook(audit)
        os.write = os.pwrite = writing
        os.fsync = syncing


# -- jobs: killed ------------------------------------------------------------------------------------------------


def long_run(
    rank: Rank,
    *,
    directory: str,
    journal: str,
    saves: int,
    every: int = 1,
    asynchronous: bool = False,
    tag: str | None = None,
    strike: Strike | None = None,
    local: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Resume, compare with the journal, then train and save every so many steps. What each save did, by event."""
    engine = make_engine(**options)
    folder = Path(directory) / str(rank.rank) if local else Path(directory)
    loaded = _resume(engine, folder, Path(journal))
    striker = Striker(rank.rank, strike)
    striker.watch()
    engine.checkpointer.check_point = striker.happens
    notes = Journal(Path(journal)) if rank.rank == 0 else None
    batches = Batches(engine)
    rank.together()
    rank.ready()
    waiting = None
    counts = []
    try:
        for _ in range(saves):
            for _ in range(every):
                train(engine, batches)
            step, found = engine.global_steps, digest(engine)
            if notes:
                notes.note("about", step, found)
            if not asynchronous or not striker.save:
                striker.begin()
            engine.save_checkpoint(folder, tag, {"step": step, "tensor": torch.full((3,), step)}, asynchronous=asynchronous)
            if not asynchronous:
                striker.end()
                counts.append(dict(striker.counts))
            if notes and waiting is not None:
                notes.note("saved", waiting)
            waiting = step if asynchronous else None
            if notes and not asynchronous:
                notes.note("saved", step)
        engine.wait_for_checkpoint()
        if notes and waiting is not None:
            notes.note("saved", waiting)
        engine.destroy()
    except (RuntimeError, OSError) as error:  # what a survivor of a kill may meet: in a save, or in a collective
        raise GaveUp(f"{type(error).__name__}: {error}") from error
    return {"loaded": loaded, "counts": counts}


def _resume(engine: zerorun.Engine, folder: Path, journal: Path) -> int:
    """Load the newest, and check it against the journal. The step that was loaded."""
    path, client = engine.load_checkpoint(folder)
    begun, returned = Journal.read(journal)
    if path is None:
        assert not returned, f"steps {returned} were saved, and nothing is found"
        return 0
    step = engine.global_steps
    assert step >= max(returned, default=0), f"step {max(returned)} was saved, and {step} is loaded from {path}"
    assert step in begun, f"{path} holds step {step}, which was never saved"
    assert digest(engine) == begun[step], f"{path} has not the state that was saved at step {step}"
    assert client["step"] == step
    assert client["tensor"].tolist() == [step] * 3
    return step


def check_newest(rank: Rank, *, directory: str, journal: str, **options: Any) -> int:
    """Load the newest in a fresh job. The step."""
    engine = make_engine(**options)
    step = _resume(engine, Path(directory), Path(journal))
    engine.destroy()
    return step


def check_all(rank: Rank, *, directory: str, journal: str, **options: Any) -> list[int]:
    """Load every checkpoint by its tag. Their steps, newest first."""
    engine = make_engine(**options)
    begun, _ = Journal.read(Path(journal))
    steps = []
    for tag in newest_first(Path(directory)):
        if tag.startswith(REPLACED):
            continue
        engine.load_checkpoint(directory, tag)
        assert digest(engine) == begun[engine.global_steps], tag
        steps.append(engine.global_steps)
    engine.destroy()
    return steps


# -- jobs: a disk that does not do what it should ----------------------------------------------------------------


def _entries(folder: Path) -> set[str]:
    """What is in a directory of checkpoints, by path."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _fill(folder: Path, what: str) -> Path:
    """Leave so much room on the file system of ``folder`` that ``what`` of a checkpoint fits. What to delete afterwards."""
    ballast = folder.parent / "ballast"
    ballast.mkdir()
    if what == "no more files":
        with suppress(OSError):
            for number in range(100_000):
                (ballast / str(number)).touch()
        return ballast
    room = _room(next(path for path in folder.iterdir() if path.is_dir()), what)
    state = os.statvfs(folder)
    with (ballast / "file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - room)
    return ballast


def _refusal(action: Callable[[], object]) -> str:
    """The message of the CheckpointError that ``action`` raises."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")


def _failing_save(engine: zerorun.Engine, folder: Path, asynchronous: bool) -> str:
    """The message of a save that fails, at once or when it is waited for, and only once."""
    if not asynchronous:
        return _refusal(lambda: engine.save_checkpoint(folder))
    engine.save_checkpoint(folder, asynchronous=True)
    message = _refusal(engine.wait_for_checkpoint)
    engine.wait_for_checkpoint()
    return message


def _on_disk(size: int) -> int:
    return -(-size // 4096) * 4096


def _room(checkpoint: Path, what: str) -> int:
    """How much is to be left on the disk, so that ``what`` of a checkpoint like this one fits."""
    sizes = {path.name: _on_disk(path.stat().st_size) for path in checkpoint.iterdir()}
    everything = sum(sizes.values())
    tensors = sum(size for name, size in sizes.items() if name.endswith(".safetensors") and not name.startswith("state"))
    return {
        "nothing": 0,
        "one page": 4096,
        "a third": _on_disk(everything // 3),
        "most": _on_disk(tensors * 9 // 10),
        "all but small files": tensors,
        "all but the manifest": everything - sizes[MANIFEST],
    }[what]


def full_disk(rank: Rank, *, directories: list[str], narrow: int, rooms: list[str], asynchronous: bool) -> list[str]:
    """Save while the disk of rank ``narrow`` has little room. The messages: for each of ``rooms``, of both kinds."""
    folder = Path(directories[rank.rank])
    engine = make_engine(width=96, keep=1)
    batches = Batches(engine)
    train(engine, batches)
    engine.save_checkpoint(folder)
    kept, messages = digest(engine), []
    for what in rooms:
        step = engine.global_steps
        before = _entries(folder)
        train(engine, batches)
        rank.together()
        if rank.rank == narrow:
            ballast = _fill(folder, what)
        rank.together()
        messages.append(_failing_save(engine, folder, asynchronous))
        rank.together()  # the leader has cleaned up
        assert _entries(folder) == before, f"left over: {_entries(folder) - before}"
        train(engine, batches)
        path, _ = engine.load_checkpoint(folder)
        assert engine.global_steps == step, path
        assert digest(engine) == kept
        rank.together()
        if rank.rank == narrow:
            shutil.rmtree(ballast)
        rank.together()
        train(engine, batches)
        kept = digest(engine)
        engine.save_checkpoint(folder, asynchronous=asynchronous)
        engine.wait_for_checkpoint()
        assert engine.load_checkpoint(folder)[0] == folder / f"global_step{step + 1}"
        assert digest(engine) == kept
    engine.destroy()
    return messages


def closed_directory(rank: Rank, *, directory: str, close: list[str], reopen: list[str], asynchronous: bool) -> str:
    """Save while the commands of ``close`` have made the directory unwritable. The message."""
    folder = Path(directory)
    engine = make_engine()
    batches = Batches(engine)
    train(engine, batches)
    engine.save_checkpoint(folder)
    kept = digest(engine)
    train(engine, batches)
    before = _entries(folder)
    rank.together()
    if rank.rank == 0:
        subprocess.run(close, check=True)
    rank.together()
    message = _failing_save(engine, folder, asynchronous)
    rank.together()
    assert _entries(folder) == before
    train(engine, batches)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    assert digest(engine) == kept
    rank.together()
    if rank.rank == 0:
        subprocess.run(reopen, check=True)
    rank.together()
    train(engine, batches)
    engine.save_checkpoint(folder, asynchronous=asynchronous)
    engine.destroy()
    assert _entries(folder) > before
    return message


def unreadable_file(rank: Rank, *, directory: str) -> list[str]:
    """Load when this user may not read a file of the newest checkpoint. The warnings."""
    folder = Path(directory)
    engine = make_engine()
    for _ in range(2):
        train(engine)
        engine.save_checkpoint(folder)
    rank.together()
    if rank.rank == 0:
        (folder / "global_step2" / "optimizer.exp_avg-00002-of-00002.safetensors").chmod(0)
    rank.together()
    with _Heard() as heard:
        engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    engine.destroy()
    return heard.warnings


# -- jobs: damage ------------------------------------------------------------------------------------------------


class _Heard(logging.Handler):
    """The warnings of zerorun while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def __enter__(self) -> _Heard:
        logging.getLogger("zerorun").addHandler(self)
        return self

    def __exit__(self, *unused: object) -> None:
        logging.getLogger("zerorun").removeHandler(self)


def pair_of_checkpoints(rank: Rank, *, directory: str, local: bool = False, **options: Any) -> dict[int, str]:
    """Save steps 1 and 2. Their digests."""
    engine = make_engine(**options)
    folder = Path(directory) / str(rank.rank) if local else Path(directory)
    found = {}
    for _ in range(2):
        train(engine, Batches(engine) if engine.dataloader is not None else None)
        found[engine.global_steps] = digest(engine)
        engine.save_checkpoint(folder)
    engine.destroy()
    return found


@dataclass
class Loaded:
    """What came of one load without, and one with a tag."""

    step: int = 0
    digest: str = ""
    warnings: list[str] = field(default_factory=list)
    error: str = ""  # of the load with the tag; empty if there was none
    damaged: bool = False  # it was a DamagedError


def load_all(
    rank: Rank, *, directories: list[str], tag: str, local: bool = False, trained: bool = False, **options: Any
) -> list[Loaded]:
    """Load from each of ``directories``: the newest, and then ``tag``."""
    engine = make_engine(**options)
    results = []
    for directory in directories:
        folder = Path(directory) / str(rank.rank) if local else Path(directory)
        result = Loaded()
        with _Heard() as heard:
            engine.load_checkpoint(folder)
        result.step, result.digest, result.warnings = engine.global_steps, digest(engine), heard.warnings
        try:
            engine.load_checkpoint(folder, tag)
        except CheckpointError as error:
            result.error, result.damaged = str(error), isinstance(error, DamagedError)
        results.append(result)
    engine.destroy()
    return results


def go_on(rank: Rank, *, directories: list[str], **options: Any) -> list[str]:
    """Resume from each of ``directories``, train to the step that was damaged, save and load it. What went wrong."""
    engine = make_engine(**options)
    wrong = []
    for directory in directories:
        engine.load_checkpoint(directory)
        while engine.global_steps < 2:
            train(engine, Batches(engine))
        found = digest(engine)
        try:
            path = engine.save_checkpoint(directory)
            engine.load_checkpoint(directory, path.name)
            assert digest(engine) == found
            wrong.append("")
        except CheckpointError as error:
            wrong.append(str(error))
    engine.destroy()
    return wrong


def lacking(rank: Rank, *, directory: str, component: str) -> str:
    """Load a checkpoint without a component; then again, with leave to do so, and train on. The first one's message."""
    engine = make_engine()
    batches = Batches(engine)
    message = _refusal(lambda: engine.load_checkpoint(directory))
    path, _ = engine.load_checkpoint(directory, allow_missing=[component])
    assert path is not None
    assert engine.global_steps == 2
    train(engine, batches)
    engine.destroy()
    return message


def load_with_extra_state(rank: Rank, *, directory: str, forget: bool) -> int:
    """Save and load a module with state that is no tensor; ``forget``: it is not in the checkpoint. Its calls after it."""
    engine = make_engine(Counting(), data=False, scheduler=False)
    train_counting(engine, 3)
    engine.save_checkpoint(directory)
    if forget:
        if rank.rank == 0:
            path = Path(directory) / "global_step3"
            manifest = read_manifest(path)
            manifest.extra_state = None
            (path / MANIFEST).write_text(manifest.to_text())
        rank.together()
    train_counting(engine, 2)
    engine.load_checkpoint(directory)
    calls = engine.module.calls
    engine.destroy()
    return calls


def train_counting(engine: zerorun.Engine, steps: int) -> None:
    """Steps of the model Counting."""
    for _ in range(steps):
        train(engine, iter([torch.ones(2, 4)]))


class Flat(nn.Module):
    """Matrices without layers around them: all one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x


def one_unit(rank: Rank, *, directory: str, save: bool) -> Loaded:
    """A model of one unit in bf16, of which each rank reads other files: save steps 1 and 2, or load."""
    engine = make_engine(Flat(), stage=1, bf16=True, data=False, scheduler=False)
    assert len(engine.units) == 1
    for _ in range(2 if save else 0):
        train(engine, iter([torch.ones(2, 16)]))
        engine.save_checkpoint(directory)
    if save:
        engine.destroy()
        return Loaded(2)
    with _Heard() as heard:
        engine.load_checkpoint(directory)
    step = engine.global_steps
    message = _refusal(lambda: engine.load_checkpoint(directory, "global_step2"))
    engine.destroy()
    return Loaded(step, "", heard.warnings, message)


# -- jobs: asynchronous ------------------------------------------------------------------------------------------


def mutating(rank: Rank, *, directory: str, journal: str, **options: Any) -> None:
    """Save asynchronously to a slow disk while the training goes on."""
    engine = make_engine(**options)
    batches = Batches(engine)
    notes = Journal(Path(journal)) if rank.rank == 0 else None
    engine.checkpointer.check_point = lambda point: time.sleep(0.01)
    for _ in range(3):
        train(engine, batches)
        found = digest(engine)
        if notes:
            notes.note("about", engine.global_steps, found)
        client = {"step": engine.global_steps, "tensor": torch.full((3,), engine.global_steps)}
        engine.save_checkpoint(directory, None, client, asynchronous=True)
        client["tensor"].fill_(-1)
        client["step"] = -1
        assert not (Path(directory) / f"global_step{engine.global_steps}").exists()
        for _ in range(3):
            train(engine, batches)
        torch.rand(100)
    engine.destroy()
    assert rank.world == 1 or len(newest_first(Path(directory))) == 3


def one_at_a_time(rank: Rank, *, directory: str) -> None:
    """The second save begins when the first is over; destroy() waits for the second."""
    engine = make_engine()
    batches = Batches(engine)
    points: list[tuple[str, str]] = []
    now = ""

    def slowly(point: str) -> None:
        points.append((now, point))
        time.sleep(0.02)

    engine.checkpointer.check_point = slowly
    for now in ("first", "second"):
        train(engine, batches)
        engine.save_checkpoint(directory, now, asynchronous=True)
        if now == "first":
            assert not (Path(directory) / "first").exists()
    assert (Path(directory) / "first" / MANIFEST).exists()
    engine.destroy()
    assert (Path(directory) / "second" / MANIFEST).exists()
    assert (Path(directory) / "latest").read_text() == "second"
    assert rank.rank or [point for _, point in points].count("publish") == 2


def failure_surfaces(rank: Rank, *, directory: str, at: str, fails: int, point: str, of_disk: bool) -> str:
    """An asynchronous save in which rank ``fails`` has no space, or no memory: the next call raises, once. Its message."""
    folder = Path(directory)
    engine = make_engine()
    batches = Batches(engine)
    train(engine, batches)
    engine.save_checkpoint(folder)

    def failing(now: str) -> None:
        if now == point and rank.rank == fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "planted") if of_disk else MemoryError("planted")

    engine.checkpointer.check_point = failing
    train(engine, batches)
    engine.save_checkpoint(folder, asynchronous=True)
    train(engine, batches)
    engine.checkpointer.check_point = lambda point: None
    calls: dict[str, Callable[[], object]] = {
        "wait": engine.wait_for_checkpoint,
        "save": lambda: engine.save_checkpoint(folder),
        "save asynchronously": lambda: engine.save_checkpoint(folder, asynchronous=True),
        "load": lambda: engine.load_checkpoint(folder),
        "export": lambda: engine.export(folder.parent / "exported"),
        "destroy": engine.destroy,
    }
    message = _refusal(calls[at])
    rank.together()
    assert {path.name for path in folder.iterdir()} <= {"global_step1", "global_step2", "latest"}
    if at != "destroy":
        engine.wait_for_checkpoint()
        engine.save_checkpoint(folder, "after")
        engine.load_checkpoint(folder)
    engine.destroy()
    return message


def slow_disk(rank: Rank, *, directory: str, journal: str, asynchronous: bool, delay_s: float) -> int:
    """Rank 0's disk takes longer than a collective of the training may. Steps that were done in the meantime."""
    engine = make_engine()
    batches = Batches(engine)
    train(engine, batches)
    found = digest(engine)
    slept: list[str] = []

    def slowly(point: str) -> None:
        if rank.rank == 0 and point == "sync" and not slept:
            slept.append(point)
            time.sleep(delay_s)

    engine.checkpointer.check_point = slowly
    if rank.rank == 0:
        Journal(Path(journal)).note("about", engine.global_steps, found)
    client = {"step": 1, "tensor": torch.full((3,), 1)}
    engine.save_checkpoint(directory, None, client, asynchronous=asynchronous)
    steps = 0
    if asynchronous:
        begin = torch.tensor([time.monotonic()])
        dist.broadcast(begin, 0)
        going = torch.ones(1)
        while going.item():
            train(engine, batches)
            steps += 1
            assert not (Path(directory) / "global_step1").exists() or rank.rank or slept
            going[0] = float(not (Path(directory) / "latest").exists())
            dist.broadcast(going, 0)
            time.sleep(0.1)
    engine.wait_for_checkpoint()
    for _ in range(2):
        train(engine, batches)
    engine.destroy()
    return steps


# -- jobs: what ranks must agree on ------------------------------------------------------------------------------


def _unstorable(kind: str) -> Any:
    import numpy

    endless: list[Any] = []
    endless.append(endless)
    return {
        "object": object(),
        "sparse tensor": torch.eye(2).to_sparse(),
        "complex128": torch.ones(2, dtype=torch.complex128),
        "long double": numpy.longdouble(1),
        "endless": endless,
        "long integer": 10**5000,
    }[kind]


def refused_state(rank: Rank, *, directory: str, kind: str, asynchronous: bool) -> str:
    """A client state that cannot be stored: all ranks learn it, and can save without it."""
    engine = make_engine()
    train(engine)
    client = {"args": [1, 2, 3, _unstorable(kind)]}

    def save() -> None:
        engine.save_checkpoint(directory, None, client, asynchronous=asynchronous)
        engine.wait_for_checkpoint()

    message = _refusal(save)
    rank.together()
    assert not Path(directory).exists() or not list(Path(directory).iterdir())
    engine.save_checkpoint(directory)
    engine.destroy()
    return message


def early_death(rank: Rank, *, directory: str, dies: int) -> None:
    """Rank ``dies`` is killed when the other one begins the first save of its life."""
    engine = make_engine()
    train(engine)
    rank.together()
    if rank.rank == dies:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        engine.save_checkpoint(directory)
    except (RuntimeError, OSError) as error:
        raise GaveUp(str(error)) from error


class Empty(nn.Module):
    """A model with a parameter and a buffer without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("none", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.nothing.sum()


def empty_parameter(rank: Rank, *, directory: str, stage: int, bf16: bool) -> None:
    """Save and load a model with tensors without elements."""
    engine = make_engine(Empty(), stage=stage, bf16=bf16, data=False)
    train(engine)
    engine.save_checkpoint(directory)
    found = digest(engine)
    train(engine)
    engine.load_checkpoint(directory)
    assert digest(engine) == found
    engine.destroy()


def replicas(rank: Rank, *, directory: str, journal: str, shard: int) -> None:
    """Save with several replicas of the shards, and buffers that only rank 0 gives."""
    engine = make_engine(zero_optimization={"stage": 2, "shard_degree": shard})
    batches = Batches(engine)
    train(engine, batches)
    found = digest(engine)
    if rank.rank == 0:
        Journal(Path(journal)).note("about", 1, found)
    engine.save_checkpoint(directory, None, {"step": 1, "tensor": torch.full((3,), 1)})
    engine.destroy()


def bystanders(rank: Rank, *, directory: str, action: str, name: str) -> None:
    """Save or export next to, or over, files that are not zerorun's. Nothing is returned: the test looks at the files."""
    engine = make_engine()
    train(engine)
    with suppress(CheckpointError):
        if action == "export":
            engine.export(Path(directory) / name)
        else:
            engine.save_checkpoint(directory, name)
    engine.destroy()


def two_engines(rank: Rank, *, directory: str, shared: bool) -> list[int]:
    """One engine saves in the background while another one saves and loads. The steps that are found afterwards."""
    from zerorun.distributed.topology import Topology

    topology = Topology.create(rank.world, rank.rank, device_type="cpu") if shared else None
    folders = [Path(directory) / name for name in "ab"]
    engines = [make_engine(topology=topology) for _ in folders]
    first, second = engines
    first.checkpointer.check_point = lambda point: time.sleep(0.01)
    train(first)
    train(second)
    train(second)
    for _ in range(3):
        first.save_checkpoint(folders[0], asynchronous=True)
        second.save_checkpoint(folders[1])
        second.load_checkpoint(folders[1])
        first.wait_for_checkpoint()
    steps = []
    for engine, folder in zip(engines, folders, strict=True):
        engine.load_checkpoint(folder)
        steps.append(engine.global_steps)
    for engine in engines:
        engine.destroy()
    return steps


def without_latest(rank: Rank, *, directory: str) -> tuple[str, str]:
    """Save "a", then "b" with save_latest=False. What ``latest`` says, and what is loaded."""
    engine = make_engine()
    train(engine)
    engine.save_checkpoint(directory, "a")
    train(engine)
    engine.save_checkpoint(directory, "b", save_latest=False)
    path, _ = engine.load_checkpoint(directory)
    engine.destroy()
    assert path is not None
    return (Path(directory) / "latest").read_text(), path.name


def save_on_local_disks(rank: Rank, *, directory: str, tag: str, fails: int | None) -> str:
    """Save step 1, and step 2 under the same tag, each rank in a directory of its own; rank ``fails`` dies at the end."""
    engine = make_engine()
    folder = Path(directory) / str(rank.rank)
    batches = Batches(engine)
    train(engine, batches)
    engine.save_checkpoint(folder, tag)
    found = digest(engine)
    train(engine, batches)

    def dying(point: str) -> None:
        if point == "publish" and rank.rank == fails:
            time.sleep(0.2)  # the other rank's files appear meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    engine.checkpointer.check_point = dying
    if rank.rank == 0:
        (Path(directory) / "digest").write_text(found)
    try:
        engine.save_checkpoint(folder, tag)
    except CheckpointError as error:
        raise GaveUp(str(error)) from error
    engine.destroy()
    return found


def load_local(rank: Rank, *, directory: str, tag: str | None) -> tuple[int, str]:
    """Load from directories of the ranks' own. The step and the digest."""
    engine = make_engine()
    engine.load_checkpoint(Path(directory) / str(rank.rank), tag)
    found = engine.global_steps, digest(engine)
    engine.destroy()
    return found


if __name__ == "__main__":
    import chaos_job  # under the name by which the test knows its classes

    chaos_job.serve(Connection(int(sys.argv[1])))
