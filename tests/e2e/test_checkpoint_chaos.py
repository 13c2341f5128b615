"""Checkpoints under attack: kills at any instant, full and closed disks, damaged and missing files, slow disks.

The ranks are real processes, forked from one that has imported torch (chaos_job.py): hundreds of jobs take a minute.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
from covering import by_day
from harness import patience, start_ranks

sys.path.insert(0, str(Path(__file__).parent))
from chaos_job import Ended, Journal, Kill, Loaded, Order, Strike

from zerorun.checkpoint.directory import DOOMED, OLD, REPLACED, TEMPORARY, missing_files, newest_first
from zerorun.checkpoint.manifest import MANIFEST, read_manifest

SEED = 20240607
# Of each chain; at night enough for every point of every chain.
KILLS_OF_SAVES = pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.nightly)])
KILLS_OF_TRAINING = pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.nightly)])
_ANSWER_S = 90.0
_NOBODY = 65534


# -- the nursery -------------------------------------------------------------------------------------------------


class Nursery:
    """The process that forks the ranks of every job; a new one if it does not answer."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def run(self, order: Order) -> list[Ended]:
        """Carry out ``order``, whose time limit is that of an idle machine: how each rank ended."""
        order = replace(order, timeout_s=order.timeout_s * patience())
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(order)
            if not self._pipe.poll(order.timeout_s + _ANSWER_S):
                raise AssertionError(f"the nursery does not answer to {order}")
            answer: list[Ended] = self._pipe.recv()
        except (AssertionError, OSError, EOFError):
            self.close()
            raise
        return answer

    def succeed(self, order: Order) -> list[Any]:
        """What each rank returned."""
        ended = self.run(order)
        assert all(one.kind == "ok" for one in ended), describe(order, ended)
        return [one.value for one in ended]

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        names = ("SLURM_", "ZERORUN_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(names)}
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [sys.executable, str(Path(__file__).with_name("chaos_job.py")), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env={**kept, **one_thread}, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def close(self) -> None:
        """End it, and with it all ranks."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(2)
            self._process.kill()
            self._process.wait()
        self._process = self._pipe = None


def describe(order: Order, ended: list[Ended]) -> str:
    """What became of a job, for people."""
    lines = [f"{order}"]
    for rank, one in enumerate(ended):
        lines.append(f"--- rank {rank}: {one.kind} {one.value}")
        if one.kind != "ok":
            lines.append(one.log[-4000:])
    return "\n".join(lines)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


# -- kills -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """A run that is killed again and again, and each time goes on from what it finds. ``tag``: of all saves."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    keep: int | None = None
    tag: str | None = None
    asynchronous: bool = False
    every: int = 1
    local: bool = False  # each rank has a directory of its own
    peer_memory: bool = True


SAVING = (
    Chain("stage 2"),
    Chain("stage 0 in bf16, keep 1", {"stage": 0, "bf16": True}, keep=1),
    Chain("stage 3 in bf16, keep 2", {"stage": 3, "bf16": True}, keep=2),
    Chain("stage 1, one tag", {"stage": 1}, tag="newest"),
    Chain("stage 3, one tag, keep 1, sockets", {"stage": 3}, keep=1, tag="newest", peer_memory=False),
    Chain("stage 2, sockets", peer_memory=False),
    Chain("asynchronous", asynchronous=True),
    Chain("asynchronous, keep 1, bf16", {"stage": 3, "bf16": True}, keep=1, asynchronous=True),
    Chain("asynchronous, one tag", {"stage": 1}, tag="newest", asynchronous=True),
    Chain("local disks", {"stage": 1}, local=True),
)
TRAINING = (
    Chain("every third step", {"stage": 2}, keep=2, every=3),
    Chain("every third step, asynchronous", {"stage": 3, "bf16": True}, keep=2, every=3, asynchronous=True),
)
# Of the chains of saves, those that run by day, too. Two checkpoints are kept by a chain of training.
CHAINS = ("stage 3, one tag, keep 1, sockets", "asynchronous, keep 1, bf16", "local disks")
# Events of one save of the ranks: (by the leader, by the other).
_EVENTS = {
    "write": (20, 20),
    "sync": (3, 3),
    "small": (5, 0),
    "manifest": (1, 0),
    "publish": (1, 0),
    "latest": (1, 0),
    "prune": (1, 0),
    "any": (37, 9),
}


class Attack:
    """One chain in a directory: kills, and what must be true after each."""

    def __init__(self, nursery: Nursery, chain: Chain, folder: Path) -> None:
        self.nursery, self.chain = nursery, chain
        self.random = random.Random(f"{SEED} {chain.name}")
        self.directory, self.journal = folder / "checkpoints", folder / "journal"
        self.kills: Counter[str] = Counter()
        self._common = {"directory": str(self.directory), "journal": str(self.journal)}

    def order(self, kind: str, saves: int) -> Order:
        """A run that is killed in the way of ``kind``: a name of an event, or "time"."""
        chain, kill, strike = self.chain, None, None
        if kind == "time":
            victims = self.random.choice([(0,), (1,), (0, 1)])
            kill = Kill(victims, self.random.uniform(0.0, 0.12) * chain.every**0.5)
        else:
            counts = _EVENTS[kind]
            rank = self.random.randrange(2) if counts[1] or chain.local else 0
            highest = counts[0] if chain.local else counts[rank]
            number = self.random.randint(1, highest * (2 if chain.asynchronous else 1))
            strike = Strike(rank, 1 if chain.asynchronous else self.random.randint(1, 2), kind, number)
        options = {
            **self._common,
            **chain.options,
            "saves": saves,
            "every": chain.every,
            "asynchronous": chain.asynchronous,
            "tag": chain.tag,
            "strike": strike,
            "keep": chain.keep,
            "local": chain.local,
        }
        return Order("long_run", 2, options, kill, timeout_s=40.0, peer_memory=chain.peer_memory)

    def kill(self, kind: str) -> None:
        """Run until the kill; the run before it must have been found as it was saved."""
        order = self.order(kind, 500 if kind == "time" else 5)
        ended = self.nursery.run(order)
        kinds = {one.kind for one in ended}
        assert "killed" in kinds, f"nobody was killed\n{describe(order, ended)}"
        assert kinds <= {"killed", "gave up"}, describe(order, ended)
        self.kills[kind] += 1
        self.look()

    def look(self) -> None:
        """No complete checkpoint is lost: look at the names and sizes of all files."""
        _, returned = Journal.read(self.journal)
        steps = sorted(set(returned), reverse=True)
        folders = [self.directory / "0", self.directory / "1"] if self.chain.local else [self.directory]
        for folder in folders:
            complete = {}
            for name in newest_first(folder):
                manifest = read_manifest(folder / name)
                wrong = missing_files(folder / name, manifest.files)
                assert not wrong or self.chain.local, f"{folder / name} looks complete, but {wrong}"
                complete[manifest.global_steps] = name
            if self.chain.tag is not None:
                assert len(complete) <= 2
                assert max(complete, default=0) >= max(steps, default=0)
            else:
                kept = [step for step in steps if step in complete]
                wanted = steps[: self.chain.keep] if self.chain.keep else steps
                unreturned = [step for step in complete if step not in steps]
                assert len(kept) + len(unreturned) >= len(wanted), f"{steps} were saved; there are {sorted(complete)}"
                assert self.chain.keep or kept == steps

    def load(self, world: int) -> None:
        """A fresh job must find the newest checkpoint."""
        options = {**self._common, **self.chain.options}
        if self.chain.local:
            return  # the next run does it: one rank alone would have half of the files
        self.nursery.succeed(Order("check_newest", world, options))

    def finish(self) -> None:
        """The next run goes on; then every checkpoint that is left is what was saved."""
        order = self.order("prune", 2)
        options = {**order.options, "strike": None}
        self.nursery.succeed(Order("long_run", 2, options, peer_memory=self.chain.peer_memory))
        left = self.nursery.succeed(Order("check_all", 1, {**self._common, **self.chain.options}))[0]
        assert left if not self.chain.local else not left
        if self.chain.keep:
            assert len(left) == (1 if self.chain.tag else self.chain.keep)
        for folder in (self.directory, self.directory / "0"):
            starts = (TEMPORARY, DOOMED, REPLACED)
            remains = [path.name for start in starts for path in folder.glob(f"{start}*")]
            assert not remains, f"left over after a save that returned: {remains}"


@KILLS_OF_SAVES
@pytest.mark.parametrize(
    "chain", by_day(SAVING, *(chain for chain in SAVING if chain.name in CHAINS)), ids=lambda chain: chain.name
)
def test_kills_while_saving(nursery: Nursery, chain: Chain, kills: int, tmp_path: Path) -> None:
    """At points inside a save, at any change of the file system, and at random times: the newest checkpoint is found."""
    attack = Attack(nursery, chain, tmp_path)
    points = [name for name in _EVENTS if name != "any"]
    if kills < len(points):  # each point is another chain's turn
        begin = SAVING.index(chain) * (kills - 2)
        points = [points[(begin + number) % len(points)] for number in range(kills - 2)]
    later = (kills - len(points) + 1) // 2
    kinds = [*points, *["any"] * later, *["time"] * (kills - len(points) - later)]
    attack.random.shuffle(kinds)
    for number, kind in enumerate(kinds):
        attack.kill(kind)
        if number % 2:
            attack.load(2 if number % 8 == 7 else 1)
    attack.finish()
    assert attack.kills.total() == kills
    print(f"{chain.name}: {dict(attack.kills)}")


@KILLS_OF_TRAINING
@pytest.mark.parametrize("chain", by_day(TRAINING, TRAINING[0]), ids=lambda chain: chain.name)
def test_kills_while_training(nursery: Nursery, chain: Chain, kills: int, tmp_path: Path) -> None:
    attack = Attack(nursery, chain, tmp_path)
    for number in range(kills):
        attack.kill("time")
        if number % 4 == 3:
            attack.load(1)
    attack.finish()
    assert attack.kills.total() == kills


# -- full and closed disks ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB and 400 files."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=400", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


AT_ONCE_AND_LATER = ["at once", "asynchronously"]
at_once_and_later = pytest.mark.parametrize("asynchronous", [False, True], ids=AT_ONCE_AND_LATER)
at_once_by_day = pytest.mark.parametrize("asynchronous", by_day((False, True), False), ids=AT_ONCE_AND_LATER)
later_by_day = pytest.mark.parametrize("asynchronous", by_day((False, True), True), ids=AT_ONCE_AND_LATER)


def starve(
    nursery: Nursery, small_disk: Path, wide: Path, narrow: int | None, rooms: list[str], asynchronous: bool
) -> None:
    """Save with little room for rank ``narrow``, or for both (None): what every rank is told."""
    directories = [str(small_disk / "here" if narrow in (None, rank) else wide) for rank in range(2)]
    options = {"directories": directories, "narrow": narrow or 0, "rooms": rooms, "asynchronous": asynchronous}
    found = nursery.succeed(Order("full_disk", 2, options))
    assert found[0] == found[1]
    for room, message in zip(rooms, found[0], strict=True):
        assert "No space left on device" in message, room
        assert message.startswith("rank " if narrow is None else f"rank {narrow}"), room
        assert str(small_disk) in message, f"{room}: it does not say which file: {message}"


@at_once_by_day
@pytest.mark.parametrize("narrow", by_day((None, 0, 1), None), ids=["both ranks", "rank 0", "rank 1"])
def test_no_space_left(nursery: Nursery, small_disk: Path, tmp_path: Path, narrow: int | None, asynchronous: bool) -> None:
    """Every rank learns which one had no space; nothing is left over; training and saving go on."""
    rooms = ["nothing", "one page", "a third", "most"]
    starve(nursery, small_disk, tmp_path / "wide", narrow, rooms, asynchronous)


@pytest.mark.nightly  # by day: test_no_space_left
@later_by_day
def test_no_space_left_for_small_files(nursery: Nursery, small_disk: Path, tmp_path: Path, asynchronous: bool) -> None:
    rooms = ["all but small files", "all but the manifest"]
    starve(nursery, small_disk, tmp_path / "wide", None, rooms, asynchronous)


@pytest.mark.nightly  # by day: test_no_space_left
@later_by_day
@pytest.mark.parametrize("narrow", by_day((None, 0, 1), 1), ids=["both ranks", "rank 0", "rank 1"])
def test_no_more_files(nursery: Nursery, small_disk: Path, tmp_path: Path, narrow: int | None, asynchronous: bool) -> None:
    """A file system that has room, but takes no new file."""
    starve(nursery, small_disk, tmp_path / "wide", narrow, ["no more files"], asynchronous)


@later_by_day
def test_read_only_disk(nursery: Nursery, small_disk: Path, asynchronous: bool) -> None:
    remount = [["mount", "-o", f"remount,{mode}", str(small_disk)] for mode in ("ro", "rw")]
    options = {"directory": str(small_disk / "here"), "close": remount[0], "reopen": remount[1]}
    first, second = nursery.succeed(Order("closed_directory", 2, {**options, "asynchronous": asynchronous}))
    assert first == second
    assert "Read-only file system" in first
    assert first.startswith("rank 0")
    assert str(small_disk) in first


@pytest.fixture
def for_nobody() -> Iterator[Path]:
    """A directory that a user without rights can use; tmp_path lies where only its owner can go."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with tempfile.TemporaryDirectory(prefix="zerorun-nobody-") as name:
        os.chown(name, _NOBODY, _NOBODY)
        yield Path(name)


@pytest.mark.nightly  # by day: test_read_only_disk
@later_by_day
def test_directory_without_permission(nursery: Nursery, for_nobody: Path, asynchronous: bool) -> None:
    folder = str(for_nobody / "here")
    options = {"directory": folder, "close": ["chmod", "555", folder], "reopen": ["chmod", "755", folder]}
    order = Order("closed_directory", 2, {**options, "asynchronous": asynchronous}, uid=_NOBODY)
    first, second = nursery.succeed(order)
    assert first == second
    assert "Permission denied" in first
    assert folder in first


@pytest.mark.nightly  # by day: test_read_only_disk
def test_file_without_permission(nursery: Nursery, for_nobody: Path) -> None:
    order = Order("unreadable_file", 2, {"directory": str(for_nobody / "here")}, uid=_NOBODY)
    assert "optimizer.exp_avg-00002-of-00002.safetensors" in " ".join(nursery.succeed(order)[0])


# -- damage ------------------------------------------------------------------------------------------------------

_ALIKE = ("master", "optimizer.exp_avg_sq", "optimizer.exp_avg.safetensors", "model.safetensors.index")

Pair = tuple[Path, dict[int, str]]
_KINDS = (
    "model-",
    "master-",
    "optimizer.exp_avg-",
    "optimizer.exp_avg_sq-",
    "state-",
    "model.safetensors.index.json",
    "master.safetensors.index.json",
    "optimizer.exp_avg.safetensors.index.json",
    "optimizer.exp_avg_sq.safetensors.index.json",
    "config.json",
    MANIFEST,
)


@pytest.fixture(scope="module")
def pair(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Checkpoints of steps 1 and 2, in bf16 on two ranks, and their digests."""
    folder = tmp_path_factory.mktemp("pair") / "checkpoints"
    digests = nursery.succeed(Order("pair_of_checkpoints", 2, {"directory": str(folder), "bf16": True}))[0]
    return folder, digests


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def harm(path: Path, how: str, chosen: random.Random) -> None:
    """Damage a file; ``latest`` keeps its time, as on a disk that forgets."""
    before = path.stat()
    if how == "delete":
        path.unlink()
        return
    if how == "truncate":
        os.truncate(path, chosen.randrange(before.st_size))
    else:
        flip(path, {"first": 0, "last": before.st_size - 1}.get(how, chosen.randrange(before.st_size)), chosen.randrange(8))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


HARMS = ("flip", "first", "last", "delete", "truncate")


def copies(source: Path, to: Path, files: list[Path], seed: str) -> list[tuple[str, Path]]:
    """(what was done, the copy) for each of ``files`` (below ``source``) and each kind of harm."""
    chosen = random.Random(f"{SEED} {seed}")
    made = []
    for file in files:
        for how in HARMS:
            copy = to / f"{how} {file.name}"
            shutil.copytree(source, copy)
            harm(copy / file, how, chosen)
            made.append((f"{how} {file.name}", copy))
    return made


def files_of(folder: Path, start: str) -> list[Path]:
    """Paths below ``folder`` of the newest checkpoint's files whose names begin with ``start``."""
    found = sorted(path.relative_to(folder) for path in (folder / "global_step2").iterdir() if path.name.startswith(start))
    assert found
    return found


def by_turns(kinds: Iterable[str]) -> list[Any]:
    """Each of ``kinds`` on one rank or on two, in turn; on the other number of ranks, and those like others, at night."""
    kinds = list(kinds)
    kept = [(kind, 1 + index % 2) for index, kind in enumerate(kinds) if not kind.startswith(_ALIKE)]
    return by_day(product(kinds, (1, 2)), *kept)


@pytest.mark.parametrize(("kind", "world"), by_turns(_KINDS))
def test_damaged_file(nursery: Nursery, pair: Pair, tmp_path: Path, kind: str, world: int) -> None:
    """Any file of the newest checkpoint: one bit, one byte, all of it. The one before is loaded, and a warning says why."""
    folder, digests = pair
    made = copies(folder, tmp_path, files_of(folder, kind), f"{kind} {world}")
    options = {"directories": [str(copy) for _, copy in made], "tag": "global_step2", "bf16": True}
    results = nursery.succeed(Order("load_all", world, options, timeout_s=20.0))
    for (what, _), result in zip(made, results[0], strict=True):
        name = what.split()[-1]
        assert (result.step, result.digest) == (1, digests[1]), f"{what} was not noticed: {result}"
        assert any(name in warning and "global_step1" in warning for warning in result.warnings), f"{what}: {result}"
        assert result.damaged, f"{what}: {result}"
        assert name in result.error, f"{what}: {result}"
    assert [one.error for one in results[0]] == [one.error for one in results[-1]]


@pytest.mark.parametrize(
    ("how", "kinds"),
    by_day(
        product(("flip", "delete", "truncate"), (_KINDS, ("model-", "state-", MANIFEST))),
        ("flip", ("model-", "state-", MANIFEST)),
    ),
)
def test_a_damaged_checkpoint_is_replaced(
    nursery: Nursery, pair: Pair, tmp_path: Path, how: str, kinds: tuple[str, ...]
) -> None:
    """A run that went back comes to the same step again, and saves under the name that a damaged directory has."""
    files = [file for kind in kinds for file in files_of(pair[0], kind)[:1]]
    chosen, made = random.Random(f"{SEED} {how}"), []
    for file in files:
        made.append(tmp_path / file.name)
        shutil.copytree(pair[0], made[-1])
        harm(made[-1] / file, how, chosen)
    options = {"directories": [str(copy) for copy in made], "bf16": True}
    wrong = nursery.succeed(Order("go_on", 2, options))[0]
    assert not any(wrong), {copy.name: text for copy, text in zip(made, wrong, strict=True) if text}


def test_damaged_latest(nursery: Nursery, pair: Pair, tmp_path: Path) -> None:
    """Without ``latest``, the newest checkpoint is found by its time."""
    folder, digests = pair
    made = copies(folder, tmp_path, [Path("latest")], "latest")
    options = {"directories": [str(copy) for _, copy in made], "tag": "global_step2", "bf16": True}
    for (what, _), result in zip(made, nursery.succeed(Order("load_all", 2, options))[0], strict=True):
        assert (result.step, result.digest, result.error) == (2, digests[2], ""), what


def test_damage_far_from_the_header(nursery: Nursery, tmp_path: Path) -> None:
    """Files of several blocks: a flipped bit in any of them is found, also where only some blocks are read."""
    shape = {"bf16": True, "width": 1100, "layers": 1}
    source = tmp_path / "source"
    nursery.succeed(Order("pair_of_checkpoints", 1, {"directory": str(source), **shape}))
    chosen, made = random.Random(SEED), []
    for file in sorted(path for path in (source / "global_step2").glob("*-*.safetensors") if path.stat().st_size > 2 << 20):
        copy = tmp_path / file.name
        shutil.copytree(source, copy)
        flip(copy / "global_step2" / file.name, chosen.randrange(1 << 20, file.stat().st_size), chosen.randrange(8))
        made.append(copy)
    assert len(made) == 4
    options = {"directories": [str(copy) for copy in made], "tag": "global_step2", **shape}
    for copy, result in zip(made, nursery.succeed(Order("load_all", 1, options))[0], strict=True):
        assert result.step == 1, f"{copy.name}: a flipped bit was not noticed"
        assert copy.name in result.error
        assert "bytes" in result.error


def test_manifest_that_cannot_be_read(nursery: Nursery, pair: Pair, tmp_path: Path) -> None:
    """As on a disk with a bad sector. A directory in its place gives an error of the same kind to every user."""
    folder = tmp_path / "copy"
    shutil.copytree(pair[0], folder)
    (folder / "global_step2" / MANIFEST).unlink()
    (folder / "global_step2" / MANIFEST).mkdir()
    options = {"directories": [str(folder)], "tag": "global_step2", "bf16": True}
    result: Loaded = nursery.succeed(Order("load_all", 2, options, timeout_s=20.0))[0][0]
    assert result.step == 1
    assert MANIFEST in result.error


@pytest.mark.parametrize(
    "kind", by_day(("master-00001", "master-00002", "optimizer.exp_avg-00001", "optimizer.exp_avg-00002"), "master-00002")
)
def test_damage_that_one_rank_sees(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    """Each rank reads only the files that hold its part: both must come to the same end, and not wait for each other."""
    folder = tmp_path / "checkpoints"
    nursery.succeed(Order("one_unit", 2, {"directory": str(folder), "save": True}))
    file = files_of(folder, kind)[0]
    flip(folder / file, 20, 3)
    results = nursery.succeed(Order("one_unit", 2, {"directory": str(folder), "save": False}, timeout_s=15.0))
    assert [result.step for result in results] == [1, 1]
    assert file.name in results[0].warnings[0]
    assert results[0].error == results[1].error
    assert file.name in results[0].error


def rewrite(checkpoint: Path, component: str) -> None:
    """Take a component out of a manifest, whose checksum is right again."""
    manifest = read_manifest(checkpoint)
    setattr(manifest, component, None)
    (checkpoint / MANIFEST).write_text(manifest.to_text())


@pytest.fixture(scope="module")
def in_fp32(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2 in fp32, to be copied."""
    folder = tmp_path_factory.mktemp("in_fp32") / "checkpoints"
    nursery.succeed(Order("pair_of_checkpoints", 2, {"directory": str(folder)}))
    return folder


@pytest.mark.parametrize("component", by_day(("optimizer", "scheduler", "data", "rng"), "optimizer", "data"))
def test_missing_component(nursery: Nursery, in_fp32: Path, tmp_path: Path, component: str) -> None:
    folder = shutil.copytree(in_fp32, tmp_path / "checkpoints")
    rewrite(folder / "global_step2", component)
    first, second = nursery.succeed(Order("lacking", 2, {"directory": str(folder), "component": component}))
    assert first == second
    assert f"no {component} state" in first
    assert f"allow_missing=[{component!r}]" in first.replace('"', "'")


def test_missing_part_of_the_optimizer(nursery: Nursery, in_fp32: Path, tmp_path: Path) -> None:
    """Second moments that are nowhere: not found out by the optimizer at the next step."""
    folder = shutil.copytree(in_fp32, tmp_path / "checkpoints")
    manifest = read_manifest(folder / "global_step2")
    del manifest.sets["optimizer.exp_avg_sq"]
    (folder / "global_step2" / MANIFEST).write_text(manifest.to_text())
    first, second = nursery.succeed(Order("lacking", 2, {"directory": str(folder), "component": "optimizer*"}))
    assert first == second
    assert "exp_avg_sq" in first


def test_extra_state(nursery: Nursery, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "checkpoints"), "forget": False}
    assert nursery.succeed(Order("load_with_extra_state", 2, options)) == [3, 3]


def test_missing_extra_state(nursery: Nursery, tmp_path: Path) -> None:
    """What a module gives from get_extra_state is a component, too."""
    order = Order("load_with_extra_state", 2, {"directory": str(tmp_path / "checkpoints"), "forget": True})
    ended = nursery.run(order)
    assert [one.kind for one in ended] == ["error", "error"], "a module's extra state was missing, and nobody was told"
    assert all("CheckpointError" in one.log and "_extra_state" in one.log for one in ended)


# -- asynchronous ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, bf16", by_day(((0, False), (1, True), (2, False), (3, True)), (3, True)))
def test_a_snapshot_is_of_one_instant(nursery: Nursery, tmp_path: Path, stage: int, bf16: bool) -> None:
    """Training goes on while it is written: what is loaded is the state of the call, not of later."""
    common = {
        "directory": str(tmp_path / "checkpoints"),
        "journal": str(tmp_path / "journal"),
        "stage": stage,
        "bf16": bf16,
    }
    nursery.succeed(Order("mutating", 2, common))
    assert nursery.succeed(Order("check_newest", 2, common)) == [9, 9]
    assert nursery.succeed(Order("check_all", 1, common)) == [[9, 5, 1]]


def test_one_save_at_a_time(nursery: Nursery, tmp_path: Path) -> None:
    nursery.succeed(Order("one_at_a_time", 2, {"directory": str(tmp_path)}))


@pytest.mark.parametrize(
    "at, fails, point",
    [
        ("wait", 0, "small"),
        ("save asynchronously", 0, "sync"),
        ("load", 1, "write"),
        ("export", 0, "write"),
        ("destroy", 1, "sync"),
        *by_day((("save", 1, "write"), ("wait", 0, "write"), ("wait", 1, "write"), ("wait", 1, "sync"))),
        *by_day((("wait", 0, "manifest"), ("wait", 0, "publish"))),
    ],
)
def test_failure_surfaces_once(nursery: Nursery, tmp_path: Path, at: str, fails: int, point: str) -> None:
    options = {"directory": str(tmp_path / "checkpoints"), "at": at, "fails": fails, "point": point, "of_disk": True}
    first, second = nursery.succeed(Order("failure_surfaces", 2, options, timeout_s=20.0))
    assert first == second
    assert f"rank {fails}" in first
    assert "No space left on device" in first


def test_nobody_waits_for_a_rank_without_memory(nursery: Nursery, tmp_path: Path) -> None:
    """It goes on receiving what others send it, and says then what is wrong: here by sockets, where sends wait."""
    options = {"directory": str(tmp_path / "checkpoints"), "at": "wait", "fails": 0, "point": "write", "of_disk": False}
    order = Order("failure_surfaces", 2, options, timeout_s=20.0, peer_memory=False)
    first, second = nursery.succeed(order)
    assert first == second
    assert "rank 0" in first
    assert "MemoryError" in first


@pytest.mark.nightly  # by day: test_exit_waits_for_the_save
@later_by_day
def test_slow_disk(nursery: Nursery, tmp_path: Path, asynchronous: bool) -> None:
    """Rank 0 writes for twice as long as a collective of the training may take."""
    common = {"directory": str(tmp_path / "checkpoints"), "journal": str(tmp_path / "journal")}
    limit_s = 0.5 * patience()
    options = {**common, "asynchronous": asynchronous, "delay_s": 2 * limit_s}
    order = Order("slow_disk", 2, options, group_timeout_s=limit_s)
    steps = nursery.succeed(order)
    assert steps[0] == steps[1]
    assert steps[0] > 5 or not asynchronous
    assert nursery.succeed(Order("check_newest", 1, common)) == [1]


SCRIPT = """
import sys, torch, zerorun
from torch import nn
torch.set_num_threads(1)
engine = zerorun.initialize(nn.Linear(16, 16), {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}})
engine.backward(engine(torch.ones(2, 16)).square().mean())
engine.step()
import time
engine.checkpointer.check_point = lambda point: time.sleep(0.05)
engine.save_checkpoint(sys.argv[1], asynchronous=True)
"""


def test_exit_waits_for_the_save(tmp_path: Path) -> None:
    """A script that ends right after an asynchronous save has saved."""
    with start_ranks(2, SCRIPT, str(tmp_path / "here")) as scripts:
        for script in scripts:
            code, _, errors = script.finish(120 * patience())
            assert code == 0, errors
    checkpoint = tmp_path / "here" / "global_step1"
    assert not missing_files(checkpoint, read_manifest(checkpoint).files)
    assert (tmp_path / "here" / "latest").read_text() == "global_step1"


# -- what ranks must agree on ------------------------------------------------------------------------------------


@pytest.mark.each_value
@at_once_and_later
@pytest.mark.parametrize(
    "kind",  # by day each in unit/test_checkpoint_files.py
    by_day(("object", "sparse tensor", "complex128", "long double", "endless", "long integer"), "object", "endless"),
)
def test_state_that_cannot_be_stored(nursery: Nursery, tmp_path: Path, kind: str, asynchronous: bool) -> None:
    """Rank 0's client state counts; that it is refused is an error on all ranks, and no rank waits for the other."""
    options = {"directory": str(tmp_path / "checkpoints"), "kind": kind, "asynchronous": asynchronous}
    first, second = nursery.succeed(Order("refused_state", 2, options, timeout_s=15.0))
    assert first == second
    assert ("client_state" if kind == "endless" else "client_state.args[3]") in first


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_dies_before_the_first_save(nursery: Nursery, tmp_path: Path, dies: int) -> None:
    """The other one is in the middle of making the group that checkpoints talk in: it must not wait for a day."""
    ended = nursery.run(
        Order("early_death", 2, {"directory": str(tmp_path), "dies": dies}, timeout_s=15.0, group_timeout_s=3.0)
    )
    assert ended[dies].kind == "killed"
    assert ended[1 - dies].kind == "gave up", ended[1 - dies].log


@pytest.mark.parametrize("stage, bf16", by_day(((0, False), (1, True), (3, False)), (3, False)))
def test_parameter_without_elements(nursery: Nursery, tmp_path: Path, stage: int, bf16: bool) -> None:
    options = {"directory": str(tmp_path / "checkpoints"), "stage": stage, "bf16": bf16}
    nursery.succeed(Order("empty_parameter", 2, options, timeout_s=20.0))


@pytest.mark.each_value
@pytest.mark.parametrize("shard", by_day((1, 2, 4), 1, 2))
@pytest.mark.parametrize("peer_memory", [True, False], ids=["peer memory", "sockets"])
def test_replicas(nursery: Nursery, tmp_path: Path, shard: int, peer_memory: bool) -> None:
    """Four ranks, of which every ``shard`` neighbours hold the whole."""
    common = {"directory": str(tmp_path / "checkpoints"), "journal": str(tmp_path / "journal")}
    nursery.succeed(Order("replicas", 4, {**common, "shard": shard}, timeout_s=20.0, peer_memory=peer_memory))
    assert nursery.succeed(Order("check_newest", 1, common)) == [1]


@pytest.mark.parametrize("shared", by_day((False, True), True), ids=["topologies", "one topology"])
def test_two_engines(nursery: Nursery, tmp_path: Path, shared: bool) -> None:
    """What one saves in the background and what the other one says to its ranks must not get mixed."""
    options = {"directory": str(tmp_path), "shared": shared}
    assert nursery.succeed(Order("two_engines", 2, options, timeout_s=20.0)) == [[1, 2]] * 2


def test_save_latest_false(nursery: Nursery, tmp_path: Path) -> None:
    """``latest`` goes on naming the checkpoint before, and that one is loaded."""
    assert nursery.succeed(Order("without_latest", 2, {"directory": str(tmp_path)})) == [("a", "a")] * 2


@pytest.mark.parametrize("action, name", [("export", "model"), ("save", "global_step1")])
def test_files_of_others_stay(nursery: Nursery, tmp_path: Path, action: str, name: str) -> None:
    """What lies next to a checkpoint or an export is not zerorun's to delete, and no tag may cost somebody his files."""
    beside = [tmp_path / "tmp.notes", tmp_path / "tmp.results" / "table.csv", tmp_path / "other" / "data"]
    under = tmp_path / name / "precious.txt"
    for path in (*beside, under):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    nursery.succeed(Order("bystanders", 2, {"directory": str(tmp_path), "action": action, "name": name}))
    gone = [str(path.relative_to(tmp_path)) for path in (*beside, under) if not path.exists()]
    assert not gone, f"{action} deleted {gone}"


@pytest.mark.parametrize("name", [f"{REPLACED}global_step2", f"global_step2{OLD}"], ids=["now", "by an earlier version"])
def test_a_tag_between_two_renames(nursery: Nursery, pair: Pair, tmp_path: Path, name: str) -> None:
    """A save of an existing tag was killed when the old version had made room, and the new one had not come."""
    folder, digests = tmp_path / "copy", pair[1]
    shutil.copytree(pair[0], folder)
    (folder / "global_step2").rename(folder / name)
    options = {"directories": [str(folder)], "tag": "global_step2", "bf16": True}
    result: Loaded = nursery.succeed(Order("load_all", 2, options))[0][0]
    assert (result.step, result.digest) == (2, digests[2])
    assert result.error == "", "there is a complete version, and it cannot be had by its tag"


# -- local disks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", by_day((None, "same"), None), ids=["by latest", "by tag"])
def test_two_versions_of_a_tag_are_not_mixed(nursery: Nursery, tmp_path: Path, tag: str | None) -> None:
    """Each rank has a disk of its own, and one is killed before the new version of a tag appears there."""
    order = Order("save_on_local_disks", 2, {"directory": str(tmp_path), "tag": "same", "fails": 1})
    ended = nursery.run(order)
    assert [one.kind for one in ended] == ["gave up", "killed"], describe(order, ended)
    load = Order("load_local", 2, {"directory": str(tmp_path), "tag": tag}, timeout_s=15.0)
    loaded = nursery.run(load)
    if tag is not None and all(one.kind == "error" for one in loaded):
        assert all("CheckpointError" in one.log or "DamagedError" in one.log for one in loaded)
        return  # refused, on both ranks: an answer, too
    assert [one.kind for one in loaded] == ["ok", "ok"], describe(load, loaded)
    steps = {one.value[0] for one in loaded}
    assert len(steps) == 1, f"ranks loaded different versions: steps {steps}"
    assert steps == {2} or loaded[0].value[1] == (tmp_path / "digest").read_text()


@pytest.mark.parametrize(
    "rank, kind",
    by_day(((0, "model-"), (1, "model-"), (1, "optimizer.exp_avg-"), (1, "config.json")), (1, "config.json")),
)
def test_damage_on_a_local_disk(nursery: Nursery, tmp_path: Path, rank: int, kind: str) -> None:
    """One rank's disk loses a bit: both ranks go back to the checkpoint before."""
    source = tmp_path / "checkpoints"
    common = {"local": True, "bf16": False}
    digests = nursery.succeed(Order("pair_of_checkpoints", 2, {"directory": str(source), **common}))[0]
    file = files_of(source / str(rank), kind)[0]
    flip(source / str(rank) / file, 20, 3)
    options = {"directories": [str(source)], "tag": "global_step2", **common}
    results = nursery.succeed(Order("load_all", 2, options, timeout_s=15.0))
    for result in results:
        assert (result[0].step, result[0].digest) == (1, digests[1])
        assert file.name in result[0].error


@pytest.mark.nightly  # by day: test_one_save_at_a_time
def test_one_directory_by_two_names(nursery: Nursery, tmp_path: Path) -> None:
    """Ranks that reach a directory by different paths write one checkpoint."""
    (tmp_path / "0").mkdir()
    (tmp_path / "1").symlink_to("0")
    nursery.succeed(Order("save_on_local_disks", 2, {"directory": str(tmp_path), "tag": "same", "fails": None}))
    found = {path.name for path in (tmp_path / "0").iterdir()}
    assert found == {"same", "latest"}
    manifest = read_manifest(tmp_path / "0" / "same")
    assert manifest.global_steps == 2
    assert not missing_files(tmp_path / "0" / "same", manifest.files)
    loaded = nursery.succeed(Order("load_local", 2, {"directory": str(tmp_path), "tag": None}))
    assert [step for step, _ in loaded] == [2, 2]
