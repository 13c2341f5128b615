"""The FLOP profiler counts what torch's counter finds in the plain module, at every stage, and prints it once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import test_pipeline as pipeline
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_ranks
from models import CASES, LENGTH, MICRO, VOCAB, WIDTH, Place
from simulation import simulated_device
from test_monitors import told
from torch import nn
from training import make_config, make_engine

import zerorun
from zerorun.monitors import flops
from zerorun.monitors.flops import ModuleCost, _short

CASE = CASES["plain"]


def count_plainly() -> int:
    return counted(lambda: CASE.loss(CASE.build(), Place()))


def counted(run: Callable[[], object]) -> int:
    """The operations of ``run`` as torch's counter finds them, which takes attention on CPUs for nothing by itself."""
    from torch.utils.flop_counter import FlopCounterMode  # which imports Triton

    with FlopCounterMode(display=False, custom_mapping=flops._more_formulas()) as counter:
        run()
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


FIRST, PROFILED = 2, 3  # the first step of a run that goes on, and the one that is profiled


def unusual(kind: str, simulated: bool, file: str) -> float:
    """Steps of loops of another kind. Returns the operations of the profiled step, and writes the table to ``file``."""
    with simulated_device() if simulated else nullcontext():
        section = {"enabled": True, "profile_step": PROFILED, "output_file": file}
        engine = zerorun.initialize(CASE.build(), make_config(1, accumulation=2, flops_profiler=section))
        engine.set_counters({"global_steps": FIRST})
        for step in range(FIRST, PROFILED + 4):
            if kind == "more micro-batches" and step == PROFILED:
                engine.set_train_batch_size(6 * MICRO)
            micro_batches = 3 if kind == "more micro-batches" and step >= PROFILED else 2
            for micro in range(micro_batches):
                batch = torch.full((MICRO, 2 + step), micro)  # so that each step has other costs
                loss = engine(batch).mean()
                if kind == "two forwards":
                    loss = loss - engine(batch).mean()
                engine.backward(loss)
                engine.step()
            if kind == "evaluation with gradients":
                engine.eval()
                engine(batch)
                engine.train()
            if kind == "trained in evaluation mode":
                engine.eval()
        engine.settle()
        flops = 0.0
        if engine.observer is not None:
            assert engine.observer.flops is not None
            flops = engine.observer.flops.costs()[0].flops
        engine.destroy()
    return flops


def flops_of_forward(length: int) -> int:
    module = CASE.build()
    return counted(lambda: module(torch.zeros(MICRO, length, dtype=torch.long)))


@pytest.mark.each_value
@pytest.mark.parametrize("simulated", (False, True))
@pytest.mark.parametrize(
    ("kind", "forwards", "micro_batches"),
    [
        ("two forwards", 2, 2),
        ("evaluation with gradients", 1, 2),
        ("more micro-batches", 1, 3),
        ("trained in evaluation mode", 1, 2),
    ],
)
def test_the_profiled_step_has_its_own_forwards(
    kind: str, forwards: int, micro_batches: int, simulated: bool, tmp_path: Path
) -> None:
    """Two forwards for each micro-batch, an evaluation or other numbers of micro-batches are no other steps."""
    (found, _), (each,) = (
        run_ranks(2, unusual, kind, simulated, str(tmp_path / "table")),
        run_ranks(1, flops_of_forward, 2 + PROFILED),
    )
    assert found == forwards * each
    table = (tmp_path / "table").read_text()
    rows = dict(line.split(":", 1) for line in table.splitlines() if ": " in line)
    seconds = float(rows["iter latency"].split()[0]) / 1e3
    assert float(rows["samples/second"]) * seconds == pytest.approx(2 * MICRO * micro_batches, rel=0.05)
    total = rows["fwd+bwd flops per GPU and step, bwd = 2 * fwd"]
    assert total.strip() == _short(float(3 * micro_batches * found)).strip()


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


def lines_of(changes: dict[str, Any], prefix: str = "FLOP profile", **precision: Any) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "peak_flops", lambda device: 1e15)
        given = precision or {"precision": "bf16"}
        return told(make_config(1, accumulation=2, flops_profiler=changes, **given), prefix=prefix)


def mfu_by_precision() -> list[bool]:
    """Whether a table has one: in fp32, in fp16, and under autocast."""
    section = {"enabled": True, "profile_step": 0, "detailed": False}
    given: tuple[dict[str, Any], ...] = (
        {"precision": "fp32"},
        {"precision": "fp16"},
        {"torch_autocast": {"enabled": True}},
    )
    tables = [lines_of(section, **precision) for precision in given]
    return ["% of 1000.00 TFLOPS" in lines[0] for lines in tables]


def test_the_peak_is_that_of_products_in_16_bits() -> None:
    assert run_ranks(1, mfu_by_precision) == [[False, True, True]]


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


def test_a_table_that_cannot_be_written_is_printed(tmp_path: Path) -> None:
    """The step of the one rank that writes it ended in an OSError, and the others waited for that rank."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "profile.txt"):
        section = {"enabled": True, "profile_step": 1, "output_file": str(path)}
        mine, others = run_ranks(2, lines_of, section, "")
        told = [line for line in mine if line.startswith(("FLOP profile", "flops_profiler"))]
        assert told[0].startswith(f"flops_profiler.output_file = {str(path)!r}: it cannot be written")
        assert "Remedy" in told[0] and len(told) == 2 and "step 1 on rank 0" in told[1]
        assert not any("FLOP profile" in line for line in others)
