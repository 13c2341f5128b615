"""Loads of quantised models while a configuration with stage 3 is alive: each rank keeps its part of every weight.

``from_pretrained`` of transformers enters no ``zero.Init`` for a model that is to be quantised, so that each rank would
have all of its weights until ``initialize``. It quantises and registers one weight after the other: there they are divided.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..plan.parameter_kinds import is_quantised
from ..zero.init import Init, partition_now, partitioned_as

_LOADED = "_is_hf_initialized"  # transformers says so of what it has read from a file


def divide_quantised_loads() -> None:
    """From now on, divide each quantised weight when a module registers it. The mode does it at ``import deepspeed``."""
    register_module_parameter_registration_hook(_divide)


def _divide(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if not getattr(param, _LOADED, False) or param is None or not is_quantised(param) or Init.open:
        return
    integration = sys.modules.get("transformers.integrations.deepspeed")
    if integration is not None and integration.is_deepspeed_zero3_enabled() and partitioned_as(param) is None:
        partition_now(module, param)
