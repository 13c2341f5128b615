"""The flight recorder: what torch remembers of each rank's last collectives over NCCL, in files if a job hangs.

torch reads the names of its files from the environment, and writes when it reads something from a rank's pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .this_host import visible_gpus

_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"  # collectives that are remembered
_FILES, _PIPES = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # what comes before the rank
_COLLECTIVES = 2000
_PREFIX, _PIPE = "nccl_trace_rank_", ".pipe"


class FlightRecorder:
    """The files of the workers of one host."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def begin(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for workers that have ``environment``. What the user has set stays; none without GPUs."""
        if not visible_gpus(environment) or _FILES in environment or _PIPES in environment:
            return {}
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="zerorun-nccl-"))
        except OSError:  # a full disk must not keep a job from running
            return {}
        place = str(self._folder / _PREFIX)
        return {_SIZE: environment.get(_SIZE, str(_COLLECTIVES)), _FILES: place, _PIPES: place}

    def ask(self) -> None:
        """Have all ranks here write, which takes a second or two."""
        for pipe in self._found(f"*{_PIPE}"):
            with contextlib.suppress(OSError):  # nobody reads it any more
                file = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(file, b"1\n")
                os.close(file)

    @property
    def words(self) -> str:
        """Where the files will be; empty if no rank has NCCL."""
        pipes = self._found(f"*{_PIPE}")
        return f"NCCL's last collectives are written to {self._folder}/{_PREFIX}*: torchfrtrace reads them" if pipes else ""

    def end(self) -> None:
        """Remove what nobody needs: files that have been written stay."""
        for pipe in self._found(f"*{_PIPE}"):
            pipe.unlink(missing_ok=True)
        if self._folder is not None and not self._found("*"):
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def _found(self, pattern: str) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob(pattern))
