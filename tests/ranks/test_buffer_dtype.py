"""``data_types.buffer_dtype``: floating-point buffers are cast, others and shared ones stay what they are."""

from __future__ import annotations

import torch
from harness import run_ranks
from models import Case, Mlp
from training import make_config, make_engine

from zerorun.plan.ledger import planned_bytes


class Buffered(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 100))
        self.register_buffer("count", torch.tensor(7))
        self.down.register_buffer("table", self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table.sum().float()


def cast(precision: str, dtype: str | None) -> tuple[list[torch.dtype], bool, bool]:
    case = Case("buffered", Buffered, lambda model, place: model(torch.ones(2, 8)).sum())
    section = {"data_types": {"buffer_dtype": dtype}} if dtype is not None else {}
    engine = make_engine(case, make_config(2, precision=precision, **section))
    table, count, shared = engine.module.table, engine.module.count, engine.module.down.table
    planned = planned_bytes(engine.plan)["buffers"] == engine.memory_report()["buffers"]
    engine.destroy()
    return [table.dtype, count.dtype], shared is table, planned


def test_buffers_are_cast_if_that_is_said() -> None:
    rows = (("fp32", "bf16", torch.bfloat16), ("bf16", "fp32", torch.float32), ("bf16", None, torch.float32))
    for precision, said, dtype in rows:
        for dtypes, is_shared, is_planned in run_ranks(2, cast, precision, said):
            assert dtypes == [dtype, torch.int64] and is_shared and is_planned
