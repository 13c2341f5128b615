"""``param.grad`` of an engine's parameters, as a script reads and sets it between a backward and the step.

Gradients lie in flat buffers, and ``param.grad`` is None. A loop that clips, logs or changes gradients by hand passes over
None without a word, and what it sets is not what the step takes. So the first read is told, and a write is refused. In the
DeepSpeed mode a read may find something: see deepspeed/shown_gradients.py.

The property is that of all parameters of this process, and hides what autograd has. It knows an engine's by their homes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..errors import StepError
from ..log import warn_once
from ..zero.flat_group import TrainedGroup, fresh_gradient, set_gradient
from ..zero.sharded_model import ParameterHome, ShardedModel, home_of
from .engine import Engine

Show = Callable[[Engine, ParameterHome], torch.Tensor | None]

CHANGED = (
    "Remedy: safe_set_full_grad(param, value) on all ranks, with zeros to cancel a gradient; "
    '"gradient_clipping" in the file clips.'
)
_OWN_READERS = ("torch", "zerorun")
_watched = weakref.WeakKeyDictionary[ShardedModel, "ParamGrad"]()


class ParamGrad:
    """Tells scripts of ``param.grad`` of ``engine``, until it is removed. ``show`` returns what a read finds."""

    def __init__(self, engine: Engine, show: Show | None = None) -> None:
        self.engine = weakref.ref(engine)
        self.show = show
        self.was_read = False
        _watched[engine.sharded_model] = self
        nn.Parameter.grad = property(_read, _write, torch.Tensor.grad.__delete__)  # type: ignore

    def remove(self) -> None:
        for model in [model for model, watching in _watched.items() if watching is self]:
            del _watched[model]
        if not _watched and "grad" in vars(nn.Parameter):
            del nn.Parameter.grad

    def read(self, engine: Engine, home: ParameterHome, reader: str) -> torch.Tensor | None:
        """Return what ``param.grad`` is for the module ``reader``, which is told once if that is None."""
        if self.show is not None:
            return self.show(engine, home)
        of_a_script = reader.partition(".")[0] not in _OWN_READERS
        if of_a_script and not self.was_read and not is_lenient(engine) and is_kept(engine, home):
            self.was_read = True
            warn_once(
                f"param.grad of {home.name!r} is None between backward and step: gradients are kept in flat buffers. "
                "A loop over param.grad does nothing. Remedy: safe_get_full_grad(param) on all ranks reads a gradient, "
                'safe_set_full_grad(param, value) changes it, and "gradient_clipping" in the file clips. The norm is '
                "engine.get_global_grad_norm(), after the step."
            )
        return None


def is_lenient(engine: Engine) -> bool:
    return engine.runtime.guard.is_lenient


def is_kept(engine: Engine, home: ParameterHome) -> bool:
    """Whether the step that comes next has a gradient of a parameter which has none of autograd's."""
    counts = engine.accumulation
    return counts.backwards != counts.steps_seen and group_with_gradient(home) is not None


def group_with_gradient(home: ParameterHome) -> TrainedGroup | None:
    """Return the flat group of a parameter if this rank has a gradient of it, or a part of the reduced one."""
    group = home.flat_group
    if not isinstance(group, TrainedGroup):
        return None
    return group if group.reduced or group.used[home.entry] or home.entry in group.late else None


def _found(param: torch.Tensor) -> tuple[ParamGrad, Engine, ParameterHome] | None:
    found = home_of(param)
    watching = _watched.get(found[0]) if found is not None else None
    engine = watching.engine() if watching is not None else None
    if found is None or watching is None or engine is None:
        return None
    return watching, engine, found[1]


def _read(param: torch.Tensor) -> torch.Tensor | None:
    fresh = fresh_gradient(param)
    if fresh is not None or torch._C._current_graph_task_id() != -1:  # while a backward runs, there is autograd's own
        return fresh
    found = _found(param)
    if found is None:
        return None
    watching, engine, home = found
    return watching.read(engine, home, _reader())


def _reader() -> str:
    """Return the module that reads, or that calls a ``zero_grad`` which does."""
    frame = sys._getframe(2)
    if frame.f_code.co_name == "zero_grad" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _write(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set ``param.grad``. Raises StepError for a value, and for None where the step would not see that it is gone.

    None is harmless where there is nothing, as after a step or before a backward. A value is harmless before a backward,
    which adds to it.
    """
    in_a_backward = torch._C._current_graph_task_id() != -1  # where a function of autograd may set it
    found = None if in_a_backward else _found(param)
    if found is not None:
        watching, engine, home = found
        shown = watching.show is not None
        hides = fresh_gradient(param) is None and is_kept(engine, home)
        if (hides and (shown or not is_lenient(engine))) or (shown and value is not None):
            what = "set by hand" if value is not None else "set to None between backward and step"
            raise StepError(f"param.grad of {home.name!r} was {what}: the step would not see it. {CHANGED}")
    set_gradient(param, value)
