"""LayerSpec and TiedLayerSpec: layers that are described first and built only on the stage that has them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..errors import PipelineError


class _Short(reprlib.Repr):
    """An argument may be the whole configuration of a script, which would hide what a message has to say."""

    def __init__(self) -> None:
        super().__init__()
        self.maxother = self.maxstring = 60


class LayerSpec:
    """A layer to be built by ``typename(*args, **kwargs)``. ``typename`` is a class derived from nn.Module.

    Raises PipelineError for anything else.
    """

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PipelineError(
                f"{type(self).__name__}({typename!r}): a class derived from nn.Module is needed. Remedy: give the class, "
                "then its arguments; built modules and plain functions go into the list of layers as they are."
            )
        self.typename = typename
        self.module_args = args
        self.module_kwargs = kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build a new module. ``log`` has no effect; it is accepted for code written for DeepSpeed."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        short = _Short().repr
        given = [*map(short, self.module_args), *(f"{key}={short(value)}" for key, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares parameters with all others of the same ``key``.

    tied_weight_attr: the dotted path of the shared parameter in the layer, by default "weight", or a list of paths; it may
        be a property that returns the parameter. Shared parameters have the values of the first layer with the key. All
        other parameters are the layer's own.
    forward_fn: called as ``forward_fn(module, value)`` instead of ``module(value)``.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)
