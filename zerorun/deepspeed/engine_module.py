"""Engines that are modules, as DeepSpeed's are: programs keep them in modules of their own, which train and save them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..engine.engine import Engine

# What torch asks of a module inside another one. There the engine is a module with one child, the model.
_OF_A_CHILD = ["_get_name", "_load_from_state_dict", "_save_to_state_dict"]
_OF_A_CHILD += ["extra_repr", "get_extra_state", "set_extra_state"]
_FROM_THE_MODEL = ("training", "_modules")  # the fields of a module that the engine does not have by itself


class ModuleEngine(Engine, nn.Module):  # type: ignore[misc]  # Engine's own methods stand before those of modules
    """An engine that is an ``nn.Module`` with the child ``module``.

    A module that has the engine as an attribute has its parameters, and ``train``, ``state_dict`` and the like of that
    module reach the model. What a script calls on the engine itself goes to the model, as for other engines: names of
    parameters are those of the model, and a hook is the model's.
    """

    # Attributes that are assigned are ordinary ones: a module in one of them would be trained by nobody.
    __setattr__ = object.__setattr__  # type: ignore[assignment]
    __delattr__ = object.__delattr__

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``Engine`` does. ``training`` is looked up on the model, which may be told by itself."""
        fields = vars(nn.Module())  # its hooks, none, and its parameters, none
        vars(self).update({name: value for name, value in fields.items() if name not in _FROM_THE_MODEL})
        super().__init__(*args, **kwargs)

    @property
    def _modules(self) -> dict[str, nn.Module | None]:  # type: ignore[override]
        module = vars(self).get("module")
        return {} if module is None else {"module": module}

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model's modules; with ``memo``, as a module around the engine asks, the engine and then those."""
        if memo is None:
            return self.module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        return nn.Module.named_modules(self, memo, prefix, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self, *args: Any, exact: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return full weights as ever; with the arguments that a module has, as a module around the engine passes them,
        what ``engine.module.state_dict()`` returns, with ``module.`` before its names."""
        if args or kwargs:
            return nn.Module.state_dict(self, *args, **kwargs)
        return Engine.state_dict(self, exact=exact)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ModuleEngine:
        self.module._apply(fn, recurse)
        return self


def _handed_on(name: str) -> Callable[..., Any]:
    def method(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        return getattr(engine.module, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _methods_of_the_model() -> Iterator[str]:
    """Yield the names of what modules do and engines do not: on an engine, the model does it."""
    for name, method in vars(nn.Module).items():
        own = name.startswith("__") or name in _OF_A_CHILD or name in vars(ModuleEngine) or hasattr(Engine, name)
        if callable(method) and not own:
            yield name


for _name in _methods_of_the_model():
    setattr(ModuleEngine, _name, _handed_on(_name))
