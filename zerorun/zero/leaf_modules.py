"""Leaf modules, by DeepSpeed's names: modules in which not every child runs in each forward, such as a layer of experts.

A marked module is gathered whole: no unit begins inside it (see [Note: choosing units]). Without a mark, a list of experts
that is in no block would be cut into a unit for each expert. That is right where ranks run different experts, too, but
ranks ask one another then which they need.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..errors import ModelError
from ..plan.units import LEAF_MARK, names_of
from .sharded_model import find


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Mark all modules of these classes, given as such or by name, and return them. Call it before ``initialize()``.

    Raises ModelError if the model has none of a class, and for one that an engine has cut into several units.
    """
    return _mark(model, leaf_module_classes, True)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Take the mark off all modules of these classes, and return them. Raises as ``set_z3_leaf_modules`` does."""
    return _mark(model, leaf_module_classes, False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules, in the order of ``model.modules()``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """True if the module is marked."""
    return bool(getattr(module, LEAF_MARK, False))


def _mark(model: nn.Module, classes: Iterable[type[nn.Module] | str], mark: bool) -> list[nn.Module]:
    found: list[nn.Module] = []
    for wanted in classes:
        matching = [module for module in model.modules() if _is_of(module, wanted)]
        if not matching:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ModelError(f"the model has no module of class {name}. Remedy: give a class that it has.")
        found += matching
    for module in found if mark else ():
        _refuse_cut(module)
    for module in found:
        setattr(module, LEAF_MARK, mark)
    return found


def _refuse_cut(module: nn.Module) -> None:
    homes = (find(param) for param in module.parameters())
    units = {home.unit.name for model, home in filter(None, homes) if model.runtime.plan.shares_params}
    if len(units) > 1:
        raise ModelError(
            f"a {type(module).__name__} is marked as a leaf after initialize(), which has cut it into the units "
            f"{sorted(units)}. Remedy: mark it before, or name it in zero_optimization.leaf_module."
        )


def _is_of(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        return wanted in names_of(type(module))
    return isinstance(module, wanted)
