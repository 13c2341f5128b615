"""Models that transformers makes while a configuration with stage 3 is alive: where it counts on how DeepSpeed works.

``from_pretrained`` enters no ``zero.Init`` for a model that is to be quantised, so that each rank would have all weights
until ``initialize``. It quantises and registers one weight after the other: there they are divided.

A model made in the constructor of another, as that of ``LlamaForSequenceClassification(config)``, is divided alone, and
transformers gives it its first values on rank 0, where alone it marks its layers as done. The outer constructor then gives
values to all layers without the mark: on the other ranks to those which are away. With DeepSpeed these are empty, so that
nothing comes of it; here a write to them is an error. So the mark is made on all ranks.
"""

from __future__ import annotations

import sys
from functools import wraps
from types import ModuleType

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..plan.parameter_kinds import is_quantised
from ..zero.init import Init, partition_now, partitioned_as

_DONE = "_is_hf_initialized"  # transformers says so of weights that it has read from a file, and of layers with values
_FIRST_VALUES = "initialize_weights_zero3"


def look_after_models_of_transformers() -> None:
    """From now on, look at each parameter that a module registers. The mode does it at ``import deepspeed``."""
    register_module_parameter_registration_hook(_on_registration)


def _on_registration(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    integration = sys.modules.get("transformers.integrations.deepspeed")
    if integration is None or param is None:
        return
    if Init.open:
        _mark_on_all_ranks(integration)
        return
    whole = getattr(param, _DONE, False) and is_quantised(param) and partitioned_as(param) is None
    if whole and integration.is_deepspeed_zero3_enabled():
        partition_now(module, param)


def _mark_on_all_ranks(integration: ModuleType) -> None:
    """Let what gives first values mark the layers on all ranks. ``transformers`` takes it from there at each model."""
    give_values = getattr(integration, _FIRST_VALUES, None)  # since transformers 5
    if give_values is None or hasattr(give_values, "__wrapped__"):
        return

    @wraps(give_values)
    def give_values_and_mark(model: nn.Module) -> None:
        give_values(model)
        for layer in model.modules():
            setattr(layer, _DONE, True)

    setattr(integration, _FIRST_VALUES, give_values_and_mark)
