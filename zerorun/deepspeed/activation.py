"""The DeepSpeed mode: ``import deepspeed`` gives zerorun under DeepSpeed's names, in processes that ask for it.

A process asks for it by ``zerorun.deepspeed.activate()``, or is asked by the environment: ``ZERORUN_AS_DEEPSPEED=1``, which
``zerorun --as-deepspeed`` sets for its workers. For the latter an installation has a .pth file, which Python reads at
start; it costs nothing where the variable is not set. Nothing here needs torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from zerorun.errors import ZerorunError
from zerorun.log import info_once, setup_logging

from .name_table import SURFACE, VERSION, missing_reason, target_of

VARIABLE = "ZERORUN_AS_DEEPSPEED"
OFF = ("", "0", "false", "no", "off")  # the values that do not ask for it; the .pth file has them, too
NAME = "deepspeed"


class ActivationError(ZerorunError, RuntimeError):
    """The DeepSpeed mode cannot begin in this process."""


def activate() -> None:
    """Let ``import deepspeed`` give zerorun from now on in this process, also where DeepSpeed is installed.

    Calling it again does nothing. Raises ActivationError if the program has imported DeepSpeed already, or accelerate where
    there was none.
    """
    if is_active():
        return
    if NAME in sys.modules:
        raise ActivationError(
            "the DeepSpeed mode cannot begin: this process has imported DeepSpeed itself, and what it took from it would "
            f"stay. Remedy: call zerorun.deepspeed.activate() before anything imports deepspeed, or set {VARIABLE}=1."
        )
    accelerator = sys.modules.get("accelerate.accelerator")
    if accelerator is not None and not hasattr(accelerator, "DeepSpeedEngineWrapper"):
        raise ActivationError(
            "the DeepSpeed mode cannot begin: accelerate has been imported (transformers and others do it), and has found "
            f"no DeepSpeed. Remedy: call zerorun.deepspeed.activate() before that, or set {VARIABLE}=1."
        )
    sys.meta_path.insert(0, DeepSpeedFinder())


def is_active() -> bool:
    """True if ``import deepspeed`` gives zerorun in this process."""
    return any(isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path)


def activate_if_asked() -> None:
    """Activate the mode if the environment says so. This is what the .pth file calls."""
    if os.environ.get(VARIABLE, "").strip().lower() not in OFF:
        activate()


_ANYTHING = DistributionFinder.Context()


class DeepSpeedFinder(DistributionFinder):
    """Finds module ``deepspeed``, what is below it, and its metadata."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of such a module, or None for others. Raises ImportError for one that zerorun has not.

        The error is no ModuleNotFoundError: ``from deepspeed import x`` would drop that, and with it the reason.
        """
        if name != NAME and not name.startswith(f"{NAME}."):
            return None
        if name not in SURFACE:
            raise ImportError(missing_reason(name), name=name)
        return ModuleSpec(name, _SurfaceLoader(), origin="zerorun", is_package=True)

    def find_distributions(self, context: DistributionFinder.Context = _ANYTHING) -> Iterator[Distribution]:
        """Yield the metadata of ``deepspeed``, if that is asked for."""
        if context.name in (None, NAME):
            yield _Metadata()


class _Metadata(Distribution):
    """What ``importlib.metadata`` answers about ``deepspeed``."""

    def read_text(self, filename: str) -> str | None:
        fields = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: zerorun under DeepSpeed's names\n"
        return {"METADATA": fields, "top_level.txt": f"{NAME}\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        return os.path.join(os.path.dirname(__file__), path)


class _SurfaceLoader(Loader):
    """Makes a module whose attributes are looked up in the table when they are asked for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Surface(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == NAME:
            setup_logging()
            info_once(f"deepspeed is zerorun in this process ({VARIABLE} or zerorun.deepspeed.activate()).")
            from .engine_names import name_engines
            from .optimizer_names import name_optimizers
            from .parameters import install
            from .transformers_models import look_after_models_of_transformers

            install()
            look_after_models_of_transformers()
            name_optimizers()
            name_engines()


class _Surface(ModuleType):
    """A module of the surface. An attribute is imported at the first request and kept; ``dir`` shows all."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in SURFACE[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        try:
            found = target_of(self.__name__, name)
        except KeyError:
            if f"{self.__name__}.{name}" in SURFACE:
                from importlib import import_module

                return import_module(f"{self.__name__}.{name}")
            raise AttributeError(missing_reason(f"{self.__name__}.{name}"), name=name, obj=self) from None
        self.__dict__[name] = found
        return found

    def __dir__(self) -> list[str]:
        inside = [name.rpartition(".")[2] for name in SURFACE if name.rpartition(".")[0] == self.__name__]
        return sorted({*self.__dict__, *SURFACE[self.__name__], *inside})


__all__ = ["VARIABLE", "VERSION", "ActivationError", "activate", "activate_if_asked", "is_active"]
