"""The model that a command-line tool is given as the name of a function."""

from __future__ import annotations

import importlib

from torch import nn

from ..errors import ModelError


def model_from(name: str) -> nn.Module:
    """Return the model that ``module:factory`` makes. Raises ModelError if it makes none."""
    module_name, _, factory = name.partition(":")
    try:
        model = getattr(importlib.import_module(module_name), factory)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            f"--model {name}: {error}. Remedy: give module:factory, a function that returns the model."
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model {name} gives a {type(model).__name__}. Remedy: let it return an nn.Module.")
    return model
