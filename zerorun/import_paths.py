"""Modules that scripts may import by a shorter path than that of the file, or by the path that they had before."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import InspectLoader, MetaPathFinder
else:  # the import system asks for their methods alone, and importing them takes a fifth of the time of ``zerorun --help``
    InspectLoader = MetaPathFinder = object

PATHS = {
    "checkpointing": "zerorun.activations.checkpointing",
    "comm": "zerorun.distributed.transport.communicator",
    "dataloader": "zerorun.data",
    "mpu": "zerorun.deepspeed.mpu",
    "schedules": "zerorun.optim.lr_schedules",
    "topology": "zerorun.distributed.topology",
}


class ImportPaths(MetaPathFinder):
    """Finds ``zerorun.NAME`` for each name in ``PATHS``, as the same module and not as a second copy of it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of such a module. ``import`` calls this if no file has the name."""
        package, _, last = name.rpartition(".")
        if package != "zerorun" or last not in PATHS:
            return None
        return ModuleSpec(name, _Loader(PATHS[last]), origin=PATHS[last])


class _Loader(InspectLoader):
    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just replaced it by the spec of the short path

    def get_code(self, fullname: str) -> CodeType:
        """Return code that runs the real module, for ``python -m``."""
        program = f"import runpy\nrunpy.run_module({self._real!r}, run_name='__main__', alter_sys=True)\n"
        return compile(program, fullname, "exec")

    def get_source(self, fullname: str) -> str | None:
        """Return None: the source is found through the real module."""
        return None
