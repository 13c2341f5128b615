"""The FLOP profiler counts what torch's counter finds in the plain module, at every stage, and prints it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_pipeline as pipeline
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_ranks
from models import CASES, LENGTH, MICRO, VOCAB, WIDTH, Place
from test_monitors import told
from torch import nn
from training import make_config, make_engine

import zerorun
from zerorun.monitors import flops
from zerorun.monitors.flops import ModuleCost

CASE = CASES["plain"]


def count_plainly() -> int:
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    with FlopCounterMode(display=False) as counter:
        CASE.loss(CASE.build(), Place())
    return counter.get_total_flops()


def profiled(stage: int, steps: int) -> list[ModuleCost]:
    """By module on rank 0, after ``steps`` steps; the others count nothing."""
    engine = make_engine(CASE, make_config(stage, accumulation=2, flops_profiler={"enabled": True, "profile_step": 1}))
    for step in range(steps):
        for micro in range(2):
            with torch.no_grad():
                engine(torch.zeros(1, 3, dtype=torch.long))  # is no part of training
            engine.backward(CASE.loss(engine, Place(dist.get_rank(), step, micro)))
            engine.step()
    assert (engine.observer is None) == (dist.get_rank() > 0)
    found = [] if engine.observer is None or engine.observer.flops is None else engine.observer.flops.costs()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 3))
def test_counts_are_those_of_the_plain_module(stage: int) -> None:
    (before, _), (costs, _) = run_ranks(2, profiled, stage, 1), run_ranks(2, profiled, stage, 3)
    assert not any(cost.flops or cost.seconds for cost in before)
    module = CASE.build()
    by_name = {cost.name: cost for cost in costs}
    assert by_name.keys() == {name for name, _ in module.named_modules()}
    assert by_name[""].flops == run_ranks(1, count_plainly)[0]
    assert by_name["head"].flops == 2 * MICRO * LENGTH * VOCAB * WIDTH
    assert (
        by_name["blocks.1"].flops == by_name["blocks.2"].flops > sum(by_name[f"blocks.1.{n}"].flops for n in ("up", "down"))
    )
    assert {name: cost.params for name, cost in by_name.items()} == {
        name: sum(param.numel() for param in inner.parameters()) for name, inner in module.named_modules()
    }
    assert 0 < by_name["blocks.1.up"].seconds < by_name["blocks.1"].seconds < by_name[""].seconds


class Attention(nn.Module):
    """Attention of 4 heads for queries and 2 for keys and values, and one product in two groups of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.others = nn.Linear(32, 4 * 8, bias=False), nn.Linear(32, 2 * (8 + 8), bias=False)
        self.experts = nn.Parameter(torch.ones(2, 32, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        queries = self.queries(x).view(batch, length, 4, 8).transpose(1, 2)
        keys, values = self.others(x).view(batch, length, 2, 2, 8).unbind(2)
        mixed = F.scaled_dot_product_attention(queries, keys.transpose(1, 2), values.transpose(1, 2), enable_gqa=True)
        rows = mixed.transpose(1, 2).reshape(-1, 32).bfloat16()
        ends = torch.tensor([len(rows) // 4, len(rows)], dtype=torch.int32)
        return torch._grouped_mm(rows, self.experts.bfloat16(), offs=ends).float()


def attending(batch: int, length: int) -> float:
    """The operations of a forward."""
    engine = zerorun.initialize(Attention(), make_config(0, flops_profiler={"enabled": True, "profile_step": 0}))
    for _ in range(2):
        engine.backward(engine(torch.ones(batch, length, 32)).mean())
        engine.step()
    assert engine.observer is not None and engine.observer.flops is not None
    found = engine.observer.flops.costs()[0].flops
    engine.destroy()
    return found


def test_attention_and_grouped_products_count() -> None:
    batch, length = 2, 16
    (found,) = run_ranks(1, attending, batch, length)
    tokens = batch * length
    layers = 2 * tokens * 32 * (32 + 32)
    attention = 2 * 2 * batch * 4 * length * length * 8
    assert found == layers + attention + 2 * tokens * 32 * 24


def pipelined() -> list[ModuleCost]:
    config = make_config(1, accumulation=2, flops_profiler={"enabled": True, "profile_step": 0})
    topology = zerorun.Topology.create(2, dist.get_rank(), pipe=2, device_type="cpu")
    engine = zerorun.initialize(pipeline.build(2, topology=topology), config, topology=topology)
    data = pipeline.data_of(0, 2)
    for _ in range(2):
        engine.train_batch(data)
    found = engine.observer.flops.costs() if engine.observer is not None and engine.observer.flops is not None else []
    engine.destroy()
    topology.close()
    return found


def test_pipelines() -> None:
    costs, _ = run_ranks(2, pipelined)
    tokens = sum(pipeline.batch_of(0, micro, 0)[0].numel() for micro in range(2)) / 2
    assert costs[0].flops == 2 * tokens * 2 * pipeline.WIDTH * 4 * pipeline.WIDTH  # one block: up and down


def lines_of(changes: dict[str, Any]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "peak_flops", lambda device: 1e15)
        return told(make_config(1, accumulation=2, precision="bf16", flops_profiler=changes), prefix="FLOP profile")


def test_tables(tmp_path: Path) -> None:
    section = {"enabled": True, "profile_step": 1, "module_depth": 2, "top_modules": 2}
    lines, others = run_ranks(2, lines_of, section)
    assert (len(lines), others) == (1, [])
    assert "step 1 on rank 0" in lines[0] and "% of 1000.00 TFLOPS" in lines[0]
    assert "depth 2:\n    params  Block" in lines[0] and "depth 1:" not in lines[0]
    assert "      up (Linear): 544" in lines[0]
    brief = {**section, "module_depth": -1, "detailed": False, "output_file": str(tmp_path / "new" / "profile.txt")}
    assert run_ranks(2, lines_of, brief) == [[], []]
    text = (tmp_path / "new" / "profile.txt").read_text()
    assert "depth 0:" in text and "depth 3:" in text and "up (Linear)" not in text
