"""Muon benchmark: a step with Muon, beside one with AdamW and a rank's share of the orthogonalization.

    python tests/perf/muon.py --json tests/perf/results/muon.json

On every rank are two engines over a GPT, one with each optimizer, and a loop over the matrices that the rank owns. They
take turns, so that all see the same machine. What Muon may cost beyond AdamW is the share, which nobody can avoid: the
figure is Muon / (AdamW + share), the median over turns, in seconds of the clock, and of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare_peers import VOCABULARY, build_model, versions


def config_of(optimizer: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": args.stage},
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of the processor, that begin on all ranks at once."""
    import torch

    torch.distributed.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - cpu


def work(args: argparse.Namespace) -> None:
    """One rank. Rank 0 writes the turns."""
    import torch

    import zerorun
    from zerorun.ops.newton_schulz import orthogonalize

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    engines = {name: zerorun.initialize(build_model(args.params, args.context), config_of(name, args)) for name in NAMES}
    exchange = engines["Muon"].plan.matrices
    own = [torch.randn(m.shape, dtype=exchange.dtype) for m in exchange.matrices if m.owner == exchange.rank]
    generator = torch.Generator().manual_seed(rank)

    def step(name: str) -> None:
        ids, targets = (torch.randint(0, VOCABULARY, (args.batch, args.context), generator=generator) for _ in range(2))
        engine = engines[name]
        engine.backward(engine(ids, targets))
        engine.step()

    contenders: dict[str, Callable[[], object]] = {name: lambda name=name: step(name) for name in NAMES}
    contenders["share"] = lambda: [orthogonalize(matrix, exchange.dtype) for matrix in own]
    turns = []
    for turn in range(args.warmup + args.turns):
        names = list(contenders)
        found = {name: timed(contenders[name]) for name in names[turn % 3 :] + names[: turn % 3]}
        if turn >= args.warmup:
            turns.append(found)
    if rank == 0:
        traffic = engines["Muon"].communication_report()
        sent = {label: entry for label, entry in traffic.items() if label.startswith("matrices")}
        Path(args.result).write_text(json.dumps({"turns": turns, "sent": sent}))
    torch.distributed.barrier()


NAMES = ("AdamW", "Muon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("stage", 2), ("batch", 4), ("context", 64), ("turns", 20), ("warmup", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--params", default="25M")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result:
        work(args)
        return
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command += [__file__, "--result", result.name, "--params", args.params]
        for option in ("stage", "batch", "context", "turns", "warmup"):
            command += [f"--{option}", str(getattr(args, option))]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        found = json.loads(Path(result.name).read_text())
    rows = {}
    for place, clock in enumerate(("clock", "processor")):
        medians = {name: statistics.median(turn[name][place] for turn in found["turns"]) for name in found["turns"][0]}
        ratios = [turn["Muon"][place] / (turn["AdamW"][place] + turn["share"][place]) for turn in found["turns"]]
        rows[clock] = {**medians, "ratio": statistics.median(ratios)}
        parts = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in medians.items())
        print(f"{clock}: {parts}; Muon / (AdamW + share) = {rows[clock]['ratio']:.3f}")
    load = os.getloadavg()[0]
    print(f"load of the machine at the end: {load:.1f} on {os.cpu_count()} cores; sent in all: {found['sent']}")
    if args.json is not None:
        told = {
            "command": " ".join(["python", *sys.argv]),
            "load": load,
            "versions": versions(),
            **rows,
            "sent": found["sent"],
        }
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
