"""What the board of a rank costs: nanoseconds of each entry, and their share of a training step of 10 ms.

    python tests/perf/board.py [--json tests/perf/results/board.json]

Fails if the entries of a step take 0.5 % of 10 ms or more, in which a rank waits once for each of 25 units, and has six
phases. A rank for which others wait makes fewer.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zerorun.watch.board import ALL, PAGE, Board, Phase

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    board = Board()
    board.go_on_at(mmap.mmap(-1, PAGE))

    def wait() -> None:
        board.wait_begins("3: all-gather for forward", ALL, 7)
        board.wait_ends("3: all-gather for forward")

    def exchange() -> None:
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
    if args.json is not None:
        told = {name: round(cost) for name, cost in costs.items()}
        place = {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "command": "python tests/perf/board.py",
        }
        args.json.write_text(json.dumps({"ns": told, "step_us": round(total / 1e3, 1), **place}, indent=2) + "\n")
    return int(total >= SHARE * STEP_NS)


if __name__ == "__main__":
    sys.exit(main())
