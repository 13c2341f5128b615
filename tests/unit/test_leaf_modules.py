"""Leaf modules: the marks that scripts made for DeepSpeed set."""

from __future__ import annotations

import pytest
from torch import nn

from zerorun.errors import ModelError
from zerorun.zero import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules, z3_leaf_module


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
