"""The function, or the model, that a command-line tool is given by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ModelError


def function_from(name: str) -> Callable[[], Any]:
    """Return the function ``module:function``. Raises ModelError if there is none."""
    module_name, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"{name}: {error}. Remedy: give module:function, with a module that Python can import.") from error
    if not callable(found):
        raise ModelError(f"{name} is a {type(found).__name__}. Remedy: give a function that can be called.")
    return found  # type: ignore[no-any-return]


def model_from(name: str) -> nn.Module:
    """Return the model that ``module:factory`` makes. Raises ModelError if it makes none."""
    model = function_from(name)()
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model {name} gives a {type(model).__name__}. Remedy: let it return an nn.Module.")
    return model
