"""Bubbles in closed form: how long a rank waits in one step if all stages take the same times and messages take none.

With p stages, m micro-batches, v chunks per rank, and F, B, W the times of forward, input gradient and weight gradient of
one micro-batch on one stage:

| schedule | bubble of each rank | exact if | source |
|---|---|---|---|
| naive | (p-1) m (F+B+W) | always | a rank works one p-th of the time |
| gpipe | (p-1)(F+B+W) | always | Huang et al., 2019, arXiv 1811.06965, 2.3 |
| 1f1b | (p-1)(F+B+W) | always | Narayanan et al., 2021, arXiv 2104.04473, 2.2.1 |
| interleaved | (p-1)(F+B+W)/v | p divides m | the same, 2.2.2 |
| zero_bubble | (p-1)(F+B-min(W,F,B)) | m >= p, the usual limit | Qi et al., 2023, arXiv 2401.10241, ZB-H1: (p-1)(F+B-W) |
| forward_only | (p-1) F/v | p divides m, or v = 1 | the last rank starts, in the last chunk, p-1 parts late |

The paper's formula for ZB-H1 assumes that W is no longer than F and B. If W is longer, the bubble shrinks no further: the
last rank cannot start before (p-1) F, and the first waits (p-1) B for its first gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from .schedules import SCHEDULES
from .times import Times


def bubble(kind: str, stages: int, micro_batches: int, times: Times, *, chunks: int = 1) -> float:
    """Return the idle time of each rank in one step, by the table above, in the unit of ``times``.

    If stages differ, their mean times are used, and the result is only a guide. Transfers are left out.
    """
    parts = (times.forward, times.input_gradient, times.weight_gradient)
    forward, inputs, weights = (sum(part) / stages for part in parts)
    work = forward + inputs + weights
    per_rank: dict[str, Callable[[], float]] = {
        "naive": lambda: micro_batches * work,
        "gpipe": lambda: work,
        "1f1b": lambda: work,
        "interleaved": lambda: work / chunks,
        "zero_bubble": lambda: forward + inputs - min(forward, inputs, weights),
        "forward_only": lambda: forward / chunks,
    }
    assert set(per_rank) == set(SCHEDULES)
    return (stages - 1) * per_rank[kind]()


def why_inexact(kind: str, stages: int, micro_batches: int, times: Times) -> str | None:
    """Return why ``bubble`` may differ from a simulation, or None if it cannot, as a predicate for "the formula"."""
    if any(times.transfer):
        return "leaves out transfers"
    if any(len(set(part)) > 1 for part in (times.forward, times.input_gradient, times.weight_gradient)):
        return "takes the mean of stages that differ"
    if kind == "zero_bubble" and micro_batches < stages:
        return "is for as many micro-batches as stages, or more"
    if kind in ("interleaved", "forward_only") and micro_batches % stages:
        return "is for micro-batches that are a multiple of the stages"
    return None
