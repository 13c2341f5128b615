"""Leaf modules, by DeepSpeed's names: modules in which not every child runs in each forward, such as a layer of experts.

DeepSpeed gathers module by module, and hangs where ranks run different experts, unless it is told to gather the experts
together. Here a unit is a whole block, which all ranks unshard in the same order, whatever runs inside. So every module in
a block is a leaf by construction; the mark is only kept, for those who ask.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..errors import ModelError

_MARK = "_z3_leaf"  # where accelerate looks for it


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Mark all modules of these classes, given as such or by name, and return them.

    Raises ModelError if the model has none of a class.
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
    return bool(getattr(module, _MARK, False))


def _mark(model: nn.Module, classes: Iterable[type[nn.Module] | str], mark: bool) -> list[nn.Module]:
    found: list[nn.Module] = []
    for wanted in classes:
        matching = [module for module in model.modules() if _is_of(module, wanted)]
        if not matching:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ModelError(f"the model has no module of class {name}. Remedy: give a class that it has.")
        found += matching
    for module in found:
        setattr(module, _MARK, mark)
    return found


def _is_of(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        kind = type(module)
        return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(module, wanted)
