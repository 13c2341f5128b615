"""What the board of a rank costs: nanoseconds of each entry, their share of a training step of 10 ms, and steps without it.

    python tests/perf/board.py [--json tests/perf/results/board.json] [--pairs 200]

Fails if the entries of a step take 0.5 % of 10 ms or more, in which a rank waits once for each of 25 units, and has six
phases. A rank for which others wait makes fewer. Then two ranks train 25 blocks at stage 3, 1M and 25M parameters, by turns
with and without the board: the difference is the median of those of neighbouring steps, told with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerorun.watch.board import ALL, PAGE, Board, Phase, board

REPEATS, CALLS = 9, 20_000
UNITS, EXCHANGES, STEP_NS, SHARE = 25, 1, 10e6, 0.005


def per_call(action: Callable[[], object]) -> float:
    """Nanoseconds of one call, of the time that this process has on a core: the least found, as others only add to it."""
    found = []
    for _ in range(REPEATS):
        begun = time.process_time_ns()
        for _ in range(CALLS):
            action()
        found.append((time.process_time_ns() - begun) / CALLS)
    return min(found)


# -- steps -----------------------------------------------------------------------------------------------------------

BLOCKS, WARM_UP = 25, 10
WIDTHS = {"1M": 200, "25M": 1000}
_ENTRIES = ("enter", "end_transport", "end_batch", "wait_begins", "wait_ends", "note_size")


def show(shown: bool) -> None:
    """Write on this rank's board, or no more."""
    for name in _ENTRIES:
        if shown:
            board.__dict__.pop(name, None)
        else:
            board.__dict__[name] = lambda *_, **__: 0


def train(width: int, pairs: int) -> list[tuple[float, float]]:
    """In a rank: the seconds of neighbouring steps (with, without). They take turns in being the first."""
    import torch

    import zerorun

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, width)) for _ in range(BLOCKS)))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    engine, batch = zerorun.initialize(model, config), torch.randn(16, width)

    def step(shown: bool) -> float:
        show(shown)
        begun = time.perf_counter()
        engine.backward(engine(batch).square().mean())
        engine.step()
        return time.perf_counter() - begun

    found = []
    for number in range(WARM_UP + pairs):
        first = number % 2 == 0
        times = {shown: step(shown) for shown in (first, not first)}
        found.append((times[True], times[False]))
    show(True)
    engine.destroy()
    return found[WARM_UP:]


def compare(size: str, pairs: int) -> dict[str, Any]:
    """What a step takes without the board, and how much more with it, in ms."""
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", "2", __file__]
    done = subprocess.run([*command, "--width", str(WIDTHS[size]), "--pairs", str(pairs)], stdout=-1, text=True, check=True)
    times = json.loads(done.stdout.splitlines()[-1])
    low, middle, high = statistics.quantiles([1e3 * (shown - hidden) for shown, hidden in times], n=4)
    without = 1e3 * statistics.median(hidden for _, hidden in times)
    load = os.getloadavg()[0]
    more = f"{middle:+.3f} ms with it ({middle / without:+.2%}; quartiles {low:+.3f} and {high:+.3f})"
    print(f"{size:>4}: {without:8.2f} ms without, {more}; {pairs} pairs, load {load:.1f}")
    return {"without_ms": round(without, 3), "more_ms": round(middle, 4), "quartiles_ms": [round(low, 4), round(high, 4)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)  # in a rank
    args = parser.parse_args()
    if args.width is not None:
        times = train(args.width, args.pairs)
        if os.environ["RANK"] == "0":
            print(json.dumps(times))
        return 0
    board = Board()
    board.go_on_at(mmap.mmap(-1, PAGE))

    def wait() -> None:
        board.wait_begins("3: all-gather for forward", ALL, 7)
        board.wait_ends("3: all-gather for forward")

    def exchange() -> None:
        board.note_size("3: all-gather for forward", ALL, 7, 4096)
        board.end_transport(time.monotonic_ns())

    def step() -> None:
        board.end_batch(1, 2, over=True)

    nothing = per_call(lambda: None)
    costs = {"wait": per_call(wait), "phase": per_call(lambda: board.enter(Phase.FORWARD))}
    costs |= {"exchange": per_call(exchange), "step": per_call(step)}
    costs = {name: cost - nothing for name, cost in costs.items()}
    total = UNITS * (costs["wait"] + EXCHANGES * costs["exchange"]) + 6 * costs["phase"] + costs["step"]
    for name, cost in costs.items():
        print(f"{name:20} {cost:7.0f} ns")
    print(f"a step of {UNITS} units {total / 1e3:7.1f} us, {total / STEP_NS:.2%} of 10 ms")
    steps = {size: compare(size, args.pairs) for size in WIDTHS}
    if args.json is not None:
        told = {name: round(cost) for name, cost in costs.items()}
        place = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "command": "python tests/perf/board.py",
        }
        args.json.write_text(
            json.dumps({"ns": told, "step_us": round(total / 1e3, 1), "steps": steps, **place}, indent=2) + "\n"
        )
    return int(total >= SHARE * STEP_NS)


if __name__ == "__main__":
    sys.exit(main())
