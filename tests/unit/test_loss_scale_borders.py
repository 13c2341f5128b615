"""What passes the border of an engine: containers keep their types, and the script's tensors are its own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from zerorun.optim.loss_scale_borders import Border
from zerorun.optim.loss_scaler import LossScaler


@pytest.fixture
def border() -> Iterator[Border]:
    made = Border(LossScaler(8.0), lambda: 8.0, lambda: 1.0, int)
    yield made
    made.close()


class Own(tuple[Any, ...]):
    """Has an attribute, and is not made from its items."""

    def __new__(cls, first: Any, second: Any, note: str) -> Own:
        made = super().__new__(cls, (first, second))
        made.note = note
        return made


@dataclass(frozen=True, slots=True)
class Slots:
    first: Any
    second: Any


@dataclass
class Late:
    first: Any
    second: Any = field(init=False)

    def __post_init__(self) -> None:
        self.second = 5


Named = namedtuple("Named", "first second")


def filled(kind: Any, tensor: torch.Tensor) -> Any:
    if kind in (dict, OrderedDict):
        return kind(first=tensor, second=5)
    if kind is defaultdict:
        return defaultdict(list, first=tensor, second=5)
    if kind in (list, tuple):
        return kind([tensor, 5])
    return {Own: lambda: Own(tensor, 5, "kept"), Late: lambda: Late(tensor)}.get(kind, lambda: kind(tensor, 5))()


def items_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value.first, value.second]


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict, list, tuple, Own, Named, Slots, Late])
def test_containers_keep_their_types_and_the_module_keeps_its_own(border: Border, kind: Any) -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    value = filled(kind, tensor)
    passed = border.outwards(value)
    assert type(passed) is kind and passed is not value
    assert items_of(value)[0] is tensor
    first, second = items_of(passed)
    assert first is not tensor and torch.equal(first, tensor) and second == 5
    assert first.data_ptr() == tensor.data_ptr(), "memory was copied"
    assert getattr(passed, "note", "kept") == "kept"
    assert getattr(passed, "default_factory", None) is getattr(value, "default_factory", None)


def test_what_has_no_gradient_is_not_touched(border: Border) -> None:
    for value in ([torch.ones(2)], {"a": (torch.ones(2), None)}, "text", None, torch.arange(3)):
        assert border.outwards(value) is value


def test_what_torch_returns(border: Border) -> None:
    found = torch.ones(2, 2, requires_grad=True).max(dim=0)
    passed = border.outwards(found)
    assert type(passed) is type(found) and passed.values is not found.values and passed.indices is found.indices


def test_the_same_object_is_the_same_again(border: Border) -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    pair = [tensor, tensor]
    passed = border.outwards({"a": tensor, "b": pair, "c": pair})
    assert passed["b"] is passed["c"] and passed["a"] is passed["b"][0] is passed["b"][1]


def test_gradients_share_no_memory() -> None:
    border = Border(LossScaler(), lambda: 1.0, lambda: 1.0, int)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    a, b = border.inwards((x, y))
    for _ in range(2):
        border.outwards(a + b).sum().backward(retain_graph=True)
    assert x.grad is not None and y.grad is not None
    assert x.grad.tolist() == y.grad.tolist() == [2.0, 2.0]
    assert x.grad.data_ptr() != y.grad.data_ptr()


def test_a_view_that_is_written_to_is_written_to_inside_as_well(border: Border) -> None:
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 3
    kept = inner.square()
    outer = border.outwards(inner)
    outer.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (kept.sum() + outer.sum()).backward()


def test_third_derivatives(border: Border) -> None:
    x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    value = border.outwards(border.inwards(x) ** 4)
    for wanted in (32.0, 48.0, 48.0):
        (value,) = torch.autograd.grad(value, x, create_graph=True)
        assert value.item() == wanted


def test_engines_that_scale_are_known(border: Border) -> None:
    plain = Border(LossScaler(), lambda: 1.0, lambda: 1.0, int)
    assert border in Border.scaling and plain not in Border.scaling
    border.close()
    assert border not in Border.scaling
