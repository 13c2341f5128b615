"""Foreign checkpoints: what the readers of other runtimes' checkpoints return, and what they have in common. No I/O."""

from __future__ import annotations

import argparse
import datetime
import math
import pathlib
import pickle
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from ..errors import CheckpointError

_NUMBERS = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|f16|c8|c16|[?bhilqBHILQefdFD])")
_MOST_STATES = 100_000  # of the search in match_groups, before it gives up


@dataclass(frozen=True)
class ForeignTensor:
    """One tensor of a foreign checkpoint, not yet read.

    ``set``: ``model`` (the weights that the model computes with), ``master`` (full-precision copies, if their dtype is not
    that of the model's) or ``optimizer.<key>``, such as ``optimizer.exp_avg``. ``name``: as in ``model.state_dict()``.
    ``load`` returns the whole tensor on the CPU, contiguous, with ``shape`` and ``dtype``. It raises CheckpointError.
    """

    set: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


@dataclass
class ForeignCheckpoint:
    """A foreign checkpoint in terms that do not depend on who wrote it.

    ``trainable``: the name of every parameter, without aliases and buffers -> its ``requires_grad``. ``aliases``: the other
    name of a tied parameter -> the name under which it is stored. ``optimizer_type``: such as ``AdamW``, empty if unknown.
    ``group_of``: a parameter's name -> the index in ``groups`` of its optimizer group. ``groups``: their hyperparameters.
    ``scalars``: a key such as ``step`` -> name -> value. ``counters``: global_steps, micro_steps, skipped_steps,
    global_samples, if known.
    ``loss_scale``, for fp16 only: the fields of :class:`zerorun.optim.loss_scaler.LossScaler` except ``hysteresis``.
    ``scheduler``: the state of the learning rate scheduler. ``client_state``: what the user had stored with it.
    ``notes``: what could not be carried over, and why.
    """

    tensors: list[ForeignTensor]
    trainable: dict[str, bool]
    aliases: dict[str, str]
    optimizer_type: str
    group_of: dict[str, int]
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, float]]
    counters: dict[str, int]
    loss_scale: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    client_state: dict[str, Any]
    notes: list[str]


class NumpyDtype:
    """Stands in for ``numpy.dtype`` while a pickle is read, but only for plain numbers, without fields, shapes and flags.

    A real one accepts whatever ``__setstate__`` is given, such as flags, or a field at an offset that its elements do not
    have, and arrays of it then read whatever is in memory there. This class and the next raise ValueError or TypeError.
    """

    def __init__(self, code: str, *unused: bool) -> None:
        if type(code) is not str or not _NUMBERS.fullmatch(code):
            raise ValueError(f"numpy.dtype({code!r:.40}) is not of numbers")
        self.real = numpy.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, order, *rest = state
        if (version, rest) not in ((3, [None, None, None, -1, -1, 0]), (4, [None, None, None, -1, -1, 0, None])):
            raise ValueError("a numpy.dtype has fields, a shape or flags")
        if order not in ("<", ">", "=", "|"):
            raise ValueError(f"a numpy.dtype has the byte order {order!r:.40}")
        self.real = self.real.newbyteorder(order)


class NumpyArray(numpy.ndarray[Any, Any]):
    """An array whose pickle says nothing but its shape, its dtype and the bytes of its elements."""

    def __new__(cls, *unused: Any) -> NumpyArray:
        return super().__new__(cls, (0,), "b")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, in_fortran_order, data = state
        sizes_are_good = type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)
        if type(dtype) is not NumpyDtype or type(data) is not bytes or not sizes_are_good:
            raise ValueError("a numpy.ndarray is not of numbers")
        if math.prod(shape) * dtype.real.itemsize != len(data):
            raise ValueError(f"a numpy.ndarray has {len(data)} bytes for the shape {shape!r:.80}")
        plain: Any = (1, shape, dtype.real, bool(in_fortran_order), data)
        super().__setstate__(plain)


def _reconstruct(kind: Any, *unused: Any) -> NumpyArray:
    if kind is not NumpyArray:
        raise ValueError(f"{kind!r:.80} is no numpy.ndarray")
    return NumpyArray()


def _scalar(dtype: Any, data: Any) -> Any:
    if type(dtype) is not NumpyDtype or type(data) is not bytes or len(data) != dtype.real.itemsize:
        raise ValueError("a number of numpy has not as many bytes as its dtype")
    return numpy.frombuffer(data, dtype.real)[0]


PATHS, PATHS_IN = (pathlib.PosixPath, pathlib.PurePosixPath), ("pathlib", "pathlib._local")  # the latter in Python 3.13


def _harmless_classes() -> list[tuple[Any, str]]:
    plain = (argparse.Namespace, types.SimpleNamespace)
    dates = (datetime.datetime, datetime.date, datetime.timedelta, datetime.timezone)
    found: list[tuple[Any, str]] = [(kind, f"{kind.__module__}.{kind.__qualname__}") for kind in (*plain, *dates)]
    found += [(kind, f"{module}.{kind.__name__}") for kind in PATHS for module in PATHS_IN]
    found += [(NumpyDtype, "numpy.dtype"), (NumpyArray, "numpy.ndarray")]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found += [(_reconstruct, f"{module}._reconstruct"), (_scalar, f"{module}.scalar")]
    return found


HARMLESS = _harmless_classes()
"""What pickles may name beyond torch's own list: classes that only hold values. For ``torch.serialization.safe_globals``.
They are pairs, so that leaving that context does not take away what the user has allowed."""


def refused_class(error: BaseException) -> str:
    """The class that torch's restricted unpickler has refused with ``error``; empty if it is about something else."""
    found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return found[1] if found else ""


def first_line(error: BaseException) -> str:
    """The first line of what ``error`` says, or its class if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The hyperparameters of ``groups``, without parameters, their names and ``step``; one-element tensors as numbers."""
    return [
        {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key not in ("params", "param_names", "step")
        }
        for group in groups
    ]


def optimizer_name(groups: Sequence[Mapping[str, Any]]) -> str:
    """The torch optimizer that has groups with these keys: AdamW, Adam or SGD; empty if they fit another or several."""
    keys = set(groups[0]) if groups else set()
    if {"betas", "amsgrad", "decoupled_weight_decay"} <= keys:
        return "AdamW" if groups[0]["decoupled_weight_decay"] else "Adam"
    return "SGD" if {"momentum", "dampening", "nesterov"} <= keys else ""


def match_groups(
    sizes: Mapping[str, int], wanted: Sequence[int], fits: Callable[[int, int, str], bool], where: str
) -> list[list[str]]:
    """Find the names of each optimizer group's parameters, if the checkpoint has only their order.

    Group ``g`` has ``wanted[g]`` places. The name ``n`` may fill ``sizes[n]`` of them, from place ``i`` on, if
    ``fits(g, i, n)``. Names keep their order within a group, and may be in no group. Raises CheckpointError, with a text
    that begins with ``where``, unless there is exactly one way.
    """
    layers: list[dict[tuple[int, ...], tuple[int, tuple[int, ...], int | None]]] = [{(0,) * len(wanted): (1, (), None)}]
    left = sum(sizes.values())
    for name, size in sizes.items():
        left -= size
        layer: dict[tuple[int, ...], tuple[int, tuple[int, ...], int | None]] = {}
        for filled, (ways, _, _) in layers[-1].items():
            free = [(group, filled[group]) for group in range(len(wanted)) if filled[group] + size <= wanted[group]]
            for group in [None, *(group for group, start in free if fits(group, start, name))]:
                after = tuple(have + size * (index == group) for index, have in enumerate(filled))
                if sum(wanted) - sum(after) <= left:
                    more = layer[after][0] if after in layer else 0
                    layer[after] = (min(ways + more, 2), filled, group)
        if len(layer) > _MOST_STATES:
            raise _no_names(where, "fit in very many ways")
        layers.append(layer)
    return _walk_back(layers, list(sizes), tuple(wanted), where)


def _walk_back(layers: list[dict[Any, Any]], names: list[str], end: tuple[int, ...], where: str) -> list[list[str]]:
    if end not in layers[-1]:
        raise _no_names(where, "do not fit")
    if layers[-1][end][0] > 1:
        raise _no_names(where, "fit in more than one way")
    found: list[list[str]] = [[] for _ in end]
    for layer, name in zip(reversed(layers[1:]), reversed(names), strict=True):
        _, end, group = layer[end]
        if group is not None:
            found[group].insert(0, name)
    return found


def _no_names(where: str, how: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: the optimizer's state is stored by number, without names, and the model's parameters {how}. Remedy: "
        "give the command `--names FILE`, or the function `names`: for each of the optimizer's groups a list with the "
        "names of its parameters, in the order in which it had got them."
    )


def number(value: Any) -> float | None:
    """``value`` as a number, if it is one or a tensor of no dimensions; else None."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 else None
    return float(value) if isinstance(value, (int, float)) else None


def pieced(
    kind: str, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Sequence[tuple[torch.Tensor, int, int]]
) -> ForeignTensor:
    """A tensor that consists of elements ``start .. end`` of each piece, one after the other. Padding may follow.

    A piece is (tensor, start, end). Loading raises CheckpointError if the pieces hold too few elements.
    """

    def load() -> torch.Tensor:
        joined, numel = torch.cat([part.detach().flatten()[start:end] for part, start, end in pieces]), math.prod(shape)
        if joined.numel() < numel:
            found = (
                f"{kind} {name}: {joined.numel()} of its {numel} elements are stored, so files of several runs are mixed."
            )
            raise CheckpointError(f"{found} Remedy: use another checkpoint.")
        return joined[:numel].to(dtype).view(tuple(shape))

    return ForeignTensor(kind, name, dtype, tuple(shape), load)
