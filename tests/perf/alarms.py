"""How often jobs in which nothing is wrong are told to hang, or a rank of them to be slow: it should be never.

    python tests/perf/alarms.py [--runs 50] [--limit 5]

Each run is a job of three ranks on this host, with more ranks than it may have cores, that makes 600 steps,
evaluates, saves and gathers whole weights, at each stage in turn, over sockets and by reading memory. ``--limit``: seconds
of hang_timeout_s, a sixth of the default: what is no hang for long must not be taken for one. Fails if there is an alarm.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALARM = re.compile(r"the job hangs|does not move|is stopped|waiting for each other|lets nothing through|is slow:")
SCRIPT = """
import sys, torch, zerorun
stage, limit, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
blocks = (torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(8))
model = torch.nn.Sequential(*blocks)
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"},
          "hang_timeout_s": limit, "zero_optimization": {"stage": stage}}
engine, step = zerorun.initialize(model, config), 0
data = torch.Generator().manual_seed(0)
while step < 600:
    for _ in range(2):
        engine.backward(engine(torch.randn(64, 256, generator=data)).square().mean())
        engine.step()
    step += 1
    if step % 200 == 0:
        engine.save_checkpoint(folder)
        engine.state_dict()
        with torch.no_grad():
            for _ in range(50):
                engine(torch.randn(64, 256, generator=data))
print("finished")
"""


def run(number: int, limit: float, folder: Path) -> list[str]:
    """The lines of alarm of a job. Raises RuntimeError if it does not end well."""
    (folder / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", "3"]
    command = [*launcher, "train.py", str(number % 4), str(limit), str(folder / "saved")]
    environment = {**os.environ, "ZERORUN_DEVICE": "cpu", "ZERORUN_PEER_MEMORY": str(number // 4 % 2)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    alarms = [line for line in done.stderr.splitlines() if ALARM.search(line)]
    if not alarms and (done.returncode, done.stdout.count("finished")) != (0, 3):
        raise RuntimeError(done.stderr)
    return alarms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--limit", type=float, default=5.0)
    args = parser.parse_args()
    total, begun = 0, time.monotonic()
    for number in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            alarms = run(number, args.limit, Path(folder))
        total += len(alarms)
        print(*alarms, f"run {number + 1}: {total} alarms so far", sep="\n", flush=True)
    minutes, load = (time.monotonic() - begun) / 60, os.getloadavg()[0]
    print(f"{total} alarms in {args.runs} runs of 3 ranks, {minutes:.1f} minutes, load {load:.1f}")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
