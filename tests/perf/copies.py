"""What copies in memory cost: steps with ``checkpoint.in_memory`` beside steps without it.

    python tests/perf/copies.py --params 25M --rounds 3 --context 64 --batch 4

Two ranks of one thread, each with a launcher of its own, as on two hosts: each sends its parts to the other. Both engines
are in the same processes, at stage 3 with AdamW, and take turns of two steps; the other one is first in the next round.
Figures are medians over rounds of the seconds of a step, by the clock and by rank 0's processor time, in which its part of
a copy is, too; on a machine with more to do, only the second says something. ``behind``: what a copy takes by itself, from
the end of a step until it is whole on both hosts, while nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

from compare_peers import VOCABULARY, build_model

STEPS = 2  # of a turn
ROOT = Path(__file__).parents[2]


def measure(args: argparse.Namespace) -> None:
    """One rank."""
    import torch

    import zerorun

    torch.set_num_threads(1)
    zerorun.init_distributed()
    engines = {}
    for name, every in (("without", 0), ("with", 1)):
        torch.manual_seed(0)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": args.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": args.dtype == "bf16"},
            "checkpoint": {"in_memory": {"every_steps": every}},
        }
        engines[name] = zerorun.initialize(build_model(args.params, args.context), config)
    ids = torch.randint(VOCABULARY, (args.batch, args.context))

    def timed(act: Callable[[], object]) -> tuple[float, float]:
        """The seconds of ``act``: by the clock, and of this process."""
        torch.distributed.barrier()
        begun = time.perf_counter(), time.process_time()
        act()
        torch.distributed.barrier()
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    def turn(engine: zerorun.Engine) -> None:
        for _ in range(STEPS):
            engine.backward(engine(ids, ids))
            engine.step()
        if engine.memory_copies is not None:
            engine.memory_copies.settle()

    def behind() -> None:
        copies = engines["with"].memory_copies
        assert copies is not None, "start it by this script"
        copies.keep()
        copies.settle()

    found: dict[str, list[tuple[float, float]]] = {"without": [], "with": [], "behind": []}
    for round_ in range(args.rounds + 1):
        for name in ("without", "with") if round_ % 2 else ("with", "without"):
            seconds = timed(partial(turn, engines[name]))
            found[name] += [(seconds[0] / STEPS, seconds[1] / STEPS)] if round_ else []
        found["behind"].append(timed(behind))
    if os.environ["RANK"] == "0":
        shown: dict[str, Any] = {"params": args.params, "tokens": args.batch * args.context}
        for which, kind in enumerate(("clock", "processor")):
            columns = {name: [value[which] for value in values] for name, values in found.items()}
            shown[kind] = {name: round(statistics.median(values), 4) for name, values in columns.items()}
            ratios = map(truediv, columns["with"], columns["without"])
            shown[kind]["ratio"] = round(statistics.median(ratios), 3)
        print(json.dumps(shown), flush=True)
    for engine in engines.values():
        engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", default="25M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16 with fp32 masters")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        begin = [sys.executable, "-m", "zerorun.launcher.cli", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
        begin += ["--master-addr=127.0.0.1", f"--master-port={port}", f"--secret-file={secret}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        commands = [[*begin, f"--node-rank={rank}", __file__, *sys.argv[1:]] for rank in range(2)]
        jobs = [subprocess.Popen(command, cwd=ROOT, env=environment) for command in commands]
        sys.exit(max(job.wait() for job in jobs))


if __name__ == "__main__":
    main()
