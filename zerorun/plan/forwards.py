"""Forwards that replace those of modules, inside or outside of each other, and give them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ReplacedForward:
    """Takes the place of ``module.forward`` until ``remove``. ``inner`` is the forward that was there."""

    def __init__(self, module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward, updated=())
        self.module, self.inner = module, module.forward
        self._had = "forward" in vars(module)  # one of its own, not its class's
        module.forward = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def compile(self, **options: Any) -> None:
        """Compile ``inner`` with torch.compile. What this class does stays outside of the graph."""
        self.inner = compiled(self.inner, **options)

    def remove(self) -> None:
        """Give the module its forward back. If that has been compiled meanwhile, it stays compiled.

        A forward that somebody has put around this one since stays, and goes on calling it.
        """
        if vars(self.module).get("forward") is not self:
            return
        if self._had or getattr(self.inner, "__func__", None) is not type(self.module).forward:
            self.module.forward = self.inner  # type: ignore[method-assign]
        else:
            del self.module.forward

    def __reduce__(self) -> Any:
        return _itself, (self.inner,)  # copies and pickles of a layer are those of an ordinary one


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def compiled(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return ``forward`` compiled by torch.compile; one that replaces another one compiles that, and stays outside."""
    own = getattr(forward, "compile", None)
    if own is None:
        return torch.compile(forward, **options)
    own(**options)
    return forward


def innermost(forward: Any) -> Any:
    """Return the forward that those which replace one another call at last."""
    while hasattr(forward, "inner"):
        forward = forward.inner
    return forward
