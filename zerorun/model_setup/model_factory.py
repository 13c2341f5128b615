"""The function, or the model, that a command-line tool is given by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ModelError, ZerorunError


def function_from(name: str) -> Callable[[], Any]:
    """Return the function ``module:function``. Raises ModelError if there is none, or if its module cannot be imported."""
    module_name, _, function = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name or module_name.startswith("."):
        imported = module_name.removesuffix(".py").strip("./").replace("/", ".")
        told = f"{name}: a module is named as an import names it, without folders and .py"
        raise ModelError(f"{told}. Remedy: give {imported}:{function}, in a folder from which Python imports {imported}.")
    try:
        found = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"{name}: {error}. Remedy: give module:function, with a module that Python can import.") from error
    except SystemExit as error:  # a script that does its work as it is imported
        remedy = 'Remedy: put what it does behind if __name__ == "__main__".'
        raise ModelError(
            f"{name}: {module_name} ended the program by sys.exit({error}), as it was imported. {remedy}"
        ) from error
    except Exception as error:  # of the module itself
        raised = f"{module_name} raised {type(error).__name__}: {error}, as it was imported"
        raise ModelError(f"{name}: {raised}. Remedy: import it by itself, and mend it.") from error
    if not callable(found):
        raise ModelError(f"{name} is a {type(found).__name__}. Remedy: give a function that can be called.")
    return found  # type: ignore[no-any-return]


def model_from(name: str) -> nn.Module:
    """Return the model that ``module:factory`` makes. Raises ModelError if it fails, or makes none."""
    factory = function_from(name)
    try:
        model = factory()
    except ZerorunError:
        raise
    except (Exception, SystemExit) as error:  # a program that ends here would seem to have done its work
        told = f"--model {name} raised {type(error).__name__}: {error}"
        where = f" on the device {torch.get_default_device()}, as here" if torch.get_default_device().type == "meta" else ""
        raise ModelError(f"{told}. Remedy: call it by itself{where}, and mend it.") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"--model {name} gives a {type(model).__name__}. Remedy: let it return an nn.Module.")
    return model
