"""For benchmarks in which contenders train one model on the same tokens, each in processes of its own, in turns.

"error" is the largest difference between a contender's losses, means over ranks, and those of one process with all tokens.
"norm" is the same for the norms of gradients before clipping, as a share of the norm.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare_peers import result_of, versions

VOCABULARY = 256
ONE_PROCESS = "one process"


@dataclass(frozen=True)
class Step:
    """``train`` takes the tokens that a rank is given in one step, and returns the loss and the norm.

    ``figures`` are other numbers about the step that is over.
    """

    train: Callable[[Any], tuple[float, float]]
    figures: Callable[[], dict[str, float]] = dict


@dataclass(frozen=True)
class Benchmark:
    """``contenders``: names; steps are told as multiples of the first one's. ``options``: numbers with their defaults.

    ``batches``: [steps, ranks, batch, context] tokens. ``peer``: whose contenders are left out where it is not installed.
    """

    file: str
    about: str
    contenders: Sequence[str]
    options: dict[str, int]
    batches: Callable[[argparse.Namespace], Any]
    make_step: Callable[[argparse.Namespace], Step]
    flags: Sequence[tuple[str, str]] = ()


def plain_step(model: Any) -> Step:
    """That of one process: AdamW, with clipping to a norm of 1."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def train(ids: Any) -> tuple[float, float]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return Step(train)


def engine_step(engine: Any, figures: Callable[[], dict[str, float]] = dict) -> Step:
    """That of an engine which takes the tokens as they are given."""

    def train(ids: Any) -> tuple[float, float]:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item(), float(engine.get_global_grad_norm())

    return Step(train, figures)


def configuration(stage: int, args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """What zerorun and DeepSpeed are given for the same training as ``plain_step``."""
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def _work(benchmark: Benchmark, args: argparse.Namespace) -> None:
    """One rank of one contender. Rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    step, alone = benchmark.make_step(args), args.worker == ONE_PROCESS
    times, losses, norms, figures = [], [], [], []
    for index, batch in enumerate(benchmark.batches(args)):
        ids = batch.flatten(0, 1) if alone else batch[dist.get_rank() % len(batch)]
        if not alone:
            dist.barrier()
        begun = time.perf_counter()
        loss, norm = step.train(ids)
        if index >= args.warmup:
            times.append(time.perf_counter() - begun)
            figures.append(step.figures())
        shared = torch.tensor(loss, dtype=torch.float64)
        if not alone:
            dist.all_reduce(shared)
        losses.append(float(shared) / (1 if alone else args.ranks))
        norms.append(norm)
    if alone or dist.get_rank() == 0:
        means = {name: statistics.mean(row[name] for row in figures) for name in figures[0]}
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = {"step_s": statistics.median(times), "peak_mb": peak_mb, **means, "losses": losses, "norms": norms}
        Path(args.result).write_text(json.dumps(found))
    if not alone:
        dist.barrier()
    os._exit(0)  # some peers abort while the interpreter ends


def _run(benchmark: Benchmark, name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """One contender in processes of its own. None, with its last lines printed, if it fails."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command = [sys.executable, *([] if name == ONE_PROCESS else start), benchmark.file]
    command += [word for key in benchmark.options for word in (f"--{key}", str(getattr(args, key)))]
    command += [f"--{flag}" for flag, _ in benchmark.flags if getattr(args, flag)]
    return result_of(name, command)


def _row(results: Sequence[dict[str, Any]], true: dict[str, Any]) -> dict[str, float]:
    """Medians over rounds, and the largest errors."""
    row = {key: statistics.median(found[key] for found in results) for key in results[0] if key not in ("losses", "norms")}
    pairs = [pair for found in results for pair in zip(found["losses"], true["losses"], strict=True)]
    row["error"] = max(abs(found - wanted) for found, wanted in pairs)
    pairs = [pair for found in results for pair in zip(found["norms"], true["norms"], strict=True)]
    row["norm"] = max(abs(found / wanted - 1) for found, wanted in pairs)
    return row


def _table(rows: dict[str, dict[str, float]], base: str) -> str:
    others = [key for key in next(iter(rows.values())) if key not in ("step_s", "peak_mb", "error", "norm")]
    more = "".join(f" {key} |" for key in others)
    lines = [f"| contender | step, s | against {base} |{more} peak, MB | error of losses | error of norms |"]
    lines += ["|---|" + "---:|" * (len(others) + 5)]
    for name, row in rows.items():
        more = "".join(f" {row[key]:.2f} |" for key in others)
        step = f"{row['step_s']:.3f} | {row['step_s'] / rows[base]['step_s']:.2f} |"
        lines.append(f"| {name} | {step}{more} {row['peak_mb']:.0f} | {row['error']:.1e} | {row['norm']:.1e} |")
    return "\n".join(lines)


def main(benchmark: Benchmark) -> None:
    parser = argparse.ArgumentParser(description=benchmark.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for key, default in benchmark.options.items():
        parser.add_argument(f"--{key}", type=int, default=default)
    for flag, words in benchmark.flags:
        parser.add_argument(f"--{flag}", action="store_true", help=words)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="names of contenders, with commas between them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _work(benchmark, args)
        return
    true = _run(benchmark, ONE_PROCESS, args)
    if true is None:
        sys.exit(1)
    names = args.only.split(",") if args.only else list(benchmark.contenders)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            result = _run(benchmark, name, args)
            if result is not None:
                found[name].append(result)
    rows = {name: _row(results, true) for name, results in found.items() if results}
    print(_table(rows, next(iter(rows))))
    load = os.getloadavg()[0]
    print(f"load of the machine at the end: {load:.1f} on {os.cpu_count()} cores")
    if args.json is not None:
        told = {"command": " ".join(["python", *sys.argv]), "load": load, "versions": versions(), **rows}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
