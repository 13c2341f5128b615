"""Steps on this machine's CPU, predicted by the planner after calibration, and measured: errors, and the order.

    python tests/perf/ground_truth.py --ranks 2 4

Configurations are drawn from all that stages, tensor ranks, pipelines, offload, recomputation and batches allow.
In each round the machine is calibrated, and every configuration is tried; rounds go through them in turns of direction.
Figures are means over rounds, so that a machine which is faster now and slower then counts as what it is on average. Two
configurations that are in another order in one round than in another cannot be told apart by measuring: the order that is
predicted for them is neither right nor wrong. Nothing else may compute meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean, median

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
COUNTS = {2: 12, 4: 8}  # configurations by ranks; 4 of others
LEAST, MOST = 256, 2048  # tokens of a step on a rank
TAG = "measured "


def cells(ranks: int) -> dict[str, RunCandidate]:
    """What is tried with ``ranks``, by name: drawn from all that the options allow, the same ones in each run."""
    drawn = random.Random(ranks).sample(list(_possible(ranks)), COUNTS.get(ranks, 4))
    return {_name(candidate): candidate for candidate in drawn}


def _possible(ranks: int) -> Iterator[RunCandidate]:
    for pipe, tensor, stage, sequence, micro, accumulation in itertools.product(
        (1, 2), (1, 2), range(4), (128, 256, 512), (1, 2, 4), (1, 2, 4)
    ):
        data = ranks // (pipe * tensor)
        if not data or (pipe > 1 and (stage > 1 or accumulation == 1)) or (data == 1 and stage):
            continue
        base = RunCandidate(data, tensor, pipe, stage=stage, shard=data, sequence=sequence, precision="fp32")
        base = replace(base, micro_batch=micro, accumulation=accumulation)
        if not LEAST <= base.tokens * accumulation <= MOST:
            continue
        for checkpointing, offload in itertools.product(("none", "full"), (False, True)[: 1 + (stage > 0)]):
            yield replace(base, checkpointing=checkpointing, offload_optimizer=offload)


def _name(c: RunCandidate) -> str:
    words = [f"stage {c.stage}", f"{c.accumulation} x {c.micro_batch} x {c.sequence} tokens"]
    words += ["tensor ranks"] * (c.tensor > 1) + ["pipeline"] * (c.pipe > 1)
    return ", ".join(words + ["offload"] * c.offload_optimizer + ["recomputed"] * (c.checkpointing == "full"))


def measure(ranks: int, *, backwards: bool) -> None:
    """On each rank: a line of seconds per step and cell, from the first one. ``backwards``: the last cell first."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import zerorun

    for name, candidate in list(cells(ranks).items())[:: -1 if backwards else 1]:
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


def compare(ranks: int, *, backwards: bool) -> dict[str, tuple[float, float]]:
    """Return the tokens per second that are predicted and measured for each cell, by its name."""
    launch = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", str(ranks), __file__]
    launch += ["--measure", str(ranks), *(["--backwards"] if backwards else [])]
    subprocess.run([sys.executable, "-m", "zerorun.planner.cli", "--calibrate", "--ranks", str(ranks)], check=True)
    out = subprocess.run(launch, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured = dict(json.loads(line.partition(TAG)[2]) for line in out.splitlines() if TAG in line)
    cluster, shape, found = cluster_of(f"{ranks}xlocal"), shape_of(CONFIG), {}
    for name, candidate in cells(ranks).items():
        predicted = StepModel(shape, candidate, cluster, calibration_of(cluster.gpu)).simulated().seconds
        tokens = candidate.batch * candidate.sequence
        found[f"{ranks} ranks, {name}"] = tokens / predicted, tokens / measured[name]
        print(f"{ranks} ranks, {name:60} predicted {predicted:.3f} s, measured {measured[name]:.3f} s", flush=True)
    return found


def order(rounds: list[dict[str, tuple[float, float]]], means: dict[str, tuple[float, float]]) -> tuple[float, int, int]:
    """Return (Kendall's tau over the pairs that all rounds have measured in one order, how many these are, of how many)."""
    pairs = list(itertools.combinations(means, 2))
    known = [(a, b) for a, b in pairs if len({found[a][1] > found[b][1] for found in rounds}) == 1]
    right = sum((means[a][0] > means[b][0]) == (means[a][1] > means[b][1]) for a, b in known)
    return (2 * right - len(known)) / len(known), len(known), len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--backwards", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, backwards=args.backwards)
        return
    rounds: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"ZERORUN_CACHE_DIR": folder, "ZERORUN_DEVICE": "cpu"}
        for number in range(args.rounds):
            rounds.append({})
            for ranks in args.ranks:
                rounds[-1] |= compare(ranks, backwards=number % 2 == 1)
    means = {
        name: (harmonic_mean(found[name][0] for found in rounds), harmonic_mean(found[name][1] for found in rounds))
        for name in rounds[0]
    }
    errors = {name: took / predicted - 1 for name, (predicted, took) in means.items()}  # of seconds
    for name, error in errors.items():
        print(f"{name:70} {error:+.1%}")
    sizes = sorted(map(abs, errors.values()))
    tau, known, pairs = order(rounds, means)
    print(f"{len(means)} configurations: median error {median(sizes):.1%}, largest {sizes[-1]:.1%}")
    print(f"order: Kendall's tau {tau:.2f} over {known} of {pairs} pairs, of which all rounds have the same order")
    if args.json:
        args.json.write_text(json.dumps({"rounds": rounds, "median": median(sizes), "tau": tau}, indent=1) + "\n")


if __name__ == "__main__":
    main()
