"""What launching costs.

    python tests/perf/launch.py --json tests/perf/results/launch.json

Two measurements, medians of interleaved rounds:

* One host: from the command to the end of the first training step (a small model), with ``python`` in one process, with
  ``zerorun`` on 2 ranks, and with ``torchrun`` and DDP on 2 ranks.
* Twelve hosts (as root, with the packages of tests/cluster): from the command to the first line of the script on the last
  rank, and the time that ``ssh HOST true`` takes for the same hosts, all at once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTS = 12
STEP = """\
import torch, zerorun
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
          "zero_optimization": {"stage": 3}}
engine = zerorun.initialize(model, config)
engine.backward(engine(torch.randn(4, 64)).square().mean())
engine.step()
"""
DDP_STEP = """\
import torch
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.randn(4, 64)).square().mean().backward()
optimizer.step()
"""
# The time is the machine's: all processes of the test bed share its clock.
DONE = "import os, time; os.write(1, f'done {time.time()}\\n'.encode())\n"
FIRST_LINE = DONE.replace("done", "first")


def moment(command: Sequence[str], folder: Path, word: str) -> float:
    """Seconds from the start of ``command`` to the last of the times that it prints after ``word``."""
    begun = time.time()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=120)
    times = [float(line.split()[-1]) for line in done.stdout.splitlines() if word in line]
    return max(times) - begun


def one_host(folder: Path) -> dict[str, Callable[[], float]]:
    (folder / "step.py").write_text(STEP + DONE)
    (folder / "ddp.py").write_text(DDP_STEP + DONE + "os._exit(0)\n")  # some of its runs abort while Python ends
    two = "--nproc-per-node=2"
    commands = {
        "python, 1 process": [sys.executable, "step.py"],
        "zerorun, 2 ranks": [sys.executable, "-m", "zerorun.launcher.cli", two, "step.py"],
        "torchrun with DDP, 2 ranks": [sys.executable, "-m", "torch.distributed.run", "--standalone", two, "ddp.py"],
    }
    return {name: lambda command=command: moment(command, folder, "done") for name, command in commands.items()}


def many_hosts(folder: Path, command: Callable[[Sequence[str]], list[str]]) -> dict[str, Callable[[], float]]:
    (folder / "first.py").write_text(FIRST_LINE)
    (folder / "hostfile").write_text("".join(f"node{index} slots=1\n" for index in range(HOSTS)))
    launch = command([sys.executable, "-m", "zerorun.launcher.cli", "--hostfile", "hostfile", "first.py"])
    script = f"for i in {{1..{HOSTS - 1}}}; do ssh node$i true & done; wait; date '+first %s.%N'"
    return {
        f"ssh true, {HOSTS - 1} hosts": lambda: moment(command(["bash", "-c", script]), folder, "first"),
        f"zerorun, {HOSTS} hosts": lambda: moment(launch, folder, "first"),
    }


def measure(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(run())
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(one_host(Path(folder)), args.rounds)
        sys.path[:0] = [str(ROOT / "tests/cluster"), str(ROOT / "tests")]
        import testbed

        reason = testbed.missing()
        if reason is None:
            cluster = testbed.Cluster(Path(tempfile.mkdtemp(prefix="zerorun-hosts-")), HOSTS)
            try:
                cluster.up()
                place = Path(folder)
                found.update(measure(many_hosts(place, lambda argv: cluster[0].command(argv, place)), args.rounds))
            finally:
                cluster.down()
        else:
            print(f"{HOSTS} hosts: not measured, {reason}")
    base = found["python, 1 process"]
    for name, seconds in found.items():
        print(f"{name:30} {seconds:6.2f} s  {seconds / base:5.2f} x python")
    if args.json:
        versions = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
        record = {"command": " ".join(sys.argv), "versions": versions, "median_s": found}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
