"""Offline: write checkpoints and weights in one process, one tensor at a time, without an engine.

[Note: streams]
An engine's ranks hold the tensors that they write. Here a tensor comes from a function, which is called when the tensor is
to be written, and which yields its elements in stretches. Plan, files and commit are those of a save on one rank.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..optim.loss_scaler import LossScaler
from . import directory as folder
from .foreign import ForeignCheckpoint, ForeignTensor
from .gather import Collector
from .json_values import encode
from .manifest import Manifest
from .param_group_settings import IMPLEMENTATION
from .ranks import alone
from .save import Scalar, now, pack_scalars, versions
from .stream import write_small
from .tensorfile import Described, FileRecord, dtype_code
from .write import Destination, commit, index_files, place, small_tensor_file, sync_folders, write_tensors
from .write_plan import MASTER, MAX_FILE_BYTES, MODEL, OPTIMIZER, STATE, Row, Task, WritePlan, make_plan

STRETCH_BYTES = 4 << 20
_COUNTERS = ("global_steps", "micro_steps", "skipped_steps")
_ADAMS = ("Adam", "AdamW", "FusedAdam")  # one kind, as in load.optimizer_kind


@dataclass(frozen=True)
class Stream:
    """A tensor to be written into ``set``. ``stretches`` yields its elements in order, as 1-D CPU tensors of its dtype.

    It may raise CheckpointError; then nothing is written.
    """

    set: str
    tensor: Described
    stretches: Callable[[], Iterator[torch.Tensor]]


class _Streams(Collector):
    """Takes tensors from their streams, while a rank's collector takes them from memory."""

    def __init__(self, plan: WritePlan, streams: Sequence[Stream]) -> None:
        super().__init__(plan, {}, alone(), None)
        self._streams = {(stream.set, stream.tensor.name): stream for stream in streams}

    def stretches(self, task: Task) -> Iterator[torch.Tensor]:
        return self._streams[task.set, task.tensor.name].stretches()


def _plan(streams: Sequence[Stream], max_file: int) -> WritePlan:
    """Plan the files, with tensors in the order in which ``streams`` first name them.

    Raises CheckpointError if a set has two tensors of one name.
    """
    rows = [Row(s.set, s.tensor.name, 0, s.tensor.numel, s.tensor.dtype, s.tensor.shape) for s in streams]
    for (kind, name), count in Counter((row.set, row.name) for row in rows).items():
        if count > 1:
            raise CheckpointError(f"the set {kind!r} has {count} tensors {name!r}; a file can hold only one.")
    return make_plan([rows], alone().topology, dict.fromkeys(row.name for row in rows), max_file)


def refuse_existing(path: Path) -> None:
    """Raise CheckpointError if there is something at ``path``."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists, and is left as it is. Remedy: give another name, or delete it first.")


# -- weights -----------------------------------------------------------------------------------------------------


def write_weights(out: Path, streams: Sequence[Stream], small: Mapping[str, bytes], max_file: int) -> Path:
    """Make the directory ``out``, with tensor files of at most ``max_file`` bytes (or one tensor), an index, and ``small``.

    It appears whole or not at all. Raises CheckpointError if ``out`` exists, OSError if it cannot be written.
    """
    out = Path(os.path.abspath(out))
    refuse_existing(out)
    target = Destination(out.parent, folder.check_tag(out.name))
    plan = _plan(streams, max_file)
    held = folder.begin(target.directory, target.tag)
    try:
        write_tensors(plan, _Streams(plan, streams), 0, target)
        for name, data in {**small, **index_files(plan)}.items():
            write_small(place(target, name), data)
        sync_folders(target)
        folder.sync_directory(target.temporary)
        refuse_existing(out)  # it may have appeared meanwhile, and rename() replaces an empty directory
        folder.require_held(held)
        target.temporary.rename(out)
    except BaseException:
        if held.is_there():
            shutil.rmtree(target.temporary, ignore_errors=True)
        raise
    finally:
        held.release()
    folder.sync_directory(out.parent)
    return out


# -- checkpoints -------------------------------------------------------------------------------------------------


def write_foreign(found: ForeignCheckpoint, directory: Path, tag: str) -> Path:
    """Write what a reader of foreign checkpoints has found as ``directory/tag``, and let ``latest`` name it.

    State of the user's own that cannot be stored without pickle is left out, and ``found.notes`` says so. Raises
    CheckpointError if ``found`` contradicts itself, a tensor cannot be read, ``directory/tag`` exists, or the disk is full.
    """
    target = Destination(directory, folder.check_tag(tag))
    refuse_existing(directory / tag)
    streams = [_foreign_stream(tensor) for tensor in found.tensors]
    plan = _plan(streams, MAX_FILE_BYTES)
    _check(found)
    tensors: dict[str, torch.Tensor] = {}
    manifest = _manifest(found, tag, tensors)
    manifest.sets = {kind: list(files) for kind, files in plan.sets.items()}
    small = index_files(plan)
    if tensors:
        file = f"{STATE}-00001-of-00001.safetensors"
        small[file], manifest.sets[STATE] = small_tensor_file(tensors), [file]

    def write() -> dict[str, FileRecord]:
        return write_tensors(plan, _Streams(plan, streams), 0, target)

    def finish(records: dict[str, FileRecord]) -> tuple[dict[str, bytes], Manifest | None]:
        manifest.files = dict(records)
        return small, manifest

    return commit(alone(), target, write, finish)


def _foreign_stream(tensor: ForeignTensor) -> Stream:
    # Masters are fp32, and torch's optimizers need state of that dtype: 16-bit values become the same values in fp32.
    widened = tensor.set.startswith(OPTIMIZER) and tensor.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if widened else tensor.dtype
    described = Described(tensor.name, dtype_code(dtype, tensor.name), tuple(tensor.shape))

    def stretches() -> Iterator[torch.Tensor]:
        loaded = tensor.load()
        if (loaded.dtype, tuple(loaded.shape)) != (tensor.dtype, described.shape):
            raise CheckpointError(
                f"{tensor.set} {tensor.name!r} is {loaded.dtype} {list(loaded.shape)}, and was expected to be "
                f"{tensor.dtype} {list(described.shape)}. This is an error in the reader of the foreign checkpoint."
            )
        for part in loaded.detach().contiguous().view(-1).split(STRETCH_BYTES // dtype.itemsize):
            yield part.to(dtype)

    return Stream(tensor.set, described, stretches)


def _check(found: ForeignCheckpoint) -> None:
    """Raise CheckpointError if parts of ``found`` do not fit together."""
    wrong = list(_contradictions(found))
    if wrong:
        more = f" (and {len(wrong) - 1} more such contradictions)" if len(wrong) > 1 else ""
        raise CheckpointError(f"the foreign checkpoint contradicts itself: {wrong[0]}{more}.")


def _contradictions(found: ForeignCheckpoint) -> Iterator[str]:
    parameters = found.trainable.keys()
    stored = {tensor.name for tensor in found.tensors if tensor.set == MODEL}
    for tensor in found.tensors:
        if tensor.set not in (MODEL, MASTER) and ("/" in tensor.set or not tensor.set.startswith(OPTIMIZER)):
            yield f"the set of {tensor.name!r} is {tensor.set!r}"
        if tensor.set != MODEL and tensor.name not in parameters:
            yield f"{tensor.set} {tensor.name!r} is of no parameter"
    for name in parameters:
        if name not in stored:
            yield f"the parameter {name!r} has no weights"
    for name, kept in found.aliases.items():
        if kept not in stored:
            yield f"{name!r} is tied to {kept!r}, which has no weights"
    for name, group in found.group_of.items():
        if name not in parameters or not 0 <= group < len(found.groups):
            yield f"{name!r} is in group {group} of {len(found.groups)}"
    for key, values in found.scalars.items():
        for name in values:
            if name not in parameters:
                yield f"the scalar {key!r} is of {name!r}, which is no parameter"


def _manifest(found: ForeignCheckpoint, tag: str, tensors: dict[str, torch.Tensor]) -> Manifest:
    """The manifest without files and sets. Tensors in plain values are added to ``tensors``."""
    weights = {tensor.name: tensor for tensor in found.tensors if tensor.set == MODEL}
    counters = {**dict.fromkeys(_COUNTERS, 0), **{name: int(number) for name, number in found.counters.items()}}
    manifest = Manifest(tag, now(), counters, versions())
    manifest.parameters = {
        name: {
            "shape": list(weights[name].shape),
            "dtype": dtype_code(weights[name].dtype, name),
            "trainable": trainable,
            "group": found.group_of.get(name),
        }
        for name, trainable in found.trainable.items()
    }
    manifest.aliases = dict(found.aliases)
    manifest.layout = _layout(weights)
    manifest.optimizer = _optimizer(found, tensors)
    if found.loss_scale is not None:
        manifest.loss_scale = asdict(replace(LossScaler(), **found.loss_scale))
    scheduler = _storable(found.scheduler or {}, "scheduler", found.notes)
    if found.scheduler is not None and len(scheduler) == len(found.scheduler):
        manifest.scheduler = encode(scheduler, tensors, "scheduler")
    manifest.client_state = encode(_storable(found.client_state, "client_state", found.notes), tensors, "client_state")
    return manifest


def _layout(weights: Mapping[str, ForeignTensor]) -> dict[str, Any]:
    """The layout, which is for people: the dtype of most elements. How many ranks there were is not known."""
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        sizes[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
    return {"dtype": sizes.most_common(1)[0][0]} if sizes else {}


def _optimizer(found: ForeignCheckpoint, tensors: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    if not found.groups:
        return None
    groups = []
    for index, group in enumerate(found.groups):
        kept = {key: value for key, value in group.items() if key not in IMPLEMENTATION}
        groups.append(_storable(kept, f"optimizer.groups[{index}]", found.notes))
    # torch's optimizers keep their scalars, of which nearly all have only "step", as fp32 tensors.
    scalars: dict[str, dict[str, Scalar]] = {
        key: {name: (encode(float(value), {}, key), "float32") for name, value in values.items()}
        for key, values in found.scalars.items()
    }
    return {
        "type": "Adam" if found.optimizer_type in _ADAMS else found.optimizer_type,
        "groups": encode(groups, tensors, "optimizer.groups"),
        "scalars": pack_scalars(scalars),
    }


def _storable(values: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """Those of ``values`` that can be stored without pickle. A note is added for each of the others."""
    kept = {}
    for key, value in values.items():
        try:
            encode(value, {}, f"{where}.{key}")
            kept[key] = value
        except CheckpointError as error:
            notes.append(f"{str(error).partition(' Remedy:')[0].rstrip('.')}; it was left out")
    return kept
