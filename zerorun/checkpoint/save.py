"""Save: take what was captured of a training run at one instant, and write it to disk, at once or in the background.

[Note: an instant]
Nothing that a checkpoint holds changes between two steps, so an ordinary save writes tensors from where they are in host
memory. An asynchronous save first copies this rank's part into host memory of its own, which is kept for the next save, and
lets training go on; a thread then does exactly what an ordinary save does, but from the copies. Frozen weights that are
left out have none in host memory: there checksums are made before training goes on, since a script may merge adapters into
them at once. Only one save runs at a time: the next one waits. An error in the thread is raised by the next call that
saves, loads or waits. If there is no such call, the process ends with exit code 1.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import sys
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed.device import host_empty, on_gpu, on_host, synchronize
from ..distributed.waits import waiting
from ..errors import CheckpointError, DamagedError, ModelError
from ..log import is_rank_zero, logger, warn_once
from ..optim.requested_optimizer import RawOptimizer
from ..plan.optimizer_states import OptimizerStates
from ..watch.board import NOBODY, stay_off_the_board
from .directory import advise_later, after_latest, named_by_latest
from .gather import Collector, PeerReader
from .inventory import TensorPart, refuse_state_name
from .json_values import decode, dtype_by_name, encode
from .manifest import Manifest
from .ranks import Ranks, attempt, leads_stage
from .tensorfile import FileRecord, dtype_code, memory_of
from .write import Destination, commit, index_files, small_tensor_file, write_tensors
from .write_plan import OPTIMIZER, STATE, STATE_FILE, WritePlan, make_plan

Scalar = tuple[Any, str | None]  # (plain value, dtype if it was a 0-dim tensor)
_Key = tuple[str, str]  # (set, name)


@dataclass
class Captured:
    """One rank's share of a checkpoint. Everything but tensors has been copied already."""

    parts: list[TensorPart]
    order: list[str]  # tensor names, in the module's order
    scalars: dict[str, dict[str, Scalar]]  # of the optimizer's state: key -> parameter name -> value
    groups: dict[str, int]  # parameter name -> optimizer group, as Inventory.groups says
    manifest: Manifest  # rank 0's lacks files and sets; that of another pipeline stage has only its part of the model
    rng: Any = None  # plain values
    data: Any = None
    client_state: Any = None  # of this rank, if it is not that of rank 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # that plain values refer to; not copied
    frozen: list[TensorPart] = field(default_factory=list)  # left out of the checkpoint, which has their checksums only
    small: dict[str, bytes] = field(default_factory=dict)  # name -> content of small files, such as config.json
    weights_only: bool = False
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # of this rank, not copied

    def facts(self, ranks: Ranks) -> RankFacts:
        """What only this rank knows, beside its parts."""
        manifest = self.manifest if leads_stage(ranks.topology) else None
        return RankFacts(self.scalars, self.groups, self.rng, self.data, self.client_state, self.tensors, manifest)

    def copy_tensors(self) -> None:
        """Let ``tensors`` be copies in host memory, because training goes on."""
        self.tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows of a checkpoint, beside its parts. ``stage``: of the first rank of each pipeline stage."""

    scalars: dict[str, dict[str, Scalar]]
    groups: dict[str, int]
    rng: Any
    data: Any
    client_state: Any  # if it is not that of rank 0
    tensors: dict[str, torch.Tensor]
    stage: Manifest | None


def now() -> str:
    """The time in UTC, ISO 8601, to the microsecond."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def as_number(moment: str) -> int:
    """What ``now`` returned, as a number of 24 digits that grows with time."""
    return int(re.sub(r"\D", "", moment.partition("+")[0])[:20].ljust(24, "0"))


@cache
def versions() -> dict[str, str]:
    """The versions of what writes the checkpoint."""
    return {"zerorun": version("zerorun"), "torch": torch.__version__, "python": platform.python_version()}


class Saver:
    """Writes checkpoints of one engine. ``read_peer`` reads other ranks' memory; None if that is not possible."""

    def __init__(self, ranks: Ranks, read_peer: PeerReader | None) -> None:
        self.ranks, self._read_peer = ranks, read_peer
        self._staging: dict[tuple[str, str], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._watches_exit = False

    def save(self, captured: Captured, target: Destination, *, asynchronous: bool) -> Path:
        """Write a checkpoint, and return its path. Collective.

        Raises CheckpointError, also that of the preceding asynchronous save.
        """
        self.wait()
        if asynchronous and any(self.ranks.gather(any(on_host(part.tensor) for part in captured.frozen))):
            self._sum_frozen(captured)
        self.ranks.agree(attempt(lambda: self._copy(captured, asynchronous=asynchronous))[1])
        if not asynchronous:
            return self._write(captured, target)
        if not self._watches_exit:
            atexit.register(self._tell_by_exit_code)
            self._watches_exit = True
        self._thread = threading.Thread(target=self._write_later, args=(captured, target), name="zerorun checkpoint")
        self._thread.start()
        return target.directory / target.tag

    def wait(self) -> None:
        """Wait until no asynchronous save is running. If the last one failed, raise its CheckpointError, but only once."""
        if self._thread is not None:
            with waiting("checkpoint: the asynchronous save before", span=NOBODY):
                self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait as ``wait`` does, then release the process group."""
        try:
            self.wait()
        finally:
            atexit.unregister(self._tell_by_exit_code)
            self.ranks.close()

    def _tell_by_exit_code(self) -> None:
        """Wait for the last save, and end the process with exit code 1 if it failed and no later call raised its error."""
        if self._thread is not None:
            with waiting("checkpoint: the last asynchronous save", span=NOBODY):
                self._thread.join()
        if self._failure is not None:
            atexit.unregister(self._tell_by_exit_code)
            atexit._run_exitfuncs()  # os._exit would skip the other exit handlers
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _write_later(self, captured: Captured, target: Destination) -> None:
        stay_off_the_board()
        try:
            self._write(captured, target)
        except CheckpointError as error:
            self._failure = error
        except Exception as error:
            self._failure = CheckpointError(f"an asynchronous save failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        if self._failure is None:
            if is_rank_zero():
                logger.info("checkpoint %s is saved", target.directory / target.tag)
        else:  # there may be no next call to raise it
            logger.error("the checkpoint %s was not saved: %s", target.directory / target.tag, self._failure)

    def _copy(self, captured: Captured, *, asynchronous: bool) -> None:
        """Copy what must not be where it is, because training goes on, or because others read it."""
        if asynchronous:
            captured.parts = self._stage(captured.parts)
            captured.frozen = host_copies(captured.frozen)
            captured.copy_tensors()
        elif self._read_peer is not None:  # others read the parts where they lie
            captured.parts = host_copies(captured.parts)

    def _sum_frozen(self, captured: Captured) -> None:
        """Let the manifest have the checksums of what is left out, once. Collective."""
        if any(self.ranks.gather(bool(captured.frozen))):
            captured.manifest.frozen_base = frozen_sums(captured.frozen, captured.order, self.ranks, self._read_peer)
        captured.frozen = []

    def _stage(self, parts: list[TensorPart]) -> list[TensorPart]:
        """Copy ``parts`` into host memory, which is pinned if they are on a GPU, and which is kept for the next save."""
        staged, sources, places = [], [], []
        for part in parts:
            key = part.set, part.name
            place = self._staging.get(key)
            if place is None or place.numel() != part.tensor.numel() or place.dtype != part.dtype:
                place = host_empty(part.tensor.numel(), part.dtype, pinned=on_gpu(part.tensor))
                self._staging[key] = place
            if part.rest is None:
                sources.append(part.tensor)
                places.append(place)
            else:
                place.copy_(part.joined().tensor)  # one after the other
            staged.append(replace(part, tensor=place, rest=None))
        if places:
            torch._foreach_copy_(places, sources)
        for device in {source.device for source in sources}:
            synchronize(device)
        return staged

    def _write(self, captured: Captured, target: Destination) -> Path:
        ranks = self.ranks
        target.tag = ranks.first(lambda: target.tag)
        plan = plan_together(captured.parts, captured.order, ranks)
        memory, rests = memory_of_parts(captured.parts)
        self._sum_frozen(captured)
        facts = self._gather_facts(captured)

        def write() -> dict[str, FileRecord]:
            collector = Collector(plan, memory, ranks, self._read_peer, rests)
            return write_tensors(plan, collector, ranks.rank, target)

        def finish(records: dict[str, FileRecord]) -> tuple[dict[str, bytes], Manifest | None]:
            small, manifest = _finish(captured, plan, records, facts)
            if manifest is not None:
                latest = named_by_latest(target.directory)
                if manifest.becomes_latest:
                    advise_later(target.directory, latest, target.tag, manifest.global_steps)
                manifest.saved_at = after_latest(latest, manifest.saved_at)
            return small, manifest

        return commit(ranks, target, write, finish)

    def _gather_facts(self, captured: Captured) -> Facts:
        """What all ranks know. The tensors of rank 0, which writes them, are there alone: they may be large."""
        own = captured.facts(self.ranks)
        found = self.ranks.gather(own if self.ranks.rank else replace(own, tensors={}))
        return merge_facts([own, *found[1:]] if self.ranks.rank == 0 else found)


def host_copies(parts: list[TensorPart]) -> list[TensorPart]:
    """The same parts with their elements in host memory. Those that are there already are not copied."""
    return [
        part
        if on_host(part.tensor)
        else replace(part, tensor=part.tensor.cpu(), rest=None if part.rest is None else part.rest.cpu())
        for part in parts
    ]


def memory_of_parts(parts: Iterable[TensorPart]) -> tuple[dict[_Key, torch.Tensor], dict[_Key, torch.Tensor]]:
    """For a :class:`Collector`: the tensors of ``parts``, and their rests."""
    found = list(parts)
    rests = {(part.set, part.name): part.rest for part in found if part.rest is not None}
    return {(part.set, part.name): part.tensor for part in found}, rests


def plan_together(parts: list[TensorPart], order: list[str], ranks: Ranks) -> WritePlan:
    """Plan how to write the parts of all ranks. Collective.

    ``order``: the tensor names of this rank's module, in order. In the plan, pipeline stages follow one another.
    """
    rows, problem = attempt(lambda: [part.row() for part in parts])
    tables = ranks.gather_unless(problem, rows)
    stages = ranks.gather(order if leads_stage(ranks.topology) else [])
    return make_plan(tables, ranks.topology, dict.fromkeys(name for names in stages for name in names))


def frozen_sums(
    parts: list[TensorPart], order: list[str], ranks: Ranks, read_peer: PeerReader | None
) -> dict[str, dict[str, Any]]:
    """Return name -> dtype and CRC-32 of each whole tensor of which ranks have ``parts``. Collective.

    ``order``: the tensor names of this rank's module, in order.
    """
    if read_peer is not None:
        copies, problem = attempt(lambda: host_copies(parts))
        ranks.agree(problem)
        parts = copies or []
    plan = plan_together(parts, order, ranks)
    memory, rests = memory_of_parts(parts)
    collector = Collector(plan, memory, ranks, read_peer, rests)
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
class Facts:
    """What each rank knows on its own, merged over all ranks."""

    scalars: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    rng: list[Any] = field(default_factory=list)  # by rank
    data: list[Any] = field(default_factory=list)
    client_states: list[Any] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    stages: list[Manifest] = field(default_factory=list)  # one manifest for each pipeline stage

    def manifest(self, kinds: Iterable[str]) -> Manifest:
        """That of the checkpoint, whose tensors are in the sets ``kinds``. It lacks all files."""
        manifest, kinds = self.stages[0], list(kinds)
        manifest.sets = {kind: [] for kind in kinds}
        for stage in self.stages:
            manifest.add_stage(stage)
        manifest.rng = self.rng if self.rng[0] is not None else None
        manifest.data = self.data if self.data[0] is not None else None
        others = any(state is not None for state in self.client_states)
        manifest.client_states = self.client_states if others else None
        if manifest.optimizer is not None:
            manifest.optimizer["scalars"] = pack_scalars(self.scalars)
            manifest.optimizer["states"] = [k.removeprefix(OPTIMIZER) for k in kinds if k.startswith(OPTIMIZER)]
        for name, group in self.groups.items():
            manifest.parameters[name]["group"] = group
        return manifest


def merge_facts(ranks: Iterable[RankFacts]) -> Facts:
    """Merge what the ranks know, by rank."""
    merged = Facts()
    for found in ranks:
        for key, values in found.scalars.items():
            merged.scalars.setdefault(key, {}).update(values)
        merged.groups.update(found.groups)
        merged.tensors.update(found.tensors)
        merged.rng.append(found.rng)
        merged.data.append(found.data)
        merged.client_states.append(found.client_state)
        merged.stages += [found.stage] if found.stage is not None else []
    return merged


def _finish(
    captured: Captured, plan: WritePlan, records: dict[str, FileRecord], facts: Facts
) -> tuple[dict[str, bytes], Manifest | None]:
    """On rank 0: the small files by name, and the manifest (None for an export)."""
    small = {**captured.small, **index_files(plan)}
    if captured.weights_only:
        return small, None
    manifest = facts.manifest(plan.sets)
    manifest.sets = {kind: list(files) for kind, files in plan.sets.items()}
    manifest.files = dict(records)
    if facts.tensors:
        small[STATE_FILE] = small_tensor_file(facts.tensors)
        manifest.sets[STATE] = [STATE_FILE]
    return small, manifest


# -- scalars -----------------------------------------------------------------------------------------------------


_TRIED = ("torch.optim", "zerorun.")  # packages whose optimizers' states can be saved


def scalar(value: Any, where: str) -> Scalar:
    """Turn a scalar of an optimizer's state into a plain value. Raises CheckpointError if it cannot be stored as one."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return encode(value.item(), {}, where), str(value.dtype).removeprefix("torch.")
    tensors: dict[str, torch.Tensor] = {}
    plain = encode(value, tensors, where)
    if tensors:
        raise CheckpointError(
            f"{where} has tensors in a {type(value).__name__}, and no checkpoint could give each rank its part of them. "
            "Remedy: an optimizer that keeps each tensor under a name of its own, state[parameter][name]."
        )
    return plain, None


def states_apart(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What an optimizer's state has under keys that are no parameters."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def more_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """What the optimizer's class adds to its ``state_dict`` beside the state and the groups."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}


def pack_values(values: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Turn values of an optimizer that belong to no parameter into plain ones. Raises CheckpointError if that cannot be."""
    packed = {}
    for key, value in values.items():
        refuse_state_name(key)
        plain, dtype = scalar(value, f"{key!r} of the optimizer")
        packed[key] = {"value": plain, "dtype": dtype}
    return packed


def unpack_values(packed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Undo ``pack_values``. Raises CheckpointError if a value cannot be decoded."""
    return {key: _unpacked(key, entry) for key, entry in packed.items()}


def refuse_unsavable_states(raw: RawOptimizer) -> None:
    """Raise ModelError for an optimizer of the user's that keeps a state which cannot be saved. A trial step finds it."""
    if raw.optimizer is None:
        known, name = "." not in raw.name, raw.name.rpartition(".")[2]
    else:
        known, name = type(raw.optimizer).__module__.startswith(_TRIED), type(raw.optimizer).__name__
    if known:
        return
    states = OptimizerStates(raw, torch.device("cpu"))
    try:
        for key, is_scalar in states.names.items():
            refuse_state_name(key, of_tensor=not is_scalar)
        for key, value in states.scalars.items():
            scalar(value, f"the state {key!r} of {name}")
        pack_values(states.apart | (more_of(raw.optimizer) if raw.optimizer is not None else {}))
    except CheckpointError as error:
        raise ModelError(str(error)) from None


def warn_of_unsavable_buffers(model: nn.Module) -> None:
    """Warn of buffers that make every save fail: better at the start than after the first hour."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                _, problem = attempt(partial(dtype_code, buffer.dtype, f"{prefix}.{key}".lstrip(".")))
                if problem is not None:
                    warn_once(f"this model cannot be saved: {problem.text}")


def pack_scalars(scalars: dict[str, dict[str, Scalar]]) -> dict[str, list[dict[str, Any]]]:
    """Turn key -> name -> scalar into key -> list of {value, dtype, names}, with one entry for each distinct value.

    There is nearly always only one, since all parameters have taken the same steps.
    """
    packed: dict[str, list[dict[str, Any]]] = {}
    for key, values in scalars.items():
        found: dict[str, dict[str, Any]] = {}
        for name, (value, dtype) in values.items():
            entry = found.setdefault(repr((value, dtype)), {"value": value, "dtype": dtype, "names": []})
            entry["names"].append(name)
        packed[key] = list(found.values())
    return packed


def unpack_scalars(packed: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Undo ``pack_scalars``: return name -> key -> value as in the optimizer's state.

    Raises CheckpointError if a value cannot be decoded.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, entries in packed.items():
        for entry in entries:
            value = _unpacked(key, entry)
            for name in entry["names"]:
                found.setdefault(name, {})[key] = value
    return found


def _unpacked(key: str, entry: Mapping[str, Any]) -> Any:
    value = decode(entry["value"], {})
    return value if entry["dtype"] is None else _zero_dim(value, entry["dtype"], key)


def _zero_dim(value: Any, dtype: str, key: str) -> torch.Tensor:
    try:
        return torch.tensor(value, dtype=dtype_by_name(dtype))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"optimizer.{key} has a scalar that is no {dtype!r:.40} ({error!s:.200}).") from error
