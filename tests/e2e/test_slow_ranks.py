"""Runs with a slow rank: the launcher names it with its phase, and nobody where all are equally fast."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import patience

from zerorun.watch.board import WINDOW
from zerorun.watch.slow_ranks import SUCCESSION

SCRIPT = """
import os, sys, time, torch, zerorun
from zerorun.distributed.transport import gloo, same_host, sums
slow_in, ms, factor, steps, stage, pipe = sys.argv[1], *map(float, sys.argv[2:4]), *map(int, sys.argv[4:7])
rank = int(os.environ["RANK"])
torch.set_num_threads(1)

def takes_time(phase):
    if phase == slow_in:
        time.sleep(ms / 1e3 * (factor if rank == 1 else 1))

class Slowly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        takes_time("forward")
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        takes_time("backward")
        return grad

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
    def forward(self, x):
        return Slowly.apply(self.linear(x))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        takes_time("data")
        return (torch.ones(16), torch.ones(16)) if pipe > 1 else torch.ones(16)

def sum_slowly(parts, *rest):
    if parts[0].numel() > 50:
        takes_time("transport")
    return sums.sum_in_rank_order(parts, *rest)

gloo.sum_in_rank_order = same_host.sum_in_rank_order = sum_slowly
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
blocks = [Block(), Block()]
if pipe > 1:
    config["pipeline"] = {"stages": pipe}
    model = zerorun.PipelineModule(blocks, num_stages=pipe, loss_fn=torch.nn.functional.mse_loss)
else:
    model = torch.nn.Sequential(*blocks)
engine, _, loader, _ = zerorun.initialize(model, config, training_data=Data())
optimizer, update = engine.sharded_model.optimizer, engine.sharded_model.optimizer.update

def update_slowly(*args, **options):
    takes_time("update")
    return update(*args, **options)

optimizer.update = update_slowly
for step in range(steps):
    if pipe > 1:
        engine.train_batch()
    else:
        engine.backward(engine(next(loader_) if step else next(loader_ := iter(loader))).square().mean())
        engine.step()
"""
BOARDS = """
import os, time
from zerorun.watch.board import Phase, board, show_board
show_board()
slow, until = os.environ["RANK"] == "1", time.monotonic() + 60
for step in range(60):
    board.enter(Phase.DATA)
    time.sleep(0.02 if slow else 0.001)
    board.enter(Phase.SCRIPT)
    board.end_batch(step, step, over=True)
while not slow and board.slow is None and time.monotonic() < until:
    time.sleep(0.01)
assert slow or board.slow[0] == 1 and board.slow[1] > 1.5, board.slow
"""
BUSY = """
import os, sys, time, torch, zerorun
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(6)))
stage = {"stage": int(sys.argv[1])}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": stage}
engine = zerorun.initialize(model, config)
for _ in range(300):
    engine.backward(engine(torch.randn(64, 256)).square().mean())
    engine.step()
"""
WORDS = {
    "data": "loading data",
    "forward": "in forward",
    "backward": "in backward",
    "update": "in step()",
    "transport": "in transport",
}
night = pytest.mark.nightly
ZERORUN, TORCHRUN = ["zerorun.launcher.cli"], ["torch.distributed.run"]


def run(folder: Path, script: str, *args: object, ranks: int = 2, launcher: list[str] = ZERORUN, **variables: str) -> str:
    """The stderr of a job that ends well."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", str(ranks), "train.py", *map(str, args)]
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    found = subprocess.run(
        command,
        env={**kept, "ZERORUN_DEVICE": "cpu", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100 * patience(),
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stderr


def slow(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if " is slow: " in line]


def test_the_launcher_names_a_slow_rank_and_tells_rank_0(tmp_path: Path) -> None:
    (line,) = slow(run(tmp_path, BOARDS))
    assert line.startswith("[zerorun] rank 1 is slow: of each step it is loading data for at least ")


@night
@pytest.mark.parametrize("phase", WORDS)
@pytest.mark.parametrize(("ranks", "stage", "pipe", "memory"), [(2, 1, 1, "1"), (3, 3, 1, "0"), (4, 1, 2, "1")])
def test_in_each_phase(tmp_path: Path, phase: str, ranks: int, stage: int, pipe: int, memory: str) -> None:
    steps = (SUCCESSION + 2 * (ranks > 2)) * WINDOW  # more ranks than cores: all take long in some windows
    stderr = run(tmp_path, SCRIPT, phase, 50, 1.5, steps, stage, pipe, ranks=ranks, ZERORUN_PEER_MEMORY=memory)
    (line,) = slow(stderr)
    assert line.startswith(f"[zerorun] rank 1 is slow: of each step it is {WORDS[phase]}")


@night
def test_ranks_of_torchrun_see_to_it_themselves(tmp_path: Path) -> None:
    (line,) = slow(run(tmp_path, SCRIPT, "backward", 20, 3, 60, 2, 1, launcher=TORCHRUN))
    assert "rank 1 is slow: of each step it is in backward" in line


@night
@pytest.mark.parametrize("number", range(20))
def test_nobody_is_named_on_a_busy_machine(tmp_path: Path, number: int) -> None:
    noise = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert slow(run(tmp_path, BUSY, number % 4)) == []
    finally:
        for process in noise:
            process.kill()
            process.wait()
