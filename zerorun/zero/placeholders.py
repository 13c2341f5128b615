"""Placeholders: what a resharded parameter shows, and the watch that finds code which reads it.

[Note: loud placeholders]
While a unit is resharded, its parameters keep shape, dtype and device, but read as NaN and refuse in-place writes: each is
one NaN expanded to the shape. A mistake shows up as a NaN or an error, and never as another unit's weights.

[Note: the watch]
A NaN in a loss is traced to its placeholder through the autograd graph. In evaluation there is no graph. So the first pass
of each kind runs under a watch, which sees every operation and raises at the one that is given a placeholder. It names the
parameter, needs no NaN and does not wait for the device. It costs Python time for each operation, but only in this pass.
Of what is compiled it sees the operations that are left, such as matrix products.

[Note: versions]
What autograd has saved of a weight may be a view of the slot, which does not become NaN: while the unit is resharded, other
weights are there. A backward reads it then if it comes into a unit by something that has no hook, such as an activation in
a list of the script. autograd compares the version of what it has saved, which counts writes in place, with that at the
time, and views share it. So a parameter has another version while its unit is resharded: an error, and no wrong gradient.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ModelError, ReleasedParameterError
from ..plan.parameter_kinds import inside
from ..plan.replaced_forwards import uncompiled

AWAY = 1 << 30  # what the version of a parameter has beyond the number of writes while it is resharded

# Prefixes of the names of operations that use the shape, dtype and device of a tensor, and not its values.
_READ_NO_VALUES = (
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_", "is_same_size",
    "_has_compatible_shallow_copy_type",
)  # fmt: skip


class ReadWatch(TorchDispatchMode):
    """Raises ReleasedParameterError in the first operation that reads one of the placeholders.

    ``shown``: (elements [parameters] that ``placeholders`` returned, the parameters' names, the unit's name).
    """

    supports_higher_order_operators = True

    def __init__(self, shown: Iterable[tuple[torch.Tensor, Sequence[str], str]]) -> None:
        super().__init__()
        self._shown = {storage_key(marks): (names, unit) for marks, names, unit in shown}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to PyTorch, whose wrapper for skipped classes imports the compiler: a second in the first step."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True to PyTorch, which never compiles what it has once met under another mode."""
        return True

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not getattr(func, "is_view", False) and not func.__name__.startswith(_READ_NO_VALUES):
            for tensor in (inner for given in tensors_in((args, kwargs)) for _, inner in inside(given)):
                found = self._shown.get(storage_key(tensor))
                if found is not None:
                    names, unit = found
                    raise released_parameter(names[int(tensor.storage_offset())], unit)
        return func(*args, **kwargs)


def released_parameter(name: str, unit: str) -> ReleasedParameterError:
    return ReleasedParameterError(
        f"parameter {name!r} was used outside the forward of its unit {unit!r}, where only a placeholder (NaN) is on this "
        "rank. Remedy: use it inside that module's forward, or wrap the use in "
        "zerorun.zero.GatheredParameters(...), or name the class of the module that uses it in "
        "zero_optimization.unit_policy so that both are one unit."
    )


_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+)")  # of autograd's own error


@contextmanager
def explained_reads(released: Callable[[], tuple[str, str] | None]) -> Iterator[None]:
    """A backward: raise ModelError where autograd refuses to read a weight that is away, see [Note: versions].

    Where a weight is there that was away when it was saved: ReleasedParameterError. ``released`` finds out which, and of
    which unit.
    """
    try:
        yield
    except RuntimeError as error:
        found = _VERSIONS.search(str(error))
        now, saved = (int(number) >= AWAY for number in found.groups()) if found is not None else (False, False)
        if saved and (name := released()) is not None:
            raise released_parameter(*name) from error
        if not now:
            raise
        raise ModelError(
            "a backward needs weights of a unit that are not on this rank, and no output of the unit has called for them: "
            "the loss depends on something that its forward computes on the way and that is kept where it is not found at "
            "stage 3, such as in a list of the script, or in an attribute that the first forwards left empty. Remedy: "
            "keep it as an attribute of the module from the first forward on, or get it by a forward hook of a layer, or "
            "let the forward return it; or use stage 2."
        ) from error


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested dicts, lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


_DEEPEST_OBJECT = 3  # one as an attribute of another


def tensors_held_by(value: Any) -> Iterator[torch.Tensor]:
    """As ``tensors_in``, also those in sets, and in attributes of objects of any class but modules; each container once."""
    stack: list[tuple[Any, int]] = [(value, _DEEPEST_OBJECT)]
    seen: set[int] = set()
    while stack:
        holder, depth = stack.pop()
        if isinstance(holder, torch.Tensor):
            yield holder
            continue
        if id(holder) in seen or isinstance(holder, (type, str, bytes, int, float, torch.nn.Module)):
            continue
        seen.add(id(holder))
        if isinstance(holder, (dict, UserDict)):
            stack += ((item, depth) for item in holder.values())
        elif isinstance(holder, (list, tuple, set, frozenset)):
            stack += ((item, depth) for item in holder)
        elif is_dataclass(holder):
            stack += ((getattr(holder, field.name), depth) for field in fields(holder))
        elif depth:
            stack += ((item, depth - 1) for item in _attributes(holder))


def _attributes(holder: Any) -> Iterator[Any]:
    yield from getattr(holder, "__dict__", {}).values()
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(holder, name, None)


# Functions of tensors by which programs get at values to save them: torch.save, safetensors, and what precedes both.
_SAVE = frozenset(
    {
        *("__reduce_ex__", "__deepcopy__", "_typed_storage", "bfloat16", "clone", "contiguous", "copy_", "cpu", "cuda"),
        *("data_ptr", "float", "half", "item", "numpy", "storage", "to", "tolist", "untyped_storage"),
    }
)


class UnsavedPlaceholder(torch.Tensor):
    """Has shape, dtype and device of a parameter of which this rank has a part. It cannot be copied, or written to a file.

    Both raise ReleasedParameterError: a file would hold a placeholder instead of the weights.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _SAVE:
            raise ReleasedParameterError(
                "module.state_dict() holds placeholders, which cannot be saved: each rank has a part of the weights. "
                "Remedy: engine.state_dict(), engine.save_16bit_model(dir) or engine.export(dir), on all ranks; before "
                "initialize(), module.state_dict() inside zerorun.zero.GatheredParameters(module.parameters())."
            )
        return super().__torch_function__(func, types, args, kwargs or {})


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that identifies the storage of ``tensor`` while it lives; 0 for tensors without one, such as sparse."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def placeholder(param: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a placeholder for ``param``: with its shape, dtype and device (or ``device``), it reads as NaN.

    In-place writes to it raise an error.
    """
    return _shown(_marks(1, param.dtype, device or param.device)[0], param)


def placeholders(params: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (elements [len(params)], placeholders that show one element each) for ``params`` of one dtype and device."""
    marks = _marks(len(params), params[0].dtype, params[0].device)
    return marks, [_shown(mark, param) for mark, param in zip(marks, params, strict=True)]


def _shown(mark: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return mark.view(1 if param.dim() else ()).expand(param.shape)


def _loud_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _marks(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((count,), _loud_value(dtype), dtype=dtype, device=device)


def is_loud(marks: torch.Tensor) -> torch.Tensor:
    """Return which elements have the value that placeholders show."""
    value = _loud_value(marks.dtype)
    if value == value:
        return marks == value
    return (marks if marks.is_complex() else marks.float()).isnan()  # 8-bit floats have no isnan()
