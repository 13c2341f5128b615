"""The longest sequence that can be trained under a cap of memory, on 1, 2 and 4 ranks that divide it.

    python tests/perf/context_lengths.py --cap 64 --json tests/perf/results/context_lengths.json

Memory is the most bytes of tensors on a rank, as examples/long_context.py counts them: states, activations, gradients and
buffers. It is a straight line over lengths, which two steps show; then the length where it meets the cap is trained, and
what it took is noted beside it. The same is done where blocks are recomputed, and where their inputs are kept in host
memory, which on a CPU is counted apart: there tensors of the pool do not count.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from long_context import MIB, POLICIES, run

RANKS = (1, 2, 4)
GRAIN = 64  # tokens


def longest(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The longest length, in steps of GRAIN, and the peak that it had."""
    first, second = run(args, ranks, [args.shortest, 2 * args.shortest])
    each = (second["peak"] - first["peak"]) / args.shortest  # bytes of a token
    length = int((args.cap * MIB - first["peak"]) / each + args.shortest) // GRAIN * GRAIN
    (found,) = run(args, ranks, [length])
    measured = {"length": length, "peak": found["peak"], "bytes_per_token": each}
    return {"policy": args.policy, "method": args.method, "ranks": ranks, **measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=float, default=64.0, help="MiB on a rank")
    parser.add_argument("--shortest", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--out", default="runs/long_context")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for args.policy, args.method in (*((policy, "ulysses") for policy in POLICIES), ("none", "gather")):
        rows += [longest(args, ranks) for ranks in RANKS]
    print("| blocks | attention | ranks | longest sequence | times one rank's | MiB of it | bytes per token |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        alone = next(other for other in rows if all(other[key] == row[key] for key in ("policy", "method")))
        row["times"] = row["length"] / alone["length"]
        which = f"| {row['policy']} | {row['method']} | {row['ranks']} | {row['length']:,} | {row['times']:.2f} "
        print(f"{which}| {row['peak'] / MIB:.1f} | {row['bytes_per_token']:,.0f} |")
    if args.json is not None:
        found = {"command": sys.argv, "torch": torch.__version__, "machine": platform.processor(), "rows": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
