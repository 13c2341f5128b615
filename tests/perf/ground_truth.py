"""Steps on this machine's CPU, predicted by the planner after calibration, and measured: errors, and the order.

    python tests/perf/ground_truth.py --ranks 2 4

Nothing else may compute meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from zerorun.planner.calibration import calibration_of
from zerorun.planner.candidate import RunCandidate, candidate_config
from zerorun.planner.hardware import cluster_of
from zerorun.planner.model_configs import shape_of
from zerorun.planner.step_time import StepModel

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
WARM, STEPS = 2, 4
TAG = "measured "


def cells(ranks: int) -> dict[str, RunCandidate]:
    """What is tried with ``ranks``, by name."""
    base = RunCandidate(ranks, sequence=256, micro_batch=2, precision="fp32", shard=ranks)
    found = {f"stage {stage}": replace(base, stage=stage) for stage in range(4)}
    found["stage 2, longer"] = replace(base, stage=2, sequence=512)
    found["stage 3, accumulated"] = replace(base, stage=3, accumulation=3, micro_batch=1)
    found["stage 1, accumulated"] = replace(base, stage=1, accumulation=3)
    found["stage 3, recomputed"] = replace(base, stage=3, checkpointing="full")
    found["stage 2, offload"] = replace(base, stage=2, offload_optimizer=True)
    found["tensor ranks"] = replace(base, data=ranks // 2, shard=ranks // 2, tensor=2, stage=1)
    if ranks == 2:  # where stages would wait for one another, more ranks than cores have the core of those that wait
        found["pipeline"] = replace(base, data=1, shard=1, pipe=2, accumulation=4, micro_batch=1, stage=1)
        found["pipeline, 8 micro-batches"] = replace(found["pipeline"], accumulation=8)
    return found


def measure(ranks: int) -> None:
    """On each rank: a line of seconds per step and cell, from the first one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import zerorun

    for name, candidate in cells(ranks).items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
        engine = zerorun.initialize(model, candidate_config(candidate))
        ids = torch.randint(CONFIG["vocab_size"], (candidate.micro_batch, candidate.sequence))  # type: ignore[call-overload]
        took = []
        for _ in range(WARM + STEPS):
            torch.distributed.barrier()
            begun = time.perf_counter()
            if candidate.pipe > 1:
                engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * candidate.accumulation))
            for _ in range(candidate.accumulation if candidate.pipe == 1 else 0):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
            torch.distributed.barrier()
            took.append(time.perf_counter() - begun)
        engine.destroy()
        if int(os.environ["RANK"]) == 0:
            print(TAG + json.dumps([name, median(took[WARM:])]), flush=True)


def compare(ranks: int) -> list[tuple[str, float, float, float]]:
    """Return (name, predicted seconds, measured seconds, tokens of a step) of each cell."""
    launch = [
        sys.executable,
        "-m",
        "zerorun.launcher.cli",
        "--nproc-per-node",
        str(ranks),
        __file__,
        "--measure",
        str(ranks),
    ]
    subprocess.run([sys.executable, "-m", "zerorun.planner.cli", "--calibrate", "--ranks", str(ranks)], check=True)
    out = subprocess.run(launch, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured = dict(json.loads(line.partition(TAG)[2]) for line in out.splitlines() if TAG in line)
    cluster, shape, found = cluster_of(f"{ranks}xlocal"), shape_of(CONFIG), []
    for name, candidate in cells(ranks).items():
        predicted = StepModel(shape, candidate, cluster, calibration_of(cluster.gpu)).simulated()
        tokens = candidate.batch * candidate.sequence
        found.append((f"{ranks} ranks, {name}", predicted.seconds, measured[name], tokens))
        print(f"{found[-1][0]:42} predicted {predicted.seconds:.3f} s, measured {measured[name]:.3f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"ZERORUN_CACHE_DIR": folder, "ZERORUN_DEVICE": "cpu"}
        rows = [row for ranks in args.ranks for row in compare(ranks)]
    errors = sorted(abs(predicted / took - 1) for _, predicted, took, _ in rows)
    speeds = [(tokens / predicted, tokens / took) for _, predicted, took, tokens in rows]
    pairs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(speeds, 2)]
    tau = sum((pair > 0) - (pair < 0) for pair in pairs) / len(pairs)
    print(f"{len(rows)} configurations: median error {median(errors):.1%}, largest {errors[-1]:.1%}, Kendall tau {tau:.2f}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "median": median(errors), "tau": tau}, indent=1) + "\n")


if __name__ == "__main__":
    main()
