"""``zerorun-checkpoint import-deepspeed`` and ``import-dcp``: make a zerorun checkpoint from one of another runtime."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ...log import counted
from ..foreign import ForeignCheckpoint
from ..offline import refuse_existing, write_foreign
from .choose import refuse_missing


def run(args: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """The exit status and the lines to print. If it raises CheckpointError, nothing was written."""
    directory, out = Path(args.dir), Path(args.out)
    refuse_missing(directory)
    found = _read(args, directory)
    tag = f"global_step{found.counters.get('global_steps', 0)}"
    refuse_existing(out / tag)
    path = write_foreign(found, out, tag)
    return 0, _lines(path, found)


def _read(args: argparse.Namespace, directory: Path) -> ForeignCheckpoint:
    if args.command == "import-dcp":
        from ..importers.from_dcp import read_dcp

        return read_dcp(directory, args.names, args.model, args.optimizer)
    from ..importers.from_deepspeed import read_deepspeed

    return read_deepspeed(directory, args.tag, args.names)


def _lines(path: Path, found: ForeignCheckpoint) -> Iterator[str]:
    kinds = dict.fromkeys(tensor.set for tensor in found.tensors)
    yield f"{path}: {counted(len(found.tensors), 'tensor')} of {', '.join(kinds)}"
    yield from (f"note: {note}" for note in found.notes)
    yield "note: it has no random numbers and no position in the data; load it with allow_missing=['rng', 'data']"
