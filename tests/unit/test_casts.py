"""Containers that calls are given: their tensors are found and cast, whatever the containers are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from zerorun.optim.nested_containers import cast_floats
from zerorun.zero.placeholders import tensors_in

Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    rows: torch.Tensor
    length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.length += len(self.rows)


def rows() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    "container",
    [
        {"a": rows(), "b": [rows(), (rows(), torch.arange(3))], "c": "text"},
        defaultdict(list, a=rows()),
        OrderedDict(a=rows()),
        Pair(rows(), None),
        torch.max(rows(), 1),
        CausalLMOutput(logits=rows()),
        BatchEncoding({"pixels": rows()}),
        Batch(rows()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_floats_are_cast_and_nothing_else_changes(container: Any) -> None:
    made = cast_floats(container, torch.bfloat16)
    assert type(made) is type(container)
    given, found = list(tensors_in(container)), list(tensors_in(made))
    assert len(given) == len(found) > 0
    for before, after in zip(given, found, strict=True):
        assert before.dtype != torch.bfloat16  # what the caller has is as it was
        assert after.dtype == (torch.bfloat16 if before.is_floating_point() else before.dtype)
        assert torch.equal(before, after.to(before.dtype))
    assert getattr(made, "length", 2) == 2
    assert cast_floats(container, torch.float32) is container


def test_one_tensor_in_two_places_is_one_tensor() -> None:
    given: dict[str, Any] = {"a": rows()}
    given |= {"b": given["a"], "itself": given}
    made = cast_floats(given, torch.bfloat16)
    assert made["a"] is made["b"]
