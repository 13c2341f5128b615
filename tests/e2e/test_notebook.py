"""zerorun.notebook_launcher, called as from a cell: by an interactive shell that runs what it is given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import patience, start_script

# The kernel of a notebook has used its threads before, has no file for its cells, and has seen errors.
CELLS = """
import code, sys
shell = code.InteractiveInterpreter()
for cell in {cells!r}:
    shell.runcode(compile(cell, "<cell>", "exec"))
    sys.stdout.flush()
"""
FIRST = """
import os, sys, time, torch, zerorun
from torch import nn
torch.set_num_threads(2)
(torch.randn(600, 600, requires_grad=True) @ torch.randn(600, 600)).sum().backward()
rate = 0.1
def train(stage, out):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 1))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": rate}}
    engine = zerorun.initialize(model, config)
    rank = torch.distributed.get_rank()
    for step in range(3):
        loss = engine(torch.full((4, 64), (step + rank) / 4)).square().mean()
        engine.backward(loss)
        engine.step()
    if rank == 0:
        with open(out, "w") as file:
            print(torch.distributed.get_world_size(), torch.get_num_threads(), file=file)
"""


def run(tmp_path: Path, *cells: str) -> tuple[str, str]:
    """What the kernel wrote to stdout, and to stderr."""
    text = f"import os; os.chdir({str(tmp_path)!r})\n" + CELLS.format(cells=[FIRST, *cells])
    return start_script(text).finish(120 * patience())[1:]


def test_a_cell_trains_on_two_ranks_as_often_as_wanted(tmp_path: Path) -> None:
    """Also after a cell that failed; the notebook itself stays no rank."""
    again = "zerorun.notebook_launcher(train, (3, 'second'), num_processes=2); print('RANK' in os.environ, 'ended')"
    printed, said = run(tmp_path, "1 / 0", "zerorun.notebook_launcher(train, (1, 'first'), 2)", again)
    assert (tmp_path / "first").read_text() == (tmp_path / "second").read_text() == "2 1\n", said
    assert printed.split() == ["False", "ended"]
    assert said.count("Error") == 1  # the division's


ERRORS = """
def fail(how):
    rank = int(os.environ["RANK"])
    zerorun.init_distributed()
    if rank == 1:
        {"raise": lambda: int("no number"), "die": lambda: os.kill(os.getpid(), 9), "leave": lambda: sys.exit(3)}[how]()
    torch.distributed.barrier()
for how in ("raise", "die", "leave"):
    try:
        zerorun.notebook_launcher(fail, (how,), 2)
    except zerorun.errors.LaunchError as error:
        print(error)
        print("--")
"""


def test_the_error_of_the_first_rank_is_shown_whole(tmp_path: Path) -> None:
    raised, died, left, _ = run(tmp_path, ERRORS)[0].split("--\n")
    assert raised.startswith("rank 1 of 2 failed first.") and "ValueError: invalid literal" in raised
    assert 'File "<cell>"' in raised and "in fail" in raised
    assert "rank 1" in died or "rank 0 of 2 failed first" in died  # the other one may tell what it has lost
    assert left.startswith("rank 1 of 2 failed first.") and "SystemExit: 3" in left


REFUSED = """
import torch.distributed as dist
def attempt(**more):
    try:
        zerorun.notebook_launcher(print, **more)
    except zerorun.errors.LaunchError as error:
        print(error)
attempt(num_processes=0)
torch.cuda.is_initialized = lambda: True
attempt()
torch.cuda.is_initialized = lambda: False
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
attempt()
"""


def test_what_forks_cannot_do_is_refused(tmp_path: Path) -> None:
    none, used, member = run(tmp_path, REFUSED)[0].splitlines()
    assert "start 0 ranks" in none
    assert "has used its GPU" in used and "Remedy: restart the notebook's kernel" in used
    assert "is a rank itself" in member


def test_an_interrupt_while_ranks_are_forked_ends_them(tmp_path: Path) -> None:
    cell = """
import os, signal, time
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGINT))
try:
    zerorun.notebook_launcher(time.sleep, (5,), 2)
except KeyboardInterrupt:
    print("interrupted")
"""
    printed, said = run(tmp_path, cell)
    assert printed == "interrupted\n" and "ignored" not in said


@pytest.mark.parametrize("to_all", (pytest.param(True, marks=pytest.mark.nightly), False))
def test_an_interrupt_ends_all_ranks(tmp_path: Path, to_all: bool) -> None:
    """A notebook signals its kernel, a terminal all processes in the foreground."""
    wait = """
def wait(folder):
    open(f"{folder}/{os.environ['RANK']} {os.getpid()}", "w").close()
    time.sleep(1000)
try:
    zerorun.notebook_launcher(wait, (".",), 2)
except KeyboardInterrupt:
    print("interrupted")
"""
    text = CELLS.format(cells=["import os, time, zerorun", wait])
    kernel = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, start_new_session=True)  # fmt: skip
    until = time.monotonic() + 60 * patience()
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < until and kernel.poll() is None
        time.sleep(0.05)
    (os.killpg if to_all else os.kill)(kernel.pid, signal.SIGINT)
    printed, said = kernel.communicate(timeout=60 * patience())
    assert printed == "interrupted\n" and said == ""
    for path in tmp_path.iterdir():
        assert not Path("/proc", path.name.split()[1]).exists()
