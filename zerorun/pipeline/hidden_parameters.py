"""Finds the parameters that a layer, a function or a loss uses without having them.

Each stage trains the parameters of its own layers. One that a function reaches in another way is, on a stage other than its
layer's, a copy that nobody trains. What a function may reach is read from its code: variables of the functions around it,
defaults, the globals that it names and, of objects, classes and Python modules, the attributes that it names.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
from collections import deque
from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import PipelineError

Names = frozenset[str]
Held = list[tuple[Any, Names]]  # what is reached, and the attributes named by the code that reaches it
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def refuse_hidden_parameters(function: Any, what: str, of_layers: frozenset[int]) -> None:
    """Raise PipelineError if ``function``, which is no module, uses parameters.

    ``of_layers``: id(parameter) of those that layers have. A frozen tensor that no layer has is none.
    """
    for holder, tensor in tensors_reached(function):
        if tensor.requires_grad or id(tensor) in of_layers:
            known = "with parameters" if isinstance(holder, nn.Module) else f"of shape {tuple(tensor.shape)}"
            raise PipelineError(
                f"{what} is a function that uses a {type(holder).__name__} {known}, which may lie on another stage. "
                "Remedy: make the module a layer, or use TiedLayerSpec with a forward_fn to share it between layers, or "
                "freeze what is not to be trained."
            )


def hidden_in(layer: nn.Module) -> frozenset[int]:
    """Return id(tensor) of those that the forwards in ``layer`` reach although ``layer`` does not have them."""
    return frozenset(id(tensor) for _, tensor in tensors_reached(layer)).difference(map(id, layer.parameters()))


def tensors_reached(*roots: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield (a module, one of its parameters) and (a tensor, itself) for all that ``roots`` may use."""
    held: Held = [(root, frozenset()) for root in roots]
    seen: dict[int, Names] = {}
    while held:
        item, names = held.pop()
        known = seen.get(id(item))
        if isinstance(item, _PLAIN) or (known is not None and names <= known):
            continue
        names, seen[id(item)] = names.difference(known or ()), names.union(known or ())
        if isinstance(item, torch.Tensor):
            yield item, item
        elif isinstance(item, nn.Module):
            yield from ((item, param) for param in item.parameters())
            for module in item.modules():
                forward = type(module).forward
                held += [(forward, frozenset()), *_attributes(module, names | _attributes_in(forward))]
        else:
            held += _next(item, names)


def _next(item: Any, names: Names) -> Held:
    """What is reached from ``item`` in one step, by a code that names the attributes ``names``."""
    if isinstance(item, FunctionType):
        return _next_of_function(item)
    if isinstance(item, MethodType):
        return [(item.__func__, frozenset()), (item.__self__, _attributes_in(item.__func__))]
    if isinstance(item, partial):
        named = names | _attributes_in(item.func)
        return [(value, named) for value in (item.func, *item.args, *item.keywords.values())]
    if isinstance(item, dict):
        return [(value, names) for value in dict.values(item)]  # not the class's own, which may load something
    if isinstance(item, list | tuple | set | frozenset | deque):
        return [(value, names) for value in item]
    if isinstance(item, ModuleType | type):
        return [(vars(item)[name], names) for name in names if name in vars(item)]
    return _attributes(item, names | {"__call__", "__wrapped__"})


def _next_of_function(function: FunctionType) -> Held:
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is still empty
            found.append(cell.cell_contents)
    known = function.__globals__
    if not _is_foreign(function):
        found += [known[name] for name in _globals_in(function.__code__) if name in known]
    return [(value, _attributes_in(function)) for value in found]


def _attributes(item: Any, names: Names) -> Held:
    """The attributes ``names`` of ``item``, with the code of its methods and properties. None of it is run."""
    own, found = getattr(item, "__dict__", {}), []
    for name in names:
        member = own.get(name) if name in own else inspect.getattr_static(type(item), name, None)
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, staticmethod | classmethod):
            member = member.__func__
        elif isinstance(member, MemberDescriptorType):  # of __slots__
            member = getattr(item, name, None)
        found.append((member, names))
        if isinstance(member, FunctionType) and name not in own:
            found.append((item, _attributes_in(member)))
    return found


def _is_foreign(function: FunctionType) -> bool:
    """True for those of torch and of Python's library, which know nothing of the script."""
    package = str(function.__globals__.get("__name__")).partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


@cache
def _globals_in(code: CodeType) -> Names:
    steps = (step for part in _parts(code) for step in dis.get_instructions(part))
    return frozenset(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def _attributes_in(function: Any) -> Names:
    """The names of attributes in the code of ``function``; none if it is foreign, or not written in Python."""
    written = isinstance(function, FunctionType) and not _is_foreign(function)
    return _names_in(function.__code__) if written else frozenset()


@cache
def _names_in(code: CodeType) -> Names:
    return frozenset(name for part in _parts(code) for name in part.co_names)


def _parts(code: CodeType) -> Iterator[CodeType]:
    """``code``, and that of functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
