"""Leaf modules: the marks that scripts made for DeepSpeed set."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from zerorun.errors import ModelError
from zerorun.zero import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)


@pytest.mark.parametrize("classes", ([nn.Linear], ["Linear"], ["torch.nn.modules.linear.Linear"]))
def test_marks_are_kept_and_taken_off(classes: list[type[nn.Module] | str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert set_z3_leaf_modules(model, classes) == [model[0], model[2]] == get_z3_leaf_modules(model)
    assert z3_leaf_module(model[0]) and not z3_leaf_module(model[1])
    unset_z3_leaf_modules(model, classes)
    assert get_z3_leaf_modules(model) == []


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match="no module of class Conv2d"):
        set_z3_leaf_modules(nn.Linear(2, 2), [nn.Conv2d])
    assert set_z3_leaf_modules(nn.Linear(2, 2), [nn.Conv2d], raise_if_not_found=False) == []


@pytest.mark.parametrize(
    ("mark", "wanted", "of_class"),
    (
        (set_z3_leaf_modules_by_name, ["1.0", "9"], "named 9"),
        (set_z3_leaf_modules_by_suffix, [".0", "x"], "with a name in x"),
    ),
)
def test_modules_are_marked_by_name(mark: Any, wanted: list[str], of_class: str) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ModelError, match=f"no module {of_class}"):
        mark(model, wanted)
    assert get_z3_leaf_modules(model) == []
    assert mark(model, wanted, raise_if_not_found=False) == ([model[1][0]], [wanted[1]])
    assert get_z3_leaf_modules(model) == [model[1][0]]
    assert mark(model, wanted[:1], False) == ([model[1][0]], [])
    assert get_z3_leaf_modules(model) == []
