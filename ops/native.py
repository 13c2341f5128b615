"""The native library at run time: which one is used, why, and the call of its optimizers. aio.py calls the rest.

The library is looked for in this order: the one that setup.py built into the package; one that an earlier process built
into the cache (build.py says where); one built now. If there is none, callers get None and use torch, and the process warns
once.

``ZERORUN_ISA=scalar|avx2|avx512`` selects another instruction set than the widest. All give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch  # before the library: both then share the OpenMP runtime that torch brings, and its threads

from . import build
from .build import BuildError
from .state_format import State, cell_table, codes_map
from .update_operands import Operands

ISAS = ("scalar", "avx2", "avx512")  # as enum Isa in optimizer.cpp; likewise the two below
ADAM, ADAGRAD, LION, SGD, ADAM_SAGE, SOPHIA, CURVATURE = range(7)
# Constants that have a second part, and what they are if a rule does not read them.
_IN_TWO_PARTS = {"keep": 1.0, "decay": 0.0, "rate": 0.0, "third_keep": 0.0, "third_past": 0.0, "third_eps": 0.0}
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
SIGNED8, UNSIGNED8 = 4, 5  # types of states in blocks
_RESTS = {torch.bfloat16: 2, torch.int16: 6}  # types of what a weight in bf16 leaves out
STATES = 3  # a rule has at most

_logger = logging.getLogger("zerorun")
_lock = threading.Lock()


class StateFields(ctypes.Structure):
    """One state, as ``struct State`` in optimizer.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale", "map", "words")),
        *((name, ctypes.c_int32) for name in ("first_cell", "cells", "type")),
    )

    @classmethod
    def of(cls, state: State) -> StateFields:
        """Describe ``state``, which must outlive what is returned."""
        if isinstance(state, torch.Tensor):
            return cls(data=state.data_ptr(), type=_TYPES[state.dtype])
        table = cell_table(state.signed)
        return cls(
            data=state.codes.data_ptr(),
            scale=state.scale.data_ptr(),
            map=codes_map(state.signed).data_ptr(),
            words=table.words.data_ptr(),
            first_cell=table.first,
            cells=table.words.numel(),
            type=SIGNED8 if state.signed else UNSIGNED8,
        )


class Step(ctypes.Structure):
    """One update, field by field as ``struct Step`` in optimizer.cpp, which explains them."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "gradient")),
        ("states", StateFields * STATES),
        *((name, ctypes.c_void_p) for name in ("out", "rest")),
        *((name, ctypes.c_int64) for name in ("numel", "start", "row", "whole_row", "column")),
        *((name, ctypes.c_int32) for name in ("weight_type", "rest_type", "by_chance")),
        ("keys", ctypes.c_uint32 * (2 + 2 * STATES)),
        *((name, ctypes.c_int32) for name in ("gradient_type", "out_type", "rule", "isa", "threads")),
        *((name, ctypes.c_float) for name in ("coefficient", "keep", "keep_low", "decay", "decay_low", "rate", "rate_low")),
        *((name, ctypes.c_float) for name in ("momentum", "blend", "second_keep", "second_blend", "eps")),
        *((name, ctypes.c_float) for name in ("third_keep", "third_keep_low", "third_past", "third_past_low")),
        *((name, ctypes.c_float) for name in ("third_eps", "third_eps_low")),
        ("nesterov", ctypes.c_int32),
    )


def in_two_parts(constants: dict[str, float]) -> dict[str, float]:
    """Split ``keep``, ``decay``, ``rate`` and those of the third state into two fp32 numbers each.

    If missing they are 0, but ``keep`` is 1.

    Rounding a constant to one fp32 number would alone cost half a unit of the error that updates may have.
    """
    parts = dict(constants)
    for name, missing in _IN_TWO_PARTS.items():
        value = constants.get(name, missing)
        parts[name] = ctypes.c_float(value).value
        parts[f"{name}_low"] = value - parts[name]
    return parts


class Library:
    """The loaded library. ``isa`` is one of :data:`ISAS`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded, :class:`BuildError` if it was built from another source, or by others.

        Raises ValueError if ZERORUN_ISA names an instruction set that this machine lacks.
        """
        if path != build.INSTALLED:  # who can write to that one can change this file as well
            if path.is_symlink():
                raise build.UntrustedError(f"{path} is a symbolic link")
            build.refuse_untrusted(path)
        if build.source_key().encode() not in path.read_bytes():  # before it is loaded, which runs code of it
            raise BuildError(f"{path} was built from another version's source, or is no library")
        self.functions = ctypes.CDLL(str(path))
        try:
            self.functions.zerorun_source.restype = ctypes.c_char_p
            made_from = self.functions.zerorun_source().decode()
        except AttributeError as error:
            raise BuildError(f"{path} is not zerorun's library") from error
        if made_from != build.source_key():
            raise BuildError(f"{path} was built from another version's source")
        self.functions.zerorun_update.argtypes = [ctypes.POINTER(Step)]
        self.functions.zerorun_update.restype = None
        self.openmp = bool(self.functions.zerorun_has_openmp())
        self.isas = ISAS[: self.functions.zerorun_isa() + 1]
        self.isa = os.environ.get("ZERORUN_ISA") or self.isas[-1]
        if self.isa not in self.isas:
            raise ValueError(f"ZERORUN_ISA is {self.isa!r}; on this machine it can be {', '.join(self.isas)}, or unset")

    def update(self, rule: int, operands: Operands, constants: dict[str, float]) -> None:
        """Run ``rule`` on CPU tensors. ``constants``: fields of :class:`Step`, see :func:`in_two_parts`."""
        weight, gradient, out = operands.weight, operands.gradient, operands.out
        coefficient = float(operands.coefficient)
        if isinstance(operands.coefficient, torch.Tensor) and not math.isfinite(coefficient):
            return
        step = Step(
            weight=weight.data_ptr(),
            gradient=gradient.data_ptr(),
            numel=weight.numel(),
            weight_type=_TYPES[weight.dtype],
            gradient_type=_TYPES[gradient.dtype],
            rule=rule,
            isa=ISAS.index(self.isa),
            threads=torch.get_num_threads(),
            coefficient=coefficient,
            **in_two_parts(constants),
        )
        for number, state in enumerate(operands.states):
            step.states[number] = StateFields.of(state)
        if out is not None:
            step.out, step.out_type = out.data_ptr(), _TYPES[out.dtype]
        rest, noise = operands.rounding.rest, operands.rounding.noise
        if rest is not None:
            step.rest, step.rest_type = rest.data_ptr(), _RESTS[rest.dtype]
        if noise is not None:
            step.by_chance, step.keys = True, type(step.keys)(*noise.keys)
            step.start, step.row, step.whole_row, step.column = noise.start, noise.row, noise.whole_row, noise.column
        self.functions.zerorun_update(ctypes.byref(step))
        # Autograd must know that these tensors have changed, although torch did not change them.
        torch.autograd.graph.increment_version(operands.written)


@dataclass(frozen=True)
class LibraryStatus:
    """``source``: "installed", "cached" or, without the library, "torch". ``isa``: one of :data:`ISAS`, or None."""

    source: str
    isa: str | None
    reason: str


def library() -> Library | None:
    """Return the library, found or built at the first call; None if torch must be used. Threads may call it."""
    with _lock:
        return _outcome()[0]


def status() -> LibraryStatus:
    """Return which library is used, and why. Finds or builds it if that has not been done yet."""
    with _lock:
        return _outcome()[1]


@functools.cache
def _outcome() -> tuple[Library | None, LibraryStatus]:
    reasons: list[str] = []
    for source, how, found in _candidates(reasons):
        threads = "OpenMP" if found.openmp else "one thread, as the compiler has no OpenMP"
        return found, LibraryStatus(source, found.isa, f"{how}; {threads}")
    reason = "; ".join(dict.fromkeys(reasons))
    _logger.warning(
        "the native optimizer cannot be used: %s. torch's kernels are used instead, which take about 1.5 times as long "
        "in mixed precision. Remedy: install a C++ compiler (g++), or name one by $CXX.",
        reason,
    )
    return None, LibraryStatus("torch", None, reason)


def _candidates(reasons: list[str]) -> Iterator[tuple[str, str, Library]]:
    """Yield (source, origin in words, library) of what can be loaded, the best first. Append to ``reasons`` what cannot."""
    if build.INSTALLED.exists() and (found := _load(build.INSTALLED, reasons)):
        yield "installed", "built when zerorun was installed", found
    folder = None
    try:
        folder = build.cache_folder(os.environ)
        build.refuse_untrusted(next(path for path in (folder, *folder.parents) if path.is_dir()))
    except (OSError, BuildError) as error:
        _note(error, reasons)
        folder = None
    compilers = list(build.compilers(os.environ))
    if not compilers:
        reasons.append("there is no C++ compiler ($CXX, c++, g++, clang++)")
        for path in sorted(folder.glob(build.cached_name(None))) if folder else ():
            if found := _load(path, reasons):
                yield "cached", f"found in {folder}", found
    for compiler in compilers:
        try:
            name = build.cached_name(compiler)
        except BuildError as error:
            reasons.append(str(error))
            continue
        if folder:
            yield from _from_cache(compiler, folder / name, reasons)
        yield from _for_this_process(compiler, name, reasons)


def _from_cache(compiler: list[str], path: Path, reasons: list[str]) -> Iterator[tuple[str, str, Library]]:
    if os.path.exists(path) and (found := _load(path, reasons)):
        yield "cached", f"found in {path.parent}", found
    if found := _build(compiler, path, reasons):
        yield "cached", f"built into {path.parent}", found


def _for_this_process(compiler: list[str], name: str, reasons: list[str]) -> Iterator[tuple[str, str, Library]]:
    """Build without a cache, in a temporary folder: a loaded library stays when its file is removed."""
    try:
        with tempfile.TemporaryDirectory(prefix="zerorun-") as folder:
            found = _build(compiler, Path(folder) / name, reasons)
    except OSError as error:
        reasons.append(f"there is no directory for temporary files: {error.strerror}")
        return
    if found:
        yield "cached", f"built for this process alone, because {reasons[0]}", found


def _build(compiler: list[str], path: Path, reasons: list[str]) -> Library | None:
    for openmp in (True, False):  # a compiler may have an OpenMP library that programs do not find when they run
        try:
            build.build(compiler, path, openmp=openmp)
        except BuildError as error:
            reasons.append(str(error))
            return None
        if found := _load(path, reasons):
            return found
    return None


def _load(path: Path, reasons: list[str]) -> Library | None:
    try:
        return Library(path)
    except (OSError, BuildError) as error:
        _note(error, reasons)
        return None


def _note(error: Exception, reasons: list[str]) -> None:
    reasons.append(f"a library cannot be loaded: {error}")
    if isinstance(error, build.UntrustedError):
        _logger.warning(
            "the native library is not taken from its cache, as others could have put any code there: %s. It is built for "
            "this process alone, each time. Remedy: let nobody else write there, or set $ZERORUN_CACHE_DIR to a directory "
            "of your own.",
            error,
        )
