"""Salvage: read a checkpoint for ``zerorun-checkpoint diff`` as far as that is possible. Damage is noted, not raised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ...errors import DamagedError
from ..adapters import Adapters, stored_adapters
from ..directory import missing_files
from ..manifest import read_manifest
from ..ranks import alone
from ..read import Reader
from ..write_plan import STATE

T = TypeVar("T")


class Salvage(Reader):
    """A reader that finds tensors in the files that can be opened, not by indexes, and may have no manifest.

    ``problems``: what is damaged, in words; any call may add more. Raises CheckpointError if the checkpoint is of a later
    version.
    """

    def __init__(self, path: Path) -> None:
        self.problems: list[str] = []
        self._broken: set[str] = set()  # sets that lack a file
        super().__init__(path, self._tried(lambda: read_manifest(path)))
        wrong = missing_files(path, self.manifest.files) if self.manifest is not None else {}
        self.problems += [f"{path / name} {what}." for name, what in wrong.items()]
        self._parts = self._files_by_set()
        known = self.manifest.files if self.manifest is not None else None
        unknown = {name for names in self._parts.values() for name in names if known is not None and name not in known}
        self.problems += [f"{path / name} has no checksums in the manifest." for name in sorted(unknown)]
        self._unreadable = {*wrong, *unknown}

    def __enter__(self) -> Salvage:
        return self

    @property
    def sets(self) -> list[str]:
        return [kind for kind in self._parts if kind != STATE]

    def _files_by_set(self) -> dict[str, list[str]]:
        """The files of each set, as the manifest says, or without a manifest, as their names say."""
        if self.manifest is not None:
            return dict(self.manifest.sets)
        found: dict[str, list[str]] = {}
        for path in sorted(self.path.glob("*-of-*.safetensors")):
            found.setdefault(path.name.rpartition("-of-")[0].rpartition("-")[0], []).append(path.name)
        return found

    def _find_places(self, kind: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in self._parts.get(kind, ()):
            file = self._tried(partial(self._open, name)) if name not in self._unreadable else None
            if file is None:
                self._broken.add(kind)
            else:
                found.update(dict.fromkeys(file.tensors, name))
        return found

    def is_whole(self, kind: str) -> bool:
        """False if tensors of the set may be in files that cannot be read."""
        self.places(kind)
        return self.manifest is not None and kind not in self._broken

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that the manifest refers to; none if they cannot be read."""
        readable = self.manifest is not None and not self._unreadable & set(self._parts.get(STATE, ()))
        return (self._tried(lambda: self.state_tensors(alone())) if readable else None) or {}

    def adapters(self) -> Adapters | None:
        """The adapters of the model; None if it has none, or if they cannot be read."""
        return self._tried(lambda: stored_adapters(self))

    def note(self, error: DamagedError) -> None:
        """Add ``error`` to ``problems``, unless it is there already."""
        if str(error) not in self.problems:
            self.problems.append(str(error))

    def _tried(self, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except DamagedError as error:
            self.note(error)
            return None
