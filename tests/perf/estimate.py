"""How long estimate_memory() and the memory check of initialize() take, for shapes from 124M to 405B parameters.

    python tests/perf/estimate.py --rounds 5

Prints a table of medians: seconds for the estimate on 64 and on 16384 ranks, milliseconds for the check on 8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zerorun
from zerorun.distributed.topology import Topology
from zerorun.memory.fitting import Fitting
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.make_plan import make_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_estimate_tables import LLAMA_405B, OLMO, Decoder, config, on_meta

SHAPES = {
    "124M": {"layers": 12, "width": 768, "vocabulary": 50257, "kv": 768, "inner": 3072, "gated": False, "tied": True},
    "7B": OLMO[7],
    "70B": OLMO[70],
    "405B": LLAMA_405B,
}


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """The median of ``rounds`` after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        run()
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    settings = config(3)
    print(
        "| parameters | tensors | estimate, 64 ranks, s | 16384 ranks, s | check, 8 ranks, ms |\n|---|---:|---:|---:|---:|"
    )
    for name, shape in SHAPES.items():
        module = on_meta(Decoder, **shape)
        wanted, raw = take_in(module, settings, None, None, None, 8)

        def estimate(ranks: int, module: Any = module) -> Any:
            return zerorun.estimate_memory(module, settings, ranks, device="cuda")

        def check(module: Any = module, wanted: Any = wanted, raw: Any = raw) -> Any:
            plan = make_plan(module, wanted, raw, Topology(1, 8, 0), "peer memory", "cpu")
            return Fitting(module, wanted, raw, plan, torch.device("cpu")).demand

        few, many = (seconds(lambda ranks=ranks: estimate(ranks), rounds) for ranks in (64, 16384))  # type: ignore[misc]
        tensors = len(list(module.parameters()))
        print(f"| {name} | {tensors} | {few:.3f} | {many:.3f} | {1e3 * seconds(check, rounds):.1f} |")


if __name__ == "__main__":
    main()
