"""What scripts made for DeepSpeed ask of ``engine.optimizer``: the loss scale, and the hooks that TRL takes off.

DeepSpeed's optimizers wrap one of torch's and have these as attributes. zerorun's is one of torch's, so they are looked up
when they are asked for. An optimizer of no engine does not have them, and a class of the program's own may define them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..engine.engine import Engine
from .entry import engine_of

# DeepSpeed's names of what a loss scaler has -> zerorun's.
_OF_SCALER = {
    "consecutive_hysteresis": "consecutive",
    "cur_hysteresis": "hysteresis_left",
    "cur_iter": "steps",
    "cur_scale": "scale",
    "delayed_shift": "hysteresis",
    "dynamic": "dynamic",
    "dynamic_loss_scale": "dynamic",
    "last_overflow_iter": "last_overflow",
    "loss_scale": "scale",
    "min_loss_scale": "minimum",
    "min_scale": "minimum",
    "scale_window": "window",
}


class LossScale:
    """The loss scale of an engine under DeepSpeed's names, with the outcome of the last step; it cannot be set."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_SCALER:
            raise AttributeError(f"the loss scale has no {name!r}", name=name, obj=self)
        return getattr(self._engine.scaler, _OF_SCALER[name])


class NoHooks:
    """Stands for what TRL looks through for hooks to remove before it generates. zerorun's hooks can stay."""

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.module = self

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing: no parameter has to forget which modules use it."""
        yield from ()

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield nothing, as above."""
        yield from ()

    def _register_deepspeed_module(self, module: Any) -> None:
        """Do nothing: no hook was removed."""


class _Bf16Optimizers(type):
    """The kind of BF16_Optimizer, of which no object is made."""

    def __instancecheck__(cls, instance: Any) -> bool:
        engine = engine_of(instance) if isinstance(instance, torch.optim.Optimizer) else None
        return engine is not None and engine.config.bf16.enabled


class BF16_Optimizer(metaclass=_Bf16Optimizers):  # DeepSpeed's name
    """The optimizers of engines that compute in bf16 are its instances: programs ask so, and then about no overflow."""


class _OfEngine:
    """An attribute of the optimizers that engines have. Others have none, and may have one of their own by that name."""

    def __init__(self, name: str, get: Callable[[Engine], Any]) -> None:
        self._name, self._get = name, get

    def __get__(self, optimizer: torch.optim.Optimizer | None, kind: type) -> Any:
        engine = None if optimizer is None else engine_of(optimizer)
        if engine is None:
            raise AttributeError(
                f"{kind.__name__!r} object has no attribute {self._name!r}", name=self._name, obj=optimizer
            )
        return self._get(engine)


def name_optimizers() -> None:
    """Give the optimizers of engines the attributes. The mode does it at ``import deepspeed``."""
    for name, get in {
        "cur_scale": lambda engine: engine.loss_scale,
        "dynamic_loss_scale": lambda engine: engine.scaler.dynamic,
        "loss_scale": lambda engine: engine.loss_scale,
        "loss_scale_config": LossScale,
        "loss_scaler": LossScale,
        "overflow": lambda engine: engine.progress.skips_in_a_row > 0,
        "needs_scaler": lambda engine: lambda: engine.config.scales_loss,
        "parameter_offload": lambda engine: NoHooks(),
    }.items():
        setattr(torch.optim.Optimizer, name, _OfEngine(name, get))
