"""Jobs that are told to end save at one step on all ranks, exit with 75, and go on from there; killed ones go on, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from covering import by_day
from forked_scripts import RunningScript
from harness import patience, start_ranks

from zerorun.checkpoint.automatic import EXIT_RESUME
from zerorun.checkpoint.directory import in_order_of_trust, newest_first

JOB = Path(__file__).with_name("preempted_job.py")
RANKS = 2


class Job:
    """The launcher running the job in ``folder``."""

    def __init__(self, folder: Path, *options: str, **checkpoint: object) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        section = {"dir": str(self.checkpoints), "auto_resume": True, **checkpoint}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW"},
            "checkpoint": section,
        }
        (folder / "ds.json").write_text(json.dumps(config))
        self._command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", str(RANKS), "--grace", "30"]
        self._command += [*options, str(JOB), str(folder / "ds.json"), str(folder)]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)

    def started_alone(self) -> AbstractContextManager[list[RunningScript]]:
        """The ranks, without a launcher."""
        return start_ranks(RANKS, JOB.read_text(), str(self.folder / "ds.json"), str(self.folder))

    def run_alone(self) -> None:
        """To the end, without a launcher."""
        with self.started_alone() as ranks:
            for rank in ranks:
                code, _, errors = rank.finish(90 * patience())
                assert code == 0, errors

    def finish(self) -> tuple[int, str]:
        """(exit code, what it said)."""
        assert self.process is not None
        said = self.process.communicate(timeout=90 * patience())[1]
        return self.process.returncode, said

    def wait_at_step_3(self) -> list[int]:
        """Pids of the ranks, all of which wait in their loop after step 3."""
        deadline = time.monotonic() + 60 * patience()
        while any(not self.losses(rank) or self.losses(rank)[-1][1] != 3 for rank in range(RANKS)):
            assert time.monotonic() < deadline, self.process and self.process.poll()
            time.sleep(0.02)
        return [int((self.folder / f"run-{rank}-0").read_text().split()[0]) for rank in range(RANKS)]

    def losses(self, rank: int) -> list[tuple[int, int, str]]:
        path = self.folder / f"losses-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(run), int(step), loss) for run, step, loss in (line.split() for line in lines)]

    def all_losses(self) -> list[dict[int, str]]:
        """Per rank: step -> its loss, the last time that it was computed."""
        return [{step: loss for _, step, loss in self.losses(rank)} for rank in range(RANKS)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, str]]:
    """The losses of each rank."""
    job = Job(tmp_path_factory.mktemp("whole"))
    job.run_alone()
    return job.all_losses()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    (tmp_path / "wait").unlink(missing_ok=True)


def saved_at_one_step_and_went_on(job: Job, uninterrupted: list[dict[int, str]]) -> None:
    """One complete checkpoint, at the same step on all ranks; the run that goes on is the uninterrupted one."""
    assert newest_first(job.checkpoints) == ["global_step4"]
    job.run_alone()
    assert all((job.folder / f"run-{rank}-1").read_text().endswith(" 4") for rank in range(RANKS))
    expected = [{step: loss for step, loss in losses.items() if step != 4} for losses in uninterrupted]
    assert job.all_losses() == expected  # the step that saves ends the process before the script can write of it


def test_ranks_that_are_told_to_end(folder: Path, uninterrupted: list[dict[int, str]]) -> None:
    """As the launcher tells them, which passes signals on: unit/test_launcher_processes.py. One is told twice."""
    (folder / "wait").touch()
    job = Job(folder)
    with job.started_alone() as ranks:
        pids = job.wait_at_step_3()
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        os.kill(pids[1], signal.SIGTERM)
        time.sleep(0.3)
        (folder / "wait").unlink()
        for rank in ranks:
            code, _, errors = rank.finish(90 * patience())
            assert code == EXIT_RESUME, errors
    saved_at_one_step_and_went_on(job, uninterrupted)


TWO_ENGINES = """
import json, os, sys, time
from pathlib import Path
import torch, zerorun
from torch import nn
torch.set_num_threads(1)
folder, rank, engines = Path(sys.argv[1]), os.environ["RANK"], []
for number in range(2):
    section = {"dir": str(folder / f"engine{number}"), "auto_resume": True}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "checkpoint": section}
    torch.manual_seed(number)
    engines.append(zerorun.initialize(nn.Linear(8, 8), config))
first, second = engines
def step(engine):
    torch.manual_seed(engine.global_steps)
    other, batch = engines[1 - engines.index(engine)], torch.randn(2, 8)
    with torch.no_grad():
        target = other(batch)
    engine.backward((engine(batch) + target).square().mean())
    engine.step()
    with (folder / f"steps-{rank}").open("a") as file:
        file.write(f"{engines.index(engine)} {engine.global_steps}\\n")
while second.global_steps < 6:
    for inner in range(2):
        step(first)
        if inner == int(sys.argv[2]) and second.global_steps == 3 and (folder / "wait").exists():
            (folder / f"new-{rank}").write_text(str(os.getpid()))
            (folder / f"new-{rank}").rename(folder / f"waits-{rank}")  # so nobody finds it while it is empty
            while (folder / "wait").exists():
                time.sleep(0.01)
    step(second)
print(*(float(engine.state_dict()["weight"].double().sum()) for engine in engines))
"""


@pytest.mark.parametrize(("after", "passes"), by_day([(0, 4), (1, 5)], (1, 5)))
def test_several_engines_are_saved_after_one_pass_of_the_loop(folder: Path, after: int, passes: int) -> None:
    """One makes two steps in a pass, and the ranks are told after one of these. They save both after a pass, and go on.

    Told after the last one, they learn of it when the other engine steps: then one more pass it is.
    """
    whole, told = folder / "whole", folder / "told"

    def run(at: Path, meanwhile: Callable[[list[RunningScript]], None] = lambda ranks: None) -> list[tuple[int, str]]:
        at.mkdir(exist_ok=True)
        with start_ranks(RANKS, TWO_ENGINES, str(at), str(after)) as ranks:
            meanwhile(ranks)
            ends = [rank.finish(90 * patience()) for rank in ranks]
        return [(code, out if code == 0 else errors) for code, out, errors in ends]

    def tell(ranks: list[RunningScript]) -> None:
        deadline = time.monotonic() + 60 * patience()
        while len(list(told.glob("waits-*"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(int((told / "waits-1").read_text()), signal.SIGTERM)
        time.sleep(0.3)
        (told / "wait").unlink()

    told.mkdir()
    (told / "wait").touch()
    assert [code for code, _ in run(told, tell)] == [EXIT_RESUME] * RANKS
    saved = [newest_first(told / f"engine{number}")[0] for number in range(2)]
    assert saved == [f"global_step{2 * passes}", f"global_step{passes}"]
    expected = run(whole)
    assert run(told) == expected
    assert [code for code, _ in expected] == [0] * RANKS
    assert (told / "steps-0").read_text().split("\n").count(f"1 {passes}") == 0  # the step that saves ends the process


WHO = ("launcher, SIGUSR1, twice", "launcher", "one worker", "one worker, twice", "launcher, SIGUSR1")


@pytest.mark.nightly  # by day without the launcher, above, and on several hosts in cluster/test_slurm.py
@pytest.mark.parametrize("who", WHO)
def test_told_to_end(who: str, folder: Path, uninterrupted: list[dict[int, str]]) -> None:
    (folder / "wait").touch()
    job = Job(folder)
    job.start()
    assert job.process is not None
    pids = job.wait_at_step_3()
    number = signal.SIGUSR1 if "USR1" in who else signal.SIGTERM
    os.kill(job.process.pid if "launcher" in who else pids[1], number)
    if "twice" in who:
        time.sleep(0.1)
        os.kill(pids[1], signal.SIGTERM)
    time.sleep(0.3)
    (folder / "wait").unlink()
    code, said = job.finish()
    assert code == EXIT_RESUME, said
    saved_at_one_step_and_went_on(job, uninterrupted)


@pytest.mark.nightly  # by day: e2e/test_resume.py, and over hosts cluster/test_restarts.py
def test_killed_worker_and_max_restarts(folder: Path, uninterrupted: list[dict[int, str]]) -> None:
    """The launcher starts the job again, which goes on from the newest checkpoint, with no word of it in the script."""
    (folder / "die").touch()
    job = Job(folder, "--max-restarts", "1", every_steps=2, keep_last=2)
    job.start()
    code, said = job.finish()
    assert code == 0, said
    assert all((folder / f"run-{rank}-1").read_text().endswith(" 4") for rank in range(RANKS))
    assert job.all_losses() == uninterrupted
    assert in_order_of_trust(job.checkpoints) == ["global_step12", "global_step10"]
