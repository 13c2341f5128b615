"""Tells which blocks of a model compute alike, so that a plan is tried out on one of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_Key = tuple[str, str]  # a module in the block, and an attribute of it
_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# What transformers notes in modules: their configuration, whether they have values, and what checkpoints activations.
_OF_TRANSFORMERS = ("config", "_is_hf_initialized", "gradient_checkpointing", "_gradient_checkpointing_func")
_VALUES = (type(None), bool, int, str, bytes, torch.dtype, torch.Size, type)
_DEPTH, _ELEMENTS = 5, 1000  # what is looked at of objects in objects, and of containers


def kinds_of(blocks: Sequence[nn.Module]) -> list[object]:
    """Return a key for each of ``blocks``, which follow each other. Those that compute alike have equal ones.

    Blocks of one kind have the same classes, attributes, functions and shapes. A number that only tells a block's place, as
    ``layer_idx`` does, makes no difference; nor does the value of a float, such as a rate of dropout, unless it is 0.
    """
    found = [dict(_facts(block)) for block in blocks]
    places: dict[_Key, set[object]] = {}  # what is left of a number when the block's place is taken away
    for place, facts in enumerate(found):
        for key, fact in facts.items():
            is_number = isinstance(fact, tuple) and fact[0] is int
            places.setdefault(key, set()).add(fact[1] - place if is_number else None)  # type: ignore[index]
    counts = {key for key, rest in places.items() if len(rest) == 1 and None not in rest}
    return [frozenset(item for item in facts.items() if item[0] not in counts) for facts in found]


def same_but_for_sizes(one: nn.Module, other: nn.Module) -> bool:
    """True if both have the same classes, functions and names, whatever their numbers and the shapes of their tensors."""
    return _unsized(one) == _unsized(other)


def _unsized(block: nn.Module) -> dict[_Key, object]:
    return {key: _without_sizes(fact) for key, fact in _facts(block) if key[1] not in _OF_TRANSFORMERS}


def _without_sizes(fact: object) -> object:
    if not isinstance(fact, tuple):
        return fact
    if fact[:1] == (int,) or (len(fact) == 3 and isinstance(fact[1], torch.Size)):
        return fact[0]
    return tuple(_without_sizes(item) for item in fact)


def _facts(block: nn.Module) -> Iterator[tuple[_Key, object]]:
    for name, module in block.named_modules():
        yield (name, ""), type(module)
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield (name, own), _fact(tensor)
        for own, value in vars(module).items():
            if own in _HOOKS:  # which are numbered, over all modules
                yield (name, own), _fact(list(value.values()))
            elif own not in _OF_TORCH:
                yield (name, own), _fact(value)
    first: dict[int, str] = {}
    for name, param in block.named_parameters(remove_duplicate=False):
        yield (name, "is"), first.setdefault(id(param), name)  # tied parameters are one


def _fact(value: Any, depth: int = _DEPTH) -> object:
    """What of ``value`` may decide how a block computes, as something that can be compared and hashed."""
    if isinstance(value, float):
        return float, bool(value)
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype
    if isinstance(value, nn.Module) or not depth:
        return type(value)
    if isinstance(value, FunctionType):
        return value.__code__, _fact((value.__defaults__, value.__kwdefaults__, _closure(value)), depth)
    if isinstance(value, MethodType):
        return _fact(value.__func__, depth)
    if isinstance(value, partial):
        return _fact((value.func, value.args, value.keywords), depth)
    if isinstance(value, dict | list | tuple | set | frozenset) and len(value) > _ELEMENTS:
        return type(value), len(value)
    if isinstance(value, dict):
        return type(value), tuple((_fact(key, depth - 1), _fact(item, depth - 1)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_fact(item, depth - 1) for item in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_fact(item, depth - 1) for item in value)
    if hasattr(value, "__dict__"):
        return type(value), _fact(vars(value), depth - 1)
    return value if type(value).__module__ == "builtins" and callable(value) else type(value)


def _closure(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is still empty
            found.append(None)
    return found
