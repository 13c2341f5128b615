"""``data_types.buffer_dtype``: floating-point buffers are cast, others and shared ones stay what they are."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from models import Case, Mlp
from torch import nn
from training import make_config, make_engine

from zerorun.log import logger
from zerorun.plan.byte_ledger import planned_bytes


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


class Positions(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(2, 8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.positions)


class Normed(Mlp):
    """BatchNorm refuses running means of another dtype, and spectral norm vectors of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Spectral(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def added(dtype: str | None, kind: type[nn.Module] = Positions) -> list[str]:
    """The notes at the error, if there is one. Python 3.10 has no notes, and there they are logged."""
    section = {"data_types": {"buffer_dtype": dtype}} if dtype is not None else {}
    case = Case("buffers", kind, lambda model, place: model(torch.ones(2, 8)).sum())
    engine = make_engine(case, make_config(2, precision="bf16", **section))
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "warning", notes.append)
        try:
            engine(torch.ones(2, 8))
        except RuntimeError as error:
            notes += getattr(error, "__notes__", [])
    engine.destroy()
    return notes


def test_an_error_over_dtypes_names_buffers() -> None:
    """A table that is added to activations makes them fp32, and the next layer refuses them in torch's words."""
    for (note,) in run_ranks(2, added, None):
        assert "torch.bfloat16: 'positions' (torch.float32). What" in note and '{"buffer_dtype": "bf16"}' in note
    assert run_ranks(2, added, "bf16") == [[], []]


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Normed, ("norm.running_mean", "norm.running_var")), (Spectral, ("norm.parametrizations.weight.0._u",))],
)
def test_an_error_over_dtypes_names_what_a_layer_keeps(kind: type[nn.Module], names: tuple[str, ...]) -> None:
    for (note,) in run_ranks(2, added, None, kind):
        assert all(f"{name!r} (torch.float32)" in note for name in names)
        assert "'scale'" not in note, "it has nothing to do with the error"
    assert run_ranks(2, added, "bf16", kind) == [[], []]
