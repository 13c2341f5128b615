"""Requests: check what a training loop passes to save, load and export, before any rank does anything. No I/O."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..optim.loss_scaler import DTYPES
from .directory import check_tag


def translate(given: dict[str, Any], names: dict[str, str], function: str) -> dict[str, Any]:
    """Rename the keywords in ``given`` by ``names``, which has DeepSpeed's. Raises TypeError for one that is not in it."""
    for key in given:
        if key not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {key!r}")
    return {names[key]: value for key, value in given.items()}


def directory_of(directory: str | Path) -> Path:
    """Return ``directory`` as a Path from the root: the script may change its working directory while a save goes on.

    Raises CheckpointError if it names no directory.
    """
    if not isinstance(directory, (str, os.PathLike)) or not str(directory):
        raise CheckpointError(
            f"directory = {directory!r:.60}: checkpoints and exports need a directory. Remedy: pass a str or a Path, such "
            "as 'checkpoints'."
        )
    try:
        path = Path(directory).absolute()
    except FileNotFoundError:
        raise CheckpointError(
            f"directory = {str(directory)!r}: it is relative, and the working directory of this process was deleted. "
            "Remedy: pass an absolute path, or start again from a directory that is there."
        ) from None
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file. Remedy: pass a directory: checkpoints and exports are several files.")
    return path


def tag_of(tag: Any) -> str | None:
    """Return ``tag`` as a str; None if none is given. Loops written for DeepSpeed also pass numbers.

    Raises CheckpointError if it cannot name a checkpoint's directory.
    """
    if tag is None:
        return None
    if not isinstance(tag, (str, int)) or isinstance(tag, bool):
        raise CheckpointError(
            f"tag = {tag!r:.60}: it must be a str, not a {type(tag).__name__}. Remedy: pass a name such as 'best', and the "
            "directory that it is in as the first argument."
        )
    return check_tag(str(tag))


def dtype_of(asked: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that ``asked`` names; None if it is None. Raises CheckpointError if it is not floating-point."""
    dtype = DTYPES.get(asked) if isinstance(asked, str) else asked
    if asked is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(
            f"dtype = {asked!r:.60}: weights cannot be exported in it. Remedy: pass {', '.join(map(repr, DTYPES))}, a "
            "floating torch.dtype, or None for that of the model."
        )
    return dtype


def names_of(allowed: Any) -> tuple[str, ...]:
    """Return the names and patterns of ``allow_missing`` as a tuple. Raises CheckpointError if they are no names."""
    names = (allowed,) if isinstance(allowed, str) else tuple(allowed) if isinstance(allowed, Iterable) else (allowed,)
    if not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"allow_missing = {allowed!r:.60}: it must be names or patterns. Remedy: pass a list of str, such as "
            "['optimizer', 'blocks.7.*']."
        )
    return names


def check_client_state(state: Any) -> None:
    if state is not None and not isinstance(state, dict):
        raise CheckpointError(
            f"client_state = {state!r:.60}: it must be a dict, not a {type(state).__name__}. Remedy: give it a name, as in "
            "client_state={'mine': ...}."
        )
