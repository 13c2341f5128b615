"""Names of DeepSpeed that its own tests import and zerorun has not: each is there, and says so when it is used.

So a module of tests that imports one internal at its top still runs those of its tests that do without.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any, NoReturn

import torch

from zerorun.deepspeed import activation, name_table

# Kernels for which zerorun has an optimizer of the same name, or reads disks by itself.
_BUILT = ("CPUAdam", "FusedAdam", "CPUAdagrad", "CPULion", "FusedLion", "FusedLamb", "AsyncIO")
# What tests read only to give it to something else, or to know whether they can run.
_VALUES: dict[str, Any] = {
    "deepspeed.accelerator.is_current_accelerator_supported": lambda: True,
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer": lambda groups, **_: groups,
    "deepspeed.git_version_info.torch_info": {"version": torch.__version__, "cuda_version": "0.0", "nccl_version": "0.0"},
    "deepspeed.runtime.config.ADAM_OPTIMIZER": "adam",
    "deepspeed.runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME": "comm_dtype",
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1 << 20,
    "deepspeed.utils.torch.required_torch_version": lambda min_version=None, max_version=None: max_version is None,
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": Enum(
        "Device", {n: n for n in ("none", "cpu", "nvme")}, type=str
    ),
}


class InternalUsedError(Exception):
    """A test has used something that zerorun has not."""


class Unbuilt(type):
    """The class of placeholders: any use but naming, deriving and looking deeper raises InternalUsedError."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or name == "_mock_methods":
            raise AttributeError(name)
        return placeholder(f"{cls.__module__}.{cls.__qualname__}.{name}")

    def _raise(cls, *args: Any, **kwargs: Any) -> NoReturn:
        first = cls.__mro__[-2]  # tests derive classes from a placeholder
        raise InternalUsedError(f"{first.__module__}.{first.__qualname__}")

    __call__ = __instancecheck__ = __subclasscheck__ = __iter__ = __len__ = __getitem__ = __setitem__ = _raise
    __add__ = __radd__ = __lt__ = __gt__ = __le__ = __ge__ = __enter__ = __float__ = __int__ = _raise


def placeholder(path: str) -> Any:
    """Return a class that stands for ``path``; two requests give the same."""
    if path not in _made:
        owner, _, name = path.rpartition(".")
        _made[path] = Unbuilt.__new__(Unbuilt, name, (), {"__module__": owner, "__qualname__": name})
    return _made[path]


_made: dict[str, Any] = {}


class _Builder:
    """What ``deepspeed.ops.op_builder`` has for a kernel: tests ask for its name."""

    def __init__(self, name: str) -> None:
        self.NAME = name

    def __call__(self, *args: Any) -> NoReturn:
        raise InternalUsedError(f"deepspeed.ops.op_builder.{self.NAME}Builder")


class _Wide(ModuleType):
    """A module of DeepSpeed: what zerorun has under its name, and a placeholder for everything else."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Builder"):
            return _Builder(name.removesuffix("Builder"))
        if self.__name__ == "deepspeed.ops" and name == "__compatible_ops__":
            return _Compatible()
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        if name in name_table.SURFACE.get(self.__name__, {}):
            found = name_table.target_of(self.__name__, name)
        elif path in sys.modules or path in _KNOWN:
            __import__(path)
            found = sys.modules[path]
        else:
            found = _VALUES[path] if path in _VALUES else placeholder(path)
        self.__dict__[name] = found
        return found


class _Compatible:
    def __getitem__(self, name: str) -> bool:
        return name in _BUILT


_KNOWN: set[str] = set(name_table.SURFACE)


def install() -> None:
    """Let ``import deepspeed...`` find each name in this process."""
    activation.activate()
    real = activation.DeepSpeedFinder.find_spec

    def find_spec(self: Any, name: str, path: Any, target: Any) -> Any:
        if name.startswith("deepspeed."):
            name_table.SURFACE.setdefault(name, {})
        return real(self, name, path, target)

    activation.DeepSpeedFinder.find_spec = find_spec  # type: ignore[method-assign]
    activation._SurfaceLoader.create_module = lambda self, spec: _Wide(spec.name)  # type: ignore[method-assign]
