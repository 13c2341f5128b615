"""Save: what is captured of a training run at one instant, and its way to the disk, at once or in the background.

[Note: an instant]
Between two steps nothing that a checkpoint holds changes. So an ordinary save writes from where things lie. An asynchronous
one copies this rank's part into host memory, which is kept for the next time, and lets the training go on; a thread then
does exactly what the ordinary save does, from the copies. One save at a time: the next one waits. What goes wrong in the
thread is raised by the next call that saves, loads or waits; if none comes, the process ends with exit code 1.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import zlib
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..distributed.device import host_empty, on_gpu, on_host, synchronize
from ..distributed.waits import waiting
from ..errors import CheckpointError, DamagedError
from ..log import logger
from .gather import Collector, PeerReader
from .inventory import TensorPart
from .json_values import decode, dtype_by_name, encode
from .manifest import Manifest
from .ranks import Ranks, leads_stage
from .tensorfile import FileRecord, memory_of
from .write import Destination, commit, index_files, small_tensor_file, write_tensors
from .write_plan import OPTIMIZER, STATE, STATE_FILE, WritePlan, make_plan

Scalar = tuple[Any, str | None]  # (plain value, dtype if it was a 0-dim tensor)


@dataclass
class Captured:
    """One rank's share of a checkpoint. All but ``parts`` and ``frozen`` are copies already."""

    parts: list[TensorPart]
    order: list[str]  # names of the module
    scalars: dict[str, dict[str, Scalar]]  # of the optimizer: key -> name -> value
    groups: dict[str, int]  # of the parameters that this rank updates
    manifest: Manifest  # what rank 0 knows of it, and of its model each stage's first rank; no files and sets
    rng: Any = None  # plain values
    data: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # that plain values refer to
    frozen: list[TensorPart] = field(default_factory=list)  # whose sums are kept, but not they themselves
    small: dict[str, bytes] = field(default_factory=dict)  # files as they stand, such as config.json
    weights_only: bool = False


def now() -> str:
    """The time in UTC, ISO 8601, to the microsecond."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


@cache
def versions() -> dict[str, str]:
    """Of what wrote the checkpoint."""
    return {"zerorun": version("zerorun"), "torch": torch.__version__, "python": platform.python_version()}


class Saver:
    """Writes checkpoints of one engine. ``read_peer``: how to read other ranks' memory, if that is possible."""

    def __init__(self, ranks: Ranks, read_peer: PeerReader | None) -> None:
        self.ranks, self._read_peer = ranks, read_peer
        self._staging: dict[tuple[str, str], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._watches_exit = False

    def save(self, captured: Captured, target: Destination, *, asynchronous: bool) -> Path:
        """Write a checkpoint. Collective. Raises CheckpointError, also for the asynchronous save before this one."""
        self.wait()
        if not asynchronous:
            captured.parts, captured.frozen = host_copies(captured.parts), host_copies(captured.frozen)
            return self._write(captured, target)
        captured.parts = self._stage(captured.parts)
        captured.frozen = host_copies(captured.frozen)
        if not self._watches_exit:
            atexit.register(self._tell_by_exit_code)
            self._watches_exit = True
        self._thread = threading.Thread(target=self._write_later, args=(captured, target), name="zerorun checkpoint")
        self._thread.start()
        return target.directory / target.tag

    def wait(self) -> None:
        """Return when no asynchronous save is going on. Raises the CheckpointError of the last one, once."""
        if self._thread is not None:
            with waiting("checkpoint: the asynchronous save before"):
                self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait as ``wait`` does, and give back the process group."""
        try:
            self.wait()
        finally:
            atexit.unregister(self._tell_by_exit_code)
            self.ranks.close()

    def _tell_by_exit_code(self) -> None:
        """The process ends, and no call came that the failure of the last save could have been raised by."""
        if self._thread is not None:
            with waiting("checkpoint: the last asynchronous save"):
                self._thread.join()
        if self._failure is not None:
            atexit.unregister(self._tell_by_exit_code)
            atexit._run_exitfuncs()  # what others have to do at the end
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _write_later(self, captured: Captured, target: Destination) -> None:
        try:
            self._write(captured, target)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:
            self._failure = CheckpointError(f"an asynchronous save failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        if self._failure is not None:  # there may be no next call
            logger.error("the checkpoint %s was not saved: %s", target.directory / target.tag, self._failure)

    def _stage(self, parts: list[TensorPart]) -> list[TensorPart]:
        """Copies of ``parts`` in host memory, pinned if they come from a GPU. The memory is kept for the next save."""
        staged, sources, places = [], [], []
        for part in parts:
            key = part.set, part.name
            place = self._staging.get(key)
            if place is None or place.numel() != part.tensor.numel() or place.dtype != part.tensor.dtype:
                place = host_empty(part.tensor.numel(), part.tensor.dtype, pinned=on_gpu(part.tensor))
                self._staging[key] = place
            sources.append(part.tensor)
            places.append(place)
            staged.append(replace(part, tensor=place))
        if places:
            torch._foreach_copy_(places, sources)
        for device in {source.device for source in sources}:
            synchronize(device)
        return staged

    def _write(self, captured: Captured, target: Destination) -> Path:
        ranks = self.ranks
        target.tag = ranks.first(lambda: target.tag)
        plan = _plan_together(captured.parts, captured.order, ranks)
        memory = {(part.set, part.name): part.tensor for part in captured.parts}
        facts = _merge_facts(ranks, captured)

        def write() -> dict[str, FileRecord]:
            collector = Collector(plan, memory, ranks, self._read_peer)
            return write_tensors(plan, collector, ranks.rank, target)

        def finish(records: dict[str, FileRecord]) -> tuple[dict[str, bytes], Manifest | None]:
            return _finish(captured, plan, records, facts)

        if any(ranks.gather(bool(captured.frozen))):
            captured.manifest.frozen_base = frozen_sums(captured.frozen, captured.order, ranks, self._read_peer)
        return commit(ranks, target, write, finish)


def host_copies(parts: list[TensorPart]) -> list[TensorPart]:
    """The same parts with their elements in host memory."""
    return [part if on_host(part.tensor) else replace(part, tensor=part.tensor.cpu()) for part in parts]


def _plan_together(parts: list[TensorPart], order: list[str], ranks: Ranks) -> WritePlan:
    """The plan for all ranks' parts. ``order``: names of this rank's module; stages follow one another. Collective."""
    tables = ranks.gather([part.row() for part in parts])
    stages = ranks.gather(order if leads_stage(ranks.topology) else [])
    return make_plan(tables, ranks.topology, dict.fromkeys(name for names in stages for name in names))


def frozen_sums(
    parts: list[TensorPart], order: list[str], ranks: Ranks, read_peer: PeerReader | None
) -> dict[str, dict[str, Any]]:
    """name -> dtype and CRC-32 of the whole tensors that ranks hold parts of. ``order``: as they are. Collective."""
    parts = host_copies(parts)
    plan = _plan_together(parts, order, ranks)
    collector = Collector(plan, {(part.set, part.name): part.tensor for part in parts}, ranks, read_peer)
    sums = {}
    for task in plan.tasks:
        if task.writer == ranks.rank:
            crc = 0
            for stretch in collector.stretches(task):
                crc = zlib.crc32(memory_of(stretch), crc)
            sums[task.tensor.name] = {"dtype": task.tensor.dtype, "crc32": f"{crc:08x}"}
    collector.finish()
    return {name: value for found in ranks.gather(sums) for name, value in found.items()}


@dataclass
class _Facts:
    """What single ranks know, brought together."""

    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    rng: list[Any] = field(default_factory=list)  # by rank
    data: list[Any] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    stages: list[Manifest] = field(default_factory=list)  # one of each pipeline stage


def _merge_facts(ranks: Ranks, captured: Captured) -> _Facts:
    merged = _Facts()
    manifest = captured.manifest if leads_stage(ranks.topology) else None
    mine = (captured.scalars, captured.groups, captured.rng, captured.data, captured.tensors, manifest)
    for scalars, groups, rng, data, tensors, stage in ranks.gather(mine):
        for key, values in scalars.items():
            merged.scalars.setdefault(key, {}).update(values)
        merged.groups.update(groups)
        merged.tensors.update(tensors)
        merged.rng.append(rng)
        merged.data.append(data)
        merged.stages += [stage] if stage is not None else []
    return merged


def _finish(
    captured: Captured, plan: WritePlan, records: dict[str, FileRecord], facts: _Facts
) -> tuple[dict[str, bytes], Manifest | None]:
    """On rank 0: (small files, manifest)."""
    small = {**captured.small, **index_files(plan)}
    if captured.weights_only:
        return small, None
    manifest = captured.manifest
    for stage in facts.stages:
        manifest.add_stage(stage)
    manifest.rng = facts.rng if captured.rng is not None else None
    manifest.data = facts.data if captured.data is not None else None
    if manifest.optimizer is not None:
        manifest.optimizer["scalars"] = pack_scalars(facts.scalars)
        manifest.optimizer["states"] = [k.removeprefix(OPTIMIZER) for k in plan.sets if k.startswith(OPTIMIZER)]
    for name, group in facts.groups.items():
        manifest.parameters[name]["group"] = group
    manifest.sets = {kind: list(files) for kind, files in plan.sets.items()}
    manifest.files = dict(records)
    if facts.tensors:
        small[STATE_FILE] = small_tensor_file(facts.tensors)
        manifest.sets[STATE] = [STATE_FILE]
    return small, manifest


# -- scalars -----------------------------------------------------------------------------------------------------


def scalar(value: Any, where: str) -> Scalar:
    """A scalar of an optimizer's state as a plain value. Raises CheckpointError for what is none."""
    if isinstance(value, torch.Tensor):
        return encode(value.item(), {}, where), str(value.dtype).removeprefix("torch.")
    return encode(value, {}, where), None


def pack_scalars(scalars: dict[str, dict[str, Scalar]]) -> dict[str, list[dict[str, Any]]]:
    """key -> entries of {value, dtype, names}: nearly always one, since all parameters have taken the same steps."""
    packed: dict[str, list[dict[str, Any]]] = {}
    for key, values in scalars.items():
        found: dict[str, dict[str, Any]] = {}
        for name, (value, dtype) in values.items():
            entry = found.setdefault(repr((value, dtype)), {"value": value, "dtype": dtype, "names": []})
            entry["names"].append(name)
        packed[key] = list(found.values())
    return packed


def unpack_scalars(packed: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """name -> key -> value, as it was in the optimizer's state. Raises CheckpointError for values that are none."""
    found: dict[str, dict[str, Any]] = {}
    for key, entries in packed.items():
        for entry in entries:
            value = decode(entry["value"], {})
            if entry["dtype"] is not None:
                value = _zero_dim(value, entry["dtype"], key)
            for name in entry["names"]:
                found.setdefault(name, {})[key] = value
    return found


def _zero_dim(value: Any, dtype: str, key: str) -> torch.Tensor:
    try:
        return torch.tensor(value, dtype=dtype_by_name(dtype))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"optimizer.{key} has a scalar that is no {dtype!r:.40} ({error!s:.200}).") from error
