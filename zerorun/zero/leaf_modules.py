"""Leaf modules, by DeepSpeed's names: modules in which not every child runs in each forward, such as a layer of experts.

A marked module is gathered whole: no unit begins inside it (see [Note: choosing units]). Without a mark, a list of experts
that is in no block would be cut into a unit for each expert. That is right where ranks run different experts, too, but
ranks ask one another then which they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import nn

from ..config.sections import LeafModule
from ..errors import ModelError
from ..plan.units import LEAF_MARK, names_of
from .sharded_model import find

Wanted = TypeVar("Wanted", bound="type[nn.Module] | str")


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of these classes, given as such or by name, and return them. Call it before ``initialize()``.

    Raises ModelError for one that an engine has cut into several units and, if ``raise_if_not_found``, if the model has
    none of a class.
    """
    return _mark_all(model, leaf_module_classes, _is_of, "of class", True, raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark off all modules of these classes, and return them. Raises as ``set_z3_leaf_modules`` does."""
    return _mark_all(model, leaf_module_classes, _is_of, "of class", False, raise_if_not_found)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in the model, or with ``flag=False`` take the mark off them.

    Returns (the modules, the names that the model has not). Raises as ``set_z3_leaf_modules`` does.
    """
    return _mark_all(model, module_names, lambda name, _, wanted: name == wanted, "named", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """As ``set_z3_leaf_modules_by_name``, of the modules whose names end like this."""
    ends = str.endswith
    return _mark_all(
        model, module_name_suffixes, lambda name, _, end: ends(name, end), "with a name in", flag, raise_if_not_found
    )


def mark_chosen(model: nn.Module, chosen: LeafModule) -> None:
    """Mark what the section ``leaf_module`` chooses, so that scripts find it marked."""
    set_z3_leaf_modules(model, chosen.classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, chosen.names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, chosen.name_suffixes, raise_if_not_found=False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules, in the order of ``model.modules()``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(module: nn.Module) -> bool:
    """True if the module is marked."""
    return bool(getattr(module, LEAF_MARK, False))


def _mark_all(
    model: nn.Module,
    all_wanted: Iterable[Wanted],
    matches: Callable[[str, nn.Module, Wanted], bool],
    how: str,
    mark: bool,
    raises: bool,
) -> tuple[list[nn.Module], list[Wanted]]:
    """(The modules that match, each once; what of ``all_wanted`` none matches)."""
    found: dict[int, nn.Module] = {}
    missing = []
    for wanted in all_wanted:
        matching = [module for name, module in model.named_modules() if matches(name, module, wanted)]
        if not matching:
            missing.append(wanted)
        found |= {id(module): module for module in matching}
    if missing and raises:
        name = missing[0] if isinstance(missing[0], str) else getattr(missing[0], "__name__", "")
        raise ModelError(f"the model has no module {how} {name}. Remedy: leave it out, or give one that the model has.")
    for module in found.values() if mark else ():
        _refuse_cut(module)
    for module in found.values():
        setattr(module, LEAF_MARK, mark)
    return list(found.values()), missing


def _refuse_cut(module: nn.Module) -> None:
    homes = (find(param) for param in module.parameters())
    units = {home.unit.name for model, home in filter(None, homes) if model.runtime.plan.shares_params}
    if len(units) > 1:
        raise ModelError(
            f"a {type(module).__name__} is marked as a leaf after initialize(), which has cut it into the units "
            f"{sorted(units)}. Remedy: mark it before, or name it in zero_optimization.leaf_module."
        )


def _is_of(name: str, module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        return wanted in names_of(type(module))
    return isinstance(module, wanted)
