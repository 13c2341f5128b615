"""Random kills of a job on the test bed, whose result must be that of a job that nothing has happened to.

    python tests/cluster/kills.py --count 250 --seed 1 [--hosts 3]      needs root, as tests/cluster does

Victims are workers, keepers, agents and hosts, which crash or go silent: at any time, so also while a copy is made, also
while the job recovers from the kill before. The job keeps copies in memory alone, and what it must be able to go on from is
always there: no host is lost together with the one that has its copies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if str(Path(__file__).parents[1]) not in sys.path:
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from harness import fork_program, patience
from jobs import pythons
from testbed import Cluster, Host, missing, wait_for

# Dropout, a schedule and random data: all of it must go on where it was. Rank 0 notes each finished step with its loss.
SCRIPT = """\
import hashlib, os, random, sys, time
import torch, zerorun
from torch import nn
here, slow = os.path.dirname(os.path.abspath(__file__)), float(sys.argv[1])
zerorun.init_distributed()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(f"{here}/pid.{attempt}.{rank}", "w") as file: file.write(f"{os.uname().nodename} {os.getpid()}")
def note(*words):
    if rank == 0:
        with open(f"{here}/notes", "a") as file: file.write(" ".join(map(str, words)) + "\\n")
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls % 3)
torch.manual_seed(7 + rank)
model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.ReLU(), Counts(), nn.Linear(64, 32))
config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "seed": 3,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}},
          "checkpoint": {"in_memory": {"every_steps": 1}}}
engine = zerorun.initialize(model, config)
if engine.memory_copies is not None:
    engine.memory_copies.checkpointer.check_point = lambda point: time.sleep(slow * random.random() ** 2)
note("begins", attempt, engine.global_steps)
def until():
    with open(f"{here}/until") as file: return int(file.read() or 10**9)
while engine.global_steps < until():
    loss = engine(torch.randn(4, 32)).float().square().mean()
    engine.backward(loss)
    engine.step()
    note("finished", attempt, engine.global_steps, loss.item().hex())
    time.sleep(slow)
digest = hashlib.sha256()
for value in engine.state_dict().values(): digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
note("digest", digest.hexdigest())
engine.destroy()
"""
KINDS = ("worker", "keeper", "agent", "crash", "silence")
RESTARTS = 10_000


@dataclass
class Notes:
    """What rank 0 has noted."""

    begins: list[tuple[int, int]] = field(default_factory=list)  # attempt, step
    finished: list[tuple[int, int, str]] = field(default_factory=list)  # attempt, step, loss
    digest: str = ""

    @classmethod
    def read(cls, folder: Path) -> Notes:
        notes, path = cls(), folder / "notes"
        for line in path.read_text().splitlines() if path.exists() else ():
            match line.split():
                case ["begins", attempt, step]:
                    notes.begins.append((int(attempt), int(step)))
                case ["finished", attempt, step, loss]:
                    notes.finished.append((int(attempt), int(step), loss))
                case ["digest", digest]:
                    notes.digest = digest
        return notes

    @property
    def step(self) -> int:
        """The furthest step."""
        return max((step for _, step, _ in self.finished), default=0)

    @property
    def repeated(self) -> list[int]:
        """For each start but the first, how many finished steps it has made once more."""
        found, furthest = [], 0
        steps = iter(self.finished)
        entry = next(steps, None)
        for attempt, first in self.begins:
            found.append(furthest - first)
            while entry is not None and entry[0] == attempt:
                furthest, entry = max(furthest, entry[1]), next(steps, None)
        return found[1:]

    @property
    def losses(self) -> dict[int, set[str]]:
        """step -> its losses in all starts that made it: one, if they are the same bit for bit."""
        found: dict[int, set[str]] = {}
        for _, step, loss in self.finished:
            found.setdefault(step, set()).add(loss)
        return found


class KilledJob:
    """A job on the first ``hosts`` hosts of the cluster, the last of which is in reserve if there are several."""

    def __init__(self, cluster: Cluster, folder: Path, hosts: int, slow: float = 0.05) -> None:
        self.cluster, self.folder, self.hosts, self.ranks = cluster, folder, hosts, max(1, hosts - 1)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "until").touch()
        (folder / "hostfile").write_text("".join(f"node{index} slots=1\n" for index in range(hosts)))
        options = ["--hostfile", "hostfile", f"--max-restarts={RESTARTS}", *(["--spares=1"] if hosts > 1 else [])]
        launcher = [sys.executable, "-m", "zerorun.launcher.cli", *options, "train.py", str(slow)]
        command = cluster[0].command(["env", "OMP_NUM_THREADS=1", *launcher], folder)
        self.strikes: list[str] = []
        self._out = open(folder / "out", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._out)

    @property
    def notes(self) -> Notes:
        return Notes.read(self.folder)

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def wait_for_step(self, step: int, seconds: float = 60) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.output[-6000:]
            return self.notes.step >= step

        wait_for(there, seconds, f"step {step} of {self.folder}")

    def strike(self, kind: str, host: Host) -> bool:
        """Kill one of ``kind`` on ``host``. False if there is none at this moment."""
        self.strikes.append(f"{kind} on {host.name} after {self.notes.finished[-1:]}")
        if kind == "crash":
            host.crash()
        elif kind == "silence":
            host.power_off()
        else:
            found = self.processes(kind, host)
            for process in found[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return bool(found)
        host.boot()
        host.heal()
        host.wait_until_up()
        return True

    def processes(self, kind: str, host: Host) -> list[int]:
        """The processes of ``kind`` on ``host``, by their numbers outside."""
        space, found = os.readlink(f"/proc/{host.pid}/ns/pid"), []
        # Those of the last start: a host that has crashed gives the numbers of processes anew, also to one in reserve.
        told = [(int(path.name.split(".")[1]), path) for path in self.folder.glob("pid.*")]
        workers = {path.read_text() for start, path in told if start == max(told)[0]}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or os.readlink(entry / "ns/pid") != space:
                    continue
                name, command = (entry / "comm").read_text().strip(), (entry / "cmdline").read_bytes()
                inside = next(line for line in (entry / "status").read_text().splitlines() if line.startswith("NSpid"))
                is_kind = {
                    "worker": f"{host.name} {inside.split()[-1]}" in workers and b"python" in command,
                    "keeper": name == "zerorun-keeper",
                    "agent": b"zerorun.launcher.agent" in command and name != "zerorun-keeper" and name != "zerorun-guard",
                }
                if is_kind[kind]:
                    found.append(int(entry.name))
        return sorted(found)

    def finish(self, more: int = 5, seconds: float = 60) -> Notes:
        """Let it make ``more`` steps and end, and return what it has noted."""
        (self.folder / "until.new").write_text(str(self.notes.step + more))
        (self.folder / "until.new").rename(self.folder / "until")
        try:
            code = self.process.wait(seconds * patience())
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.output[-6000:]) from None
        finally:
            self._out.close()
        assert code == 0, self.output[-6000:]
        return self.notes


def uninterrupted(folder: Path, ranks: int, until: int) -> Notes:
    """What a job of ``ranks`` ranks on this host has noted that nothing has happened to."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "until").write_text(str(until))
    fork_program(ranks, str(folder / "train.py"), "0", folder=folder, TORCHELASTIC_RESTART_COUNT="0")
    return Notes.read(folder)


def kill_at_random(job: KilledJob, count: int, chance: random.Random) -> Counter[str]:
    """Kill ``count`` times, and return how often which kind was. The job must make a step between kills, or two of them.

    After the loss of a host it must be a step of the next start: before that some parts have no second copy.
    """
    struck: Counter[str] = Counter()
    step = starts = 0
    while sum(struck.values()) < count:
        wait_for(lambda: len(job.notes.begins) > starts, 60, "the next start")  # noqa: B023
        job.wait_for_step(step + chance.randint(1, 3))
        time.sleep(0.2 * chance.random())
        host = job.cluster[chance.randrange(job.hosts - 1)]
        kind = chance.choice(KINDS[:2] if host.index == 0 else KINDS)  # the launcher is on host 0
        costs_copies = kind in ("agent", "crash", "silence") and job.processes("worker", host)
        starts = len(job.notes.begins) if costs_copies else 0
        struck[kind] += job.strike(kind, host)
        if chance.random() < 0.3 and sum(struck.values()) < count:  # once more, during recovery
            time.sleep(5 * chance.random())
            again = chance.choice(("worker", "keeper"))
            struck[f"{again} during recovery"] += job.strike(again, job.cluster[chance.randrange(job.hosts - 1)])
        step = job.notes.step
    return struck


def left_in_memory(cluster: Cluster) -> dict[str, list[str]]:
    """What keepers have left behind, by host."""
    found = {}
    for host in cluster.hosts:
        if host.is_up:
            listed = host.shell("ls /dev/shm").stdout.split()
            found[host.name] = [name for name in listed if name.startswith("zerorun")]
    return {name: left for name, left in found.items() if left}


def assert_nothing_has_happened(killed: Notes, whole: Notes) -> None:
    """The same losses at every step, however often it was made, and the same weights at the end."""
    steps = whole.losses
    wrong = {step: losses for step, losses in killed.losses.items() if losses != steps.get(step)}
    assert not wrong, f"other losses from step {min(wrong)} on"
    assert killed.digest == whole.digest != ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4, help="with the one in reserve")
    args = parser.parse_args()
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="zerorun-hosts-")), args.hosts)
    folder = Path(tempfile.mkdtemp(prefix="zerorun-kills-"))
    try:
        cluster.up()
        job, begun = KilledJob(cluster, folder, args.hosts), time.monotonic()
        struck = kill_at_random(job, args.count, random.Random(args.seed))
        notes = job.finish()
        repeated = Counter(notes.repeated)
        lines = [line for line in job.output.splitlines() if "] back at step" in line]
        if max(repeated) > 1:
            print(*job.strikes, job.output, sep="\n")
        told = sorted(lines, key=lambda line: float(line.split(" after ")[1].split()[0]))
        back = [float(line.split(" after ")[1].split()[0]) for line in told]
        print(f"{sum(struck.values())} kills in {time.monotonic() - begun:.0f} s: {dict(struck)}")
        print(f"{len(notes.begins) - 1} restarts, finished steps repeated: {dict(sorted(repeated.items()))}")
        print(f"back after {back[len(back) // 2]:.1f} s (median), {back[-1]:.1f} s (most); the median and the most are")
        print(f"{told[len(back) // 2]}\n{told[-1]}")
        time.sleep(4)
        left = {host.name: found for host in cluster.hosts if host.is_up and (found := pythons(host))}
        print(f"left running: {left or 'nothing'}; left in memory: {left_in_memory(cluster) or 'nothing'}")
        assert_nothing_has_happened(notes, uninterrupted(folder / "whole", job.ranks, notes.step))
        print(f"weights after {notes.step} steps, and the loss of each: bit for bit those of a run without kills")
    finally:
        cluster.down()


if __name__ == "__main__":
    main()
