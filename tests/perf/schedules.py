"""How long it takes to make and simulate pipeline schedules, up to 1,024 stages with 4,096 micro-batches.

    python tests/perf/schedules.py

Prints a table: seconds on one core, and the most resident memory of the process.
Fails if 1F1B takes 60 s or more, or if its bubble is not the formula's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time

from zerorun.pipeline.schedule.formulas import bubble
from zerorun.pipeline.schedule.schedules import SCHEDULES, make_schedule
from zerorun.pipeline.schedule.simulate import simulate
from zerorun.pipeline.schedule.times import Times

MOST_SECONDS = 60  # for 1F1B at the largest size
MIB = 1 << 10  # of ru_maxrss, which counts KiB


def measure(kind: str, stages: int, micro_batches: int) -> tuple[float, float, float, float, float]:
    """Seconds to make and to simulate, MiB, and the bubble with that of the formula."""
    chunks = 2 if kind == "interleaved" else 1
    times = Times.make(stages)
    begun = time.perf_counter()
    schedule = make_schedule(kind, stages, micro_batches, chunks=chunks, times=times)
    made = time.perf_counter()
    report = simulate(schedule, times)
    simulated = time.perf_counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
    expected = bubble(kind, stages, micro_batches, times, chunks=chunks)
    return made - begun, simulated - made, memory, report.bubble, expected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=4096)
    parser.add_argument("--kinds", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    args = parser.parse_args()
    print("| schedule | make, s | simulate, s | MiB | bubble | formula |\n|---|---:|---:|---:|---:|---:|")
    failed = False
    for kind in args.kinds:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a process for each, so that its memory is its own
            made, simulated, memory, found, expected = pool.apply(measure, (kind, args.stages, args.micro_batches))
        print(f"| {kind} | {made:.1f} | {simulated:.1f} | {memory:.0f} | {found:.0f} | {expected:.0f} |", flush=True)
        failed |= kind == "1f1b" and (made + simulated >= MOST_SECONDS or abs(found - expected) > 1e-6 * expected)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
