"""ZeRO: layouts, units, slots and shards, and access to the full values of a sharded model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what ``__getattr__`` gives, for those who read types
    from .edited_values import safe_set_full_grad as safe_set_full_grad
    from .edited_values import safe_set_local_fp32_param as safe_set_local_fp32_param
    from .edited_values import safe_set_local_grad as safe_set_local_grad
    from .edited_values import safe_set_local_optimizer_state as safe_set_local_optimizer_state
    from .edited_values import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized
    from .external_parameters import register_external_parameter as register_external_parameter
    from .external_parameters import unregister_external_parameter as unregister_external_parameter
    from .gathered_parameters import GatheredParameters as GatheredParameters
    from .gradients import full_gradients as full_gradients
    from .gradients import gradient_norms as gradient_norms
    from .gradients import safe_get_full_grad as safe_get_full_grad
    from .gradients import safe_get_local_grad as safe_get_local_grad
    from .init import Init as Init
    from .leaf_modules import get_z3_leaf_modules as get_z3_leaf_modules
    from .leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
    from .leaf_modules import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
    from .leaf_modules import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
    from .leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
    from .leaf_modules import z3_leaf_module as z3_leaf_module
    from .tiling import TiledLinear as TiledLinear
    from .value_access import safe_get_full_fp32_param as safe_get_full_fp32_param
    from .value_access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from .value_access import safe_get_local_fp32_param as safe_get_local_fp32_param
    from .value_access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
    from .value_access import safe_set_full_fp32_param as safe_set_full_fp32_param
    from .value_access import safe_set_full_optimizer_state as safe_set_full_optimizer_state

_FILES = {
    "value_access": "safe_get_full_fp32_param safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_optimizer_state",
    "edited_values": "safe_set_full_grad safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized",
    "external_parameters": "register_external_parameter unregister_external_parameter",
    "gathered_parameters": "GatheredParameters",
    "gradients": "full_gradients gradient_norms safe_get_full_grad safe_get_local_grad",
    "init": "Init",
    "leaf_modules": "get_z3_leaf_modules set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix "
    "unset_z3_leaf_modules z3_leaf_module",
    "tiling": "TiledLinear",
}
_EXPORTS = {name: file for file, names in _FILES.items() for name in names.split()}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"zerorun.zero.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'zerorun.zero' has no attribute {name!r}")
