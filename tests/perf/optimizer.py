"""Optimizer benchmark: one AdamW step in mixed precision on CPUs, beside the machine's bandwidth, torch and DeepSpeed.

    python tests/perf/optimizer.py --json tests/perf/results/optimizer.json
    python tests/perf/optimizer.py --formats --numel 20000000

The work: bf16 gradient in, scaled by a clipping coefficient; fp32 weight and moments updated; bf16 weight out. That is 28
bytes per element, by which all bandwidths of whole steps are counted, whatever a contender really moves. The contenders:

    single pass   zerorun.ops.single_pass, and the same by torch's kernels in chunks (what is used without a compiler)
    torch         cast up, fused AdamW with grad_scale, cast down; into preallocated buffers
    DeepSpeed     the same with DeepSpeedCPUAdam, whose update takes gradients of the weight's dtype only; without scaling
    its update    the part of it that DeepSpeed's kernel does: fp32 in, nothing out (28 bytes, too)
    triad         a = a + s b on fp32, 12 bytes per element: the bandwidth that there is

With ``--rules``, the other rules of the single pass are measured beside AdamW, in the same dtypes. Users of Sophia found
its steps 10 to 15 % slower (Sophia#27): its update and, in one of 10 steps, its curvature are the part of that which is
here.

With ``--formats``, the same with moments in bf16 (20 bytes per element) and in 8 bits (16), and bitsandbytes' AdamW8bit,
whose update on CPUs takes fp32 gradients and is followed by a cast. Also weight, gradient and moments in bf16 alone,
rounded by chance and to nearest: 14 bytes per element, by which their bandwidth is counted.

Repetitions are interleaved, one of each contender in turn; a figure is the median, and the best in brackets. A shared
machine's bandwidth differs from second to second, so shares of the triad are medians over turns, each with the triad of its
turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from compare_peers import versions

from zerorun.ops import build, native, single_pass
from zerorun.ops.rounding import NEAREST, Origin, Rounding
from zerorun.ops.state_format import BLOCK, Blocks, State

LR, BETAS, EPS, DECAY, COEFFICIENT = 1e-3, (0.9, 0.999), 1e-8, 0.1, 0.5
STEP_BYTES, TRIAD_BYTES = 28, 12  # per element
RULE_BYTES = {"AdamSAGE": 36, "Sophia": 24, "curvature": 10, "Lion": 20, "Adagrad": 20, "SGD": 20}
RULE_BYTES |= {"bf16 alone": 14, "nearest": 14}


class Tensors:
    """What all contenders work on: the same memory, so that none is luckier with its pages."""

    def __init__(self, numel: int) -> None:
        self.weight = torch.randn(numel)  # [numel] fp32
        self.gradient = torch.randn(numel).bfloat16()  # [numel]
        self.moments = (torch.zeros(numel), torch.zeros(numel))  # [numel] fp32 each
        self.out = torch.empty(numel, dtype=torch.bfloat16)  # [numel]
        self.wide = torch.randn(numel)  # [numel] fp32: the gradient cast up; the triad's b
        self.steps = torch.ones(())

    def single_pass(self, moments: tuple[State, State] | None = None) -> None:
        settings = {"lr": LR, "eps": EPS, "weight_decay": DECAY, "coefficient": COEFFICIENT}
        first, second = moments or self.moments
        single_pass.adam(self.weight, self.gradient, first, second, self.out, step=7, betas=BETAS, **settings)

    def rules(self) -> dict[str, Callable[[], None]]:
        """The rules beside AdamW. The third state is made here, as the others need none."""
        third, (first, second) = torch.zeros_like(self.weight), self.moments
        weight, gradient, out, how = self.weight, self.gradient, self.out, {"lr": LR, "coefficient": COEFFICIENT}
        decayed = {**how, "weight_decay": DECAY}
        return {
            "AdamSAGE": lambda: single_pass.adam_sage(weight, gradient, first, second, third, out, step=7, **decayed),
            "Sophia": lambda: single_pass.sophia(weight, gradient, first, second, out, bs=4096, **decayed),
            "curvature": lambda: single_pass.curvature(weight, gradient, second, coefficient=COEFFICIENT),
            "Lion": lambda: single_pass.lion(weight, gradient, first, out, **decayed),
            "Adagrad": lambda: single_pass.adagrad(weight, gradient, second, out, step=7, **how),
            "SGD": lambda: single_pass.sgd(weight, gradient, first, out, momentum=0.9, **how),
        }

    def by_torch(self) -> None:
        kept = native.library
        native.library = lambda: None  # type: ignore[assignment]
        try:
            self.single_pass()
        finally:
            native.library = kept

    def torch_chain(self) -> None:
        self.wide.copy_(self.gradient)
        first, second = self.moments
        torch._fused_adamw_(
            [self.weight],
            [self.wide],
            [first],
            [second],
            [],
            [self.steps],
            lr=LR,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=DECAY,
            eps=EPS,
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(1 / COEFFICIENT),
        )
        self.out.copy_(self.weight)

    def triad(self) -> None:
        self.weight.add_(self.wide, alpha=0.0001)


def deepspeed_steps(tensors: Tensors) -> dict[str, Callable[[], None]]:
    """The whole work and the update alone; empty, with a line on stderr, if DeepSpeed cannot be used here."""
    try:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        weight = torch.nn.Parameter(tensors.weight)
        optimizer = DeepSpeedCPUAdam([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        optimizer.state[weight] = {"step": 7, "exp_avg": tensors.moments[0], "exp_avg_sq": tensors.moments[1]}
    except Exception as error:  # its operations are compiled at this point, and that fails in many ways
        print(f"without DeepSpeed: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}
    weight.grad = tensors.wide

    def whole() -> None:
        tensors.wide.copy_(tensors.gradient)
        optimizer.step()
        tensors.out.copy_(tensors.weight)

    return {"DeepSpeed": whole, "its update": lambda: (optimizer.step(), None)[1]}


def formats(tensors: Tensors) -> dict[str, Callable[[], None]]:
    """The single pass with moments in each format, and bitsandbytes, if it is installed."""
    numel = tensors.weight.numel()
    halves = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
    codes = [(torch.zeros(numel, dtype=torch.uint8), torch.zeros(-(-numel // BLOCK)), signed) for signed in (True, False)]
    first, second = (Blocks(*parts) for parts in codes)
    found = {
        "in bf16": lambda: tensors.single_pass(halves),
        "in 8 bits": lambda: tensors.single_pass((first, second)),
        **alone(tensors, halves),
    }
    try:
        import bitsandbytes
    except ImportError as error:
        print(f"without bitsandbytes: {error}", file=sys.stderr)
        return found
    weight = torch.nn.Parameter(tensors.weight)
    optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    weight.grad = tensors.wide

    def whole() -> None:
        tensors.wide.copy_(tensors.gradient).mul_(COEFFICIENT)
        optimizer.step()
        tensors.out.copy_(tensors.weight)

    return {**found, "bitsandbytes": whole}


def alone(tensors: Tensors, moments: tuple[State, State]) -> dict[str, Callable[[], None]]:
    """The single pass where everything is bf16, rounded by chance and to nearest."""
    weight, numel = tensors.weight.bfloat16(), tensors.weight.numel()
    how = {"step": 7, "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "coefficient": COEFFICIENT}

    def step(rounding: Rounding) -> None:
        single_pass.adam(weight, tensors.gradient, *moments, rounding=rounding, **how)

    chance = Rounding(None, Origin(0, numel, "weight").noise(7))
    return {"bf16 alone": lambda: step(chance), "nearest": lambda: step(NEAREST)}


def measure(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each repetition, by contender; in every round all take their turn, the first one changing."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.perf_counter()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def summary(seconds: dict[str, list[float]], numel: int) -> dict[str, dict[str, float]]:
    """For each contender ``ms``, ``best_ms``, ``gb_per_s``, ``triad_share`` and, of whole steps, ``times_single_pass``."""
    found = {}
    for name, own in seconds.items():
        size = TRIAD_BYTES if name == "triad" else RULE_BYTES.get(name, STEP_BYTES)
        shares = [triad / TRIAD_BYTES * size / mine for triad, mine in zip(seconds["triad"], own, strict=True)]
        ratios = [mine / ours for mine, ours in zip(own, seconds["single pass"], strict=True)]
        found[name] = {
            "ms": statistics.median(own) * 1e3,
            "best_ms": min(own) * 1e3,
            "gb_per_s": numel * size / statistics.median(own) / 1e9,
            "best_gb_per_s": numel * size / min(own) / 1e9,
            "triad_share": statistics.median(shares),
            "best_triad_share": min(seconds["triad"]) / TRIAD_BYTES * size / min(own),
            "times_single_pass": statistics.median(ratios),
            "best_times_single_pass": min(own) / min(seconds["single pass"]),
        }
    return found


def table(found: dict[int, dict[str, dict[str, float]]]) -> str:
    lines = [f"{'threads':>7}  {'':13} {'ms':>16} {'GB/s':>15} {'of triad':>13} {'x single pass':>14}"]
    for threads, contenders in found.items():
        for name, row in contenders.items():
            lines.append(
                f"{threads:7}  {name:13} {row['ms']:7.1f} ({row['best_ms']:6.1f}) {row['gb_per_s']:6.1f} "
                f"({row['best_gb_per_s']:6.1f}) {row['triad_share']:5.0%} ({row['best_triad_share']:5.0%}) "
                f"{row['times_single_pass']:6.2f} ({row['best_times_single_pass']:4.2f})"
            )
    return "\n".join(lines)


def build_seconds() -> float | None:
    """The median of three builds, OpenMP included; None without a compiler."""
    seconds = []
    for compiler in list(build.compilers(os.environ))[:1] * 3:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            build.build(compiler, Path(folder) / "native.so")
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) if seconds else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--rules", action="store_true", help="measure the other rules beside AdamW")
    parser.add_argument("--formats", action="store_true", help="compare formats of states, and bitsandbytes")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    tensors = Tensors(args.numel)
    others: dict[str, Callable[[], None]] = {"by torch": tensors.by_torch, "torch": tensors.torch_chain}
    if args.rules or args.formats:
        others = (tensors.rules() if args.rules else {}) | (formats(tensors) if args.formats else {})
    else:
        others |= deepspeed_steps(tensors)
    contenders = {"single pass": tensors.single_pass, **others, "triad": tensors.triad}
    found = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        found[threads] = summary(measure(contenders, args.rounds), args.numel)
    status, built = native.status(), build_seconds()
    print(f"{status.source}, {status.isa}: {status.reason}; built in {built and round(built, 2)} s")
    print(table(found))
    if args.json:
        record = {"command": " ".join(sys.argv), "versions": versions(), "cpus": os.cpu_count(), "isa": status.isa}
        record |= {"numel": args.numel, "rounds": args.rounds, "build_seconds": built, "found": found}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
