"""Runs that stand still: the launcher says who is guilty, shows what it does, and ends the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import patience

SCRIPT = """
import os, re, signal, sys, time, torch, zerorun
kind, stage, rank = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
torch.set_num_threads(1)

class Block(torch.nn.Sequential):
    skipped = False

    def forward(self, batch):
        return batch if self.skipped else super().forward(batch)

model = torch.nn.Sequential(*(Block(torch.nn.Linear(16, 16)) for _ in range(4)), torch.nn.Linear(16, 4))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "hang_timeout_s": 1,
          "zero_optimization": {"stage": stage}}
engine = zerorun.initialize(model, config)

def planted_bug():
    if kind == "endless loop":
        while True:
            pass
    if kind == "sleep":
        time.sleep(1000)
    if kind == "loop in C":
        re.match("(a*)*b", "a" * 60)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "own collective":
        torch.distributed.all_reduce(torch.ones(3))
    if kind == "evaluates alone":
        for _ in range(50):
            with torch.no_grad():
                engine(torch.ones(2, 16))
    if kind == "saves alone":
        engine.save_checkpoint(sys.argv[3])
    if kind == "whole weights alone":
        engine.state_dict()
    if kind == "skips a block":
        model[2].skipped = True
        engine.backward(engine(torch.ones(2, 16)).square().mean())
    if kind == "other shape":
        torch.distributed.all_reduce(torch.ones(6))
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "fewer batches":
        sys.exit()

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        while rank == 1 and index >= 20:
            time.sleep(1)
        return torch.ones(16)

loader = iter(torch.utils.data.DataLoader(Texts(), batch_size=2, num_workers=1)) if kind == "loader runs dry" else None
for step in range(12):
    if step == 6:
        open(f"six.{rank}", "w").write(str(time.monotonic()))
    if step == 6 and rank == 1:
        planted_bug()
    elif step == 6 and kind == "other shape":
        torch.distributed.all_reduce(torch.ones(3))
    batch = torch.ones(2, 16) if loader is None else next(loader)
    if step == 6 and kind == "all evaluate for long":
        for _ in range(30):
            time.sleep(0.1 + 0.1 * (rank == 1))
            with torch.no_grad():
                engine(torch.ones(2, 16))
    engine.backward(engine(batch).square().mean())
    engine.step()
print("finished")
"""
BUSY, ORDER = "rank 1 does not move: it has been in the script", "ranks have been waiting for each other"
night = pytest.mark.nightly


ZERORUN, TORCHRUN = ["zerorun.launcher.cli"], ["torch.distributed.run"]


def run(
    folder: Path,
    kind: str,
    stage: int,
    transport: str,
    launcher: list[str] = ZERORUN,
    ranks: int = 3,
    script: str = SCRIPT,
) -> subprocess.CompletedProcess[str]:
    """A job. ``transport``: through sockets, as between hosts, or memory that ranks read."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", str(ranks), "train.py", kind, str(stage), "saved"]
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "ZERORUN_DEVICE": "cpu", "ZERORUN_PEER_MEMORY": "0" if transport == "sockets" else "1"}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=100 * patience(), check=False
    )


@pytest.mark.parametrize(
    ("kind", "stage", "transport", "words", "function"),
    [
        ("sleep", 2, "memory", BUSY, "planted_bug"),
        pytest.param("endless loop", 2, "memory", BUSY, "planted_bug", marks=night),
        pytest.param("endless loop", 3, "sockets", BUSY, "planted_bug", marks=night),
        pytest.param("sleep", 0, "memory", BUSY, "planted_bug", marks=night),
        pytest.param("loop in C", 3, "sockets", BUSY, "planted_bug", marks=night),
        pytest.param("own collective", 3, "sockets", ORDER, "planted_bug", marks=night),
        pytest.param("stopped", 3, "memory", "rank 1 is stopped, by SIGSTOP or a debugger", None, marks=night),
        pytest.param("evaluates alone", 3, "sockets", ORDER, "planted_bug", marks=night),
        pytest.param("saves alone", 3, "sockets", ORDER, "planted_bug", marks=night),
        pytest.param("whole weights alone", 3, "sockets", ORDER, "planted_bug", marks=night),
    ],
)
def test_who_is_guilty(tmp_path: Path, kind: str, stage: int, transport: str, words: str, function: str | None) -> None:
    begun = time.monotonic()
    found = run(tmp_path, kind, stage, transport, ranks=3 if words == ORDER else 2)
    assert found.returncode == 124, found.stderr
    assert time.monotonic() - begun < 40 * patience()
    report = found.stderr.rstrip().split("=" * 80)[-2]
    assert "zerorun: the job hangs: " in report and words in report
    assert f"[zerorun] {words}" in found.stderr.split("=" * 80)[0]
    assert "after 6 steps" in report
    if words == ORDER:
        assert "rank 1 is " in report and "ranks 0, 2 are in forward" in report
    if function is not None:
        main = report.split("rank 1:\n")[1].split("\n\n")[0]  # the main thread comes first
        assert "Current thread" in main and f"in {function}" in main


GROUPS = """
import os, sys, time, torch, zerorun
kind, stage = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.up = 4, torch.nn.Parameter(torch.ones(4, 16, 16))

    def forward(self, hidden, index, weights):
        return (torch.einsum("th,tkho->tko", hidden, self.up[index]) * weights.unsqueeze(-1)).sum(1)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(16, 4), Experts()

    def forward(self, rows):
        weights, index = self.router(rows).softmax(-1).topk(2)
        return rows + self.experts(rows, index, weights)

config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "hang_timeout_s": 1,
          "zero_optimization": {"stage": stage}}
if kind == "experts":
    model, config["expert_parallel"] = torch.nn.Sequential(Block(), Block()), {"enabled": True, "autoep_size": 2}
else:
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    config |= {"sequence_parallel_size": 2, "context_parallel": {"method": kind}}
engine = zerorun.initialize(model, config)

def planted_bug(*unused):
    time.sleep(1000)

for step in range(12):
    if step == 6 and os.environ["RANK"] == "1":
        before = model[1].router if kind == "experts" else model.model.layers[1].self_attn.q_proj
        before.register_forward_pre_hook(planted_bug)
    ids = torch.ones(2, 6, dtype=torch.int64)
    loss = engine(torch.ones(2, 16)).square().mean() if kind == "experts" else engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
"""
EXPERTS, HEADS, KEYS = "experts: counts", "context: rows to heads forward", "context: gather keys and values forward"


@pytest.mark.parametrize(
    ("kind", "stage", "transport", "label"),
    [
        pytest.param("experts", 2, "memory", EXPERTS, marks=night),
        pytest.param("experts", 3, "sockets", EXPERTS, marks=night),
        pytest.param("ulysses", 0, "memory", HEADS, marks=night),
        pytest.param("gather", 3, "sockets", KEYS, marks=night),
    ],
)
def test_groups_of_experts_and_contexts(tmp_path: Path, kind: str, stage: int, transport: str, label: str) -> None:
    """A rank that does not come to an exchange is told with its name, and with the ranks between which it is."""
    found = run(tmp_path, kind, stage, transport, ranks=4, script=GROUPS)
    assert found.returncode == 124, found.stderr
    report = found.stderr.rstrip().split("=" * 80)[-2]
    assert "rank 1 does not move: it has been in forward for" in report and "after 6 steps" in report
    assert re.search(rf"rank 0 for \d+ s at '{label}' between ranks 0-1\.", report), report
    assert "in planted_bug" in report.split("rank 1:\n")[1].split("\n\n")[0]


IN_SCRIPT = "rank 1 is in the script between calls of the engine, at 'all_reduce of the script'"
IN_PLANTED_BUG = ("sleep", "endless loop", "loop in C", "own collective", "saves alone", "whole weights alone")
STANDING_STILL = [  # what goes wrong, what the supervisor of torchrun's ranks says; None: torchrun itself says it
    ("sleep", BUSY),
    ("endless loop", BUSY),
    ("loop in C", BUSY),
    ("stopped", "rank 1 is stopped, by SIGSTOP or a debugger"),
    ("own collective", f"{ORDER} for {{s}} s, in different collectives: {IN_SCRIPT}"),
    ("evaluates alone", f"{ORDER} for {{s}} s, in different collectives: rank 1 is in forward"),
    ("saves alone", f"{ORDER} for {{s}} s, in different collectives: rank 1 is saving"),
    ("whole weights alone", f"{ORDER} for {{s}} s, in different collectives: rank 1 is gathering whole weights"),
    (
        "skips a block",
        f"{ORDER} for {{s}} s, in different collectives: rank 1 is in forward, at '2: all-gather for forward'",
    ),
    (
        "other shape",
        "ranks disagree on the size of 'all_reduce of the script': rank 1 has 24 bytes, ranks 0, 2 have 12 bytes.",
    ),
    ("loader runs dry", BUSY),
    ("fewer batches", "rank 1 has come to the end of its script after 6 micro-batches, and then rank"),
    ("killed", None),
]


@pytest.mark.parametrize(
    ("kind", "words"),
    [pytest.param(*row, id=row[0]) for row in STANDING_STILL],
)
@night  # by day: the sidecar does it, in unit/test_sidecars.py, and what is said is that of test_who_is_guilty
def test_ranks_of_torchrun_see_to_it_themselves(tmp_path: Path, kind: str, words: str | None) -> None:
    """Hosts and links are all that cannot fail here."""
    found = run(tmp_path, kind, 3, "sockets", TORCHRUN)
    took = time.monotonic() - float((tmp_path / "six.1").read_text())
    assert found.returncode == 1 and took < 15 * patience(), found.stderr
    if words is None:
        assert re.search(r"exitcode: -9\) local_rank: 1 ", found.stderr)
        return
    report = found.stderr.split("=" * 80)[1]
    assert re.search(re.escape(words).replace(re.escape("{s}"), r"\d+"), report), found.stderr
    assert "in planted_bug" in report or kind not in IN_PLANTED_BUG


@night
@pytest.mark.parametrize("stage", [0, 3])
def test_a_long_evaluation_is_no_hang(tmp_path: Path, stage: int) -> None:
    found = run(tmp_path, "all evaluate for long", stage, "memory")
    assert (found.returncode, found.stdout.count("finished")) == (0, 3), found.stderr
    assert "does not move" not in found.stderr and "hangs" not in found.stderr


LONG = """
import os, sys, time, torch, zerorun
kind, rank = sys.argv[1], int(os.environ["RANK"])
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(4)), torch.nn.Linear(16, 4))
engine = zerorun.initialize(model, {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"},
                                    "zero_optimization": {"stage": 3}})

def takes_its_time():
    if rank == 0:
        time.sleep(65)

def slow_disk(file, flush=os.fsync, slept=[]):
    if not slept:
        slept.append(takes_its_time())
    flush(file)

def slow_backend(graph, inputs, slept=[]):
    if not slept:
        slept.append(takes_its_time())
    return graph.forward

for step in range(8):
    if (kind, step) in (("first batch", 0), ("evaluation", 6)):
        takes_its_time()
    if (kind, step) == ("save", 6):
        os.fsync = slow_disk
        engine.save_checkpoint(sys.argv[2])
    if (kind, step) == ("compile", 6):
        engine.compile(backend=slow_backend)
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
print("finished")
"""


@night
@pytest.mark.parametrize("kind", ["first batch", "evaluation", "save", "compile"])
def test_what_one_rank_takes_a_minute_for_is_no_hang(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(LONG)
    command = [sys.executable, "-m", *ZERORUN, "--nproc-per-node", "3", "train.py", kind, "saved"]
    begun = time.monotonic()
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200 * patience(), check=False)
    assert (found.returncode, found.stdout.count("finished")) == (0, 3), found.stderr
    assert time.monotonic() - begun > 60 and "hangs" not in found.stderr


@night
def test_a_rank_in_a_debugger_is_no_hang(tmp_path: Path) -> None:
    """The user says so by a variable."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "ZERORUN_HANG_TIMEOUT_S": "0"}
    command = [sys.executable, "-m", *ZERORUN, "--nproc-per-node", "3", "train.py", "stopped", "3"]
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stdout=-1, stderr=-1)
    stopped: list[int] = []
    deadline = time.monotonic() + 100 * patience()
    while not stopped:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
        for process in map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()):
            if ") T " in Path(f"/proc/{process}/stat").read_text():
                stopped.append(process)
    time.sleep(65)
    assert job.poll() is None
    os.kill(stopped[0], signal.SIGCONT)
    out, err = job.communicate(timeout=100 * patience())
    assert (job.returncode, out.count("finished")) == (0, 3) and "hangs" not in err and "is stopped" not in err
