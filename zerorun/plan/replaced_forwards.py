"""Forwards that replace those of modules, inside or outside of each other, and give them back; and what they withhold.

And which hooks of modules are zerorun's, and which a script's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame as _dynamo

from ..errors import ModelError

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = f"{__name__.partition('.')[0]}."
# Functions that only begin when they are called, and run later.
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class ReplacedForward:
    """Takes the place of ``module.forward``, or of another method, until ``remove``. ``inner``: what was there."""

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module, self._name = module, name
        functools.update_wrapper(self, getattr(module, name), updated=())
        self._had = vars(module).get(name)  # of its own, or compiled; None: its class's
        module.__dict__[name] = self  # a class may refuse other attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def inner(self) -> Callable[..., Any]:
        """What was there. A class may be given another method meanwhile."""
        if self._had is not None:
            return self._had  # type: ignore[no-any-return]
        return getattr(type(self.module), self._name).__get__(self.module)  # type: ignore[no-any-return]

    def compile(self, **options: Any) -> None:
        """Compile ``inner`` with torch.compile. What this class does stays outside of the graph."""
        self._had = compiled(self.inner, **options)

    def remove(self) -> None:
        """Give the module its forward back. If that has been compiled meanwhile, it stays compiled.

        A forward that somebody has put around this one since stays, and goes on calling it.
        """
        if vars(self.module).get(self._name) is not self:
            return
        if self._had is not None:
            self.module.__dict__[self._name] = self._had
        else:
            del self.module.__dict__[self._name]

    def __reduce__(self) -> Any:  # copies and pickles of a layer are those of an ordinary one
        return (_itself, (self._had,)) if self._had is not None else (getattr, (self.module, self._name))


class UnavailableOutput:
    """Stands in for a part of an output that no rank has. Whoever uses it gets a ModelError with ``reason``."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModelError(vars(self).get("reason"))

    def __getitem__(self, index: Any) -> Any:
        raise ModelError(self.reason)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def methods_with_parts(module: nn.Module) -> list[str]:
    """Return the names of public methods besides ``forward`` whose code names a parameter or a module of ``module``."""
    parts, found = {*module._parameters, *module._modules}, []
    for name in sorted({*dir(type(module))}.difference(dir(nn.Module), vars(module))):
        method = inspect.getattr_static(type(module), name)
        plain = isinstance(method, FunctionType) and not method.__code__.co_flags & _SUSPENDED
        if plain and not name.startswith("_") and not parts.isdisjoint(method.__code__.co_names):
            found.append(name)
    return found


def compiled(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``forward`` compiled by torch.compile; one that replaces another one compiles that, and stays outside."""
    own = getattr(forward, "compile", None)
    if own is None:
        return torch.compile(forward, **options)
    own(**options)
    return forward


def uncompiled(function: Function) -> Function:
    """Mark ``function``, and return it: graphs of torch.compile end before it, and nothing that it calls is compiled.

    torch.compiler.disable() does this by a wrapper, which imports the compiler: a second in the first step. This costs
    nothing where nobody compiles.
    """
    return _left_alone(function, _dynamo._FrameAction.SKIP)


def between_graphs(function: Function) -> Function:
    """As ``uncompiled``, but what it calls is compiled as if the caller had called it."""
    return _left_alone(function, _dynamo._FrameAction.DEFAULT)


def _left_alone(function: Function, called: Any) -> Function:
    function.__code__ = function.__code__.replace()  # what a decorator returns shares its code with others
    strategy = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, called)
    _dynamo.set_code_exec_strategy(function.__code__, strategy)  # where Python calls it
    vars(function)["_torchdynamo_disable"] = True  # where a function that is compiled calls it
    return function


# Returns what compiles the functions that its caller calls, one ``between_graphs``, for ``compiled_by``; None: nobody does.
compiler: Callable[[], Any] = _dynamo.get_eval_frame_callback


def compiled_by(compiler: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, as one that ``compiler`` compiles wherever it is called, even in a backward."""
    return function if compiler is None else functools.partial(_call, compiler, function)


@uncompiled
def _call(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = _dynamo.set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        _dynamo.set_eval_frame(before)


def innermost(forward: Any) -> Any:
    """Return the forward that those which replace one another call at last."""
    while hasattr(forward, "inner"):
        forward = forward.inner
    return forward


def is_own_hook(hook: Any) -> bool:
    """True if a hook of a module, or of all modules, is zerorun's."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "hook", hook)  # torch wraps hooks of state dicts
    return str(getattr(owner, "__module__", type(owner).__module__)).startswith(_PACKAGE)
