"""Checkpointer: captures an engine's state, saves and loads checkpoints, and chooses which one to load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch

from ..data import EpochLoader, has_state
from ..errors import CheckpointError, DamagedError, ZerorunError
from ..log import is_rank_zero, listed, logger, warn_once
from ..optim.loss_scaler import LossScaler
from . import directory as folder
from . import random_state
from .adapters import ADAPTERS_FILE, find_adapters, peft_model
from .argument_checks import check_client_state, directory_of, dtype_of, tag_of
from .client_states import client_state_of, encode_own
from .extra_states import left_out
from .inventory import Beside, Inventory, Subject, TensorPart
from .json_values import decode, encode
from .load import ModelLoader, optimizer_kind
from .manifest import MANIFEST, Manifest, never_cast
from .matching import Wanted
from .merging import Merged
from .param_group_settings import IMPLEMENTATION
from .rank_buffers import RankBuffers, Sums
from .ranks import Ranks, attempt, is_by_rank, leads_stage, refuse_other, speaking_up
from .read import Reader, age_of, candidates, open_on_all, refuse_foreign
from .save import Captured, Saver, more_of, now, pack_values, scalar, states_apart, versions
from .write import Destination
from .write_plan import CAST, MASTER, MODEL

T = TypeVar("T")
# By path, the saver of the engine of this process that has saved there last. Engines that are destroyed have none.
_last_to_save: WeakValueDictionary[Path, Saver] = WeakValueDictionary()


class TrainingRun(Protocol):
    """The training run around the model: the engine."""

    module: torch.nn.Module
    config: Any
    scaler: LossScaler
    lr_scheduler: Any
    dataloader: Any
    compute_dtype: torch.dtype | None

    def counters(self) -> dict[str, int]: ...

    def train_batch_size(self) -> int: ...

    def set_counters(self, counters: dict[str, int]) -> None: ...


class Checkpointer:
    """Checkpoints of one engine. All public methods are collective."""

    def __init__(self, subject: Subject, run: TrainingRun) -> None:
        self.subject, self.run = subject, run
        self.inventory = Inventory.of(subject)
        self.expected = self.inventory.describe()  # the model as it was when the engine was created
        self._rank_buffers = RankBuffers(subject.topology)
        self._saver: Saver | None = None
        self.data_moves = 0  # loads that have moved the data loader
        self._adapters: dict[str, bytes] | None = None  # adapters.json by name; {}: no adapters; None: not yet made
        self.check_point: Callable[[str], None] = lambda point: None  # tests interrupt a save here

    @property
    def saver(self) -> Saver:
        """The saver. It is created on first use, together with a process group of its own."""
        if self._saver is None:
            try:
                self.subject.comm.control.barrier()  # detects a rank that has ended; creating a group would wait for it
            except ZerorunError as error:
                raise CheckpointError(f"not all ranks came to save or load: {error}") from error
            self._saver = Saver(Ranks(self.subject.topology), self.subject.comm.dense.peer_reader())
        return self._saver

    def _meet(self, what: str, look: Callable[[], T]) -> T:
        """Wait until all ranks have called ``what``, and return what ``look`` returned on this rank.

        ``look`` checks the arguments that this rank was given. If it fails on any rank, all ranks raise the error.
        """
        found, problem = attempt(look)
        with speaking_up(self.subject.topology.rank, what):  # creating the saver waits for the other ranks, too
            self.saver.ranks.agree(problem)
        return found  # type: ignore[return-value]

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: dict[str, Any] | None,
        *,
        trainable_only: bool,
        asynchronous: bool,
        latest: bool,
        keep: int | None,
    ) -> Path:
        """Save into ``directory/tag``, and return the path of the checkpoint."""
        self.wait()
        default = f"global_step{self.run.counters()['global_steps']}"

        def look() -> Destination:
            check_client_state(client_state)
            self._compare_with_beginning()
            where = directory_of(directory), tag_of(tag) or default
            return Destination(*where, latest, keep, check=self.check_point)

        target = self._meet("save_checkpoint()", look)
        asked = f"save_latest={latest}, exclude_frozen_parameters={trainable_only}, asynchronous={asynchronous}"
        refuse_other(self.saver.ranks, asked, "save_checkpoint()")
        _tell_of_another(target.directory / target.tag, self.saver)
        if not asynchronous:
            self.subject.comm.fence()
        captured = self.capture(target.tag, client_state or {}, trainable_only=trainable_only, joined=False)
        captured.manifest.becomes_latest = latest
        captured.small |= self._adapters_file()
        path = self.saver.save(captured, target, asynchronous=asynchronous)
        if is_rank_zero():
            logger.info("checkpoint %s %s", path, "is being written" if asynchronous else "is saved")
        return path

    def export(self, directory: str | Path, asked: torch.dtype | str | None, *, merge_adapter: bool = False) -> Path:
        """Write the weights alone, for Hugging Face, PEFT and others, as the new directory ``directory``."""
        self.wait()
        path, dtype = self._meet("export()", lambda: (directory_of(directory), dtype_of(asked)))
        refuse_other(self.saver.ranks, (str(dtype), merge_adapter), "export()")
        self.saver.ranks.agree(attempt(self._compare_with_beginning)[1])
        self.subject.comm.fence()
        captured = self.capture(path.name, {}, trainable_only=False, joined=False)
        captured.weights_only = True
        left = [text for text in self.saver.ranks.gather(left_out(captured.manifest.extra_state)) if text]
        if left:
            warn_once(f"export(): {left[0]}. Remedy, where it is needed: load_pretrained() of a checkpoint, which has it.")
        captured.parts = [part for part in captured.parts if part.set in (MODEL, MASTER)]
        if merge_adapter:
            self._merge(captured, dtype)
        else:
            self._choose(captured, dtype)
        target = Destination(path.parent, folder.check_tag(path.name), latest=False, prune=False, check=self.check_point)
        return self.saver.save(captured, target, asynchronous=False)

    def _choose(self, captured: Captured, dtype: torch.dtype | None) -> None:
        """Reduce ``captured`` to the adapters, in PEFT's format, or to the weights if there are no adapters. Collective."""
        ranks, rank = self.saver.ranks, self.subject.topology.rank
        adapters = find_adapters(self.inventory, ranks, compute=True)
        as_it_is = never_cast(self.expected)
        exported = (part if as_it_is(part.name) else _exported(part, dtype) for part in captured.parts)
        captured.parts = [part for part in exported if part is not None]
        if adapters is not None:
            captured.parts = list(adapters.parts(captured.parts, dtype, first=rank == 0))
            captured.small = adapters.files if rank == 0 else {}
        elif rank == 0:
            captured.small = _model_description(self.subject.module, dtype or self.run.compute_dtype)

    def _merge(self, captured: Captured, dtype: torch.dtype | None) -> None:
        """Replace what is in ``captured`` by the model with its adapters merged into it. Collective."""
        model = peft_model(self.subject.module)
        if not hasattr(model, "merge_and_unload"):
            kind = type(self.subject.module).__name__
            what = "no adapters of PEFT" if model is None else "adapters, and no merge_and_unload()"
            more = ", and merge what PeftModel.from_pretrained() makes of the export, if such adapters can be merged"
            raise CheckpointError(
                f"merge_adapter = True: a {kind} has {what}. Remedy: leave it out{more if model is not None else ''}."
            )
        merged, problem = attempt(lambda: Merged(model, self.inventory, dtype))
        self.saver.ranks.agree(problem)
        assert merged is not None
        parts = merged.parts(captured.parts)
        captured.parts = [changed for part in parts if (changed := _exported(part, dtype)) is not None]
        captured.order = list(merged.named())
        if self.subject.topology.rank == 0:
            captured.small = _model_description(merged.model, dtype or self.run.compute_dtype)

    def _compare_with_beginning(self) -> None:
        """Raise CheckpointError if the model no longer has the parameters that it had when the engine was created.

        Raises ModelError or ReleasedParameterError if a script has given them values that would not be saved.
        """
        self.subject.model.make_ready()
        self.subject.model.runtime.guard.refuse_replaced()
        self.subject.model.runtime.guard.refuse_edits(surely=True)
        found = self.inventory.describe()
        changed = {name for name in {**found, **self.expected} if found.get(name) != self.expected.get(name)}
        changed |= set(self.inventory.replaced())
        if changed:
            raise CheckpointError(
                f"the model has changed since initialize(): {listed(sorted(changed))}. What is new is neither trained "
                "nor saved. Nothing was written. Remedy: make a new engine after changing parameters."
            )

    def _adapters_file(self) -> dict[str, bytes]:
        """The file that lets a checkpoint be exported in PEFT's format, by name; empty if the model has no adapters.

        It is made only once, because PEFT may look at the base model's repository.
        """
        if self._adapters is None:
            found = find_adapters(self.inventory, self.saver.ranks, compute=False)
            self._adapters = {ADAPTERS_FILE: found.to_bytes()} if found is not None else {}
        return self._adapters

    def capture(self, tag: str, client_state: dict[str, Any], *, trainable_only: bool, joined: bool = True) -> Captured:
        """What this rank has now. Tensors are where they are, not copied, but for parts in two tensors if ``joined``."""

        def look() -> tuple[Captured, Sums]:
            captured = self._capture_here(tag, client_state, trainable_only, joined)
            return captured, self._rank_buffers.sums(captured.buffers)

        found, problem = attempt(look)
        told = self.saver.ranks.gather_unless(problem, (found and found[1], bool(client_state)))
        self._rank_buffers.learn([sums or {} for sums, _ in told])
        assert found is not None
        captured = found[0]
        captured.parts += self._rank_buffers.parts(captured.buffers)
        if any(gives for _, gives in told[1:]):
            captured.client_state, tensors = encode_own(client_state, self.saver.ranks)
            captured.tensors |= tensors
        return captured

    def _capture_here(self, tag: str, client_state: dict[str, Any], trainable_only: bool, joined: bool) -> Captured:
        inventory, rank = self.inventory, self.subject.topology.rank
        parts = list(inventory.weights(frozen=not trainable_only))
        beside = inventory.beside()
        states, raw = inventory.optimizer_state()
        tensors: dict[str, torch.Tensor] = {}
        captured = Captured(
            parts=[*parts, *inventory.buffer_parts(beside.buffers), *states, *inventory.residuals()],
            order=[*inventory.describe(), *beside.buffers],
            scalars={k: {n: scalar(v, f"optimizer.{k}") for n, v in values.items()} for k, values in raw.items()},
            groups=inventory.groups(),
            manifest=self._manifest(tag, client_state, beside, tensors),
            rng=encode(random_state.capture(self.subject.comm.device), tensors, f"rng.{rank}"),
            data=self._data_state(tensors),
            frozen=list(inventory.frozen_weights()) if trainable_only else [],
            small=_model_description(self.subject.module, self.run.compute_dtype) if rank == 0 else {},
            buffers=beside.buffers,
        )
        captured.parts = [part.joined() for part in captured.parts] if joined else captured.parts
        captured.tensors = tensors
        return captured

    def _manifest(
        self, tag: str, client_state: dict[str, Any], beside: Beside, tensors: dict[str, torch.Tensor]
    ) -> Manifest:
        """This rank's share of the manifest.

        Rank 0 fills in everything it knows. The first rank of every other pipeline stage only describes its part of the
        model. The manifests of all other ranks are not used.
        """
        run, topology = self.run, self.subject.topology
        manifest = Manifest(tag, now(), run.counters(), versions())
        if leads_stage(topology):
            manifest.parameters, manifest.aliases = self.inventory.describe(), {**self.inventory.aliases, **beside.aliases}
            manifest.optimizer = self._describe_optimizer(tensors)
            manifest.extra_state = encode(beside.extra, tensors, "extra_state") if beside.extra else None
        if topology.rank != 0:
            return manifest
        dtype = str(run.compute_dtype or torch.float32).removeprefix("torch.")
        manifest.layout = {
            "world_size": topology.world_size,
            "stage": run.config.zero_optimization.stage,
            "shard": topology.shard,
            "replicate": topology.replicate,
            **{axis: size for axis in ("pipe", "tensor", "context", "expert") if (size := topology.size(axis)) > 1},
            "train_batch_size": run.train_batch_size(),
            "dtype": dtype,
        }
        if run.config.scales_loss:
            manifest.loss_scale = asdict(run.scaler)
        if _is_kept(run.lr_scheduler):
            manifest.scheduler = encode(run.lr_scheduler.state_dict(), tensors, "scheduler")
            manifest.scheduler_kind = _kind_of(run.lr_scheduler)
        manifest.client_state = encode(client_state, tensors, "client_state")
        return manifest

    def _describe_optimizer(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any] | None:
        """The optimizer's type and the hyperparameters of its groups; None if there is no optimizer."""
        if self.subject.optimizer is None:
            return None
        optimizer = self.subject.optimizer.optimizer
        groups = [{key: v for key, v in group.items() if key not in IMPLEMENTATION} for group in optimizer.param_groups]
        described = {
            "type": optimizer_kind(optimizer),
            "groups": encode(groups, tensors, "optimizer.groups"),
            "scalars": {},
        }
        for key, kept in (("apart", states_apart(optimizer.state)), ("more", more_of(optimizer))):
            if kept:
                described[key] = pack_values(kept)
        return described

    def _data_state(self, tensors: dict[str, torch.Tensor]) -> Any:
        if not hasattr(self.run.dataloader, "state_dict"):
            return None
        return encode(self.run.dataloader.state_dict(), tensors, f"data.{self.subject.topology.rank}")

    # -- loading -------------------------------------------------------------------------------------------------

    def load(
        self,
        directory: str | Path,
        tag: str | None,
        wanted: Wanted,
        beside: Callable[[int, str], Path | None] | None = None,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load ``tag``, or without a tag the newest checkpoint that is complete and undamaged.

        ``beside`` loads something else with at least so many steps, or what took the place of steps that had been saved by
        then, if there is any, and returns its path: it comes before checkpoints with as many. Return the path of what was
        loaded and its client state; (None, {}) if there is nothing.
        """
        self.wait()
        path, named = self._meet("load_checkpoint()", lambda: (directory_of(directory), tag_of(tag)))
        ranks = self.saver.ranks
        refuse_other(ranks, wanted, "load_checkpoint()")
        tags, are_checkpoints = zip(*ranks.gather((named, (path / MANIFEST).is_file())), strict=True)
        named = tags[0]  # rank 0's counts, as for saves
        if named is None and any(are_checkpoints):  # what save_checkpoint() has returned
            path, named = path.parent, path.name
        self.subject.model.make_ready()  # otherwise they would change what is loaded
        if named is not None:
            return self._load_one(path, named, wanted)
        failure: DamagedError | None = None
        for name in candidates(ranks, path):
            if beside is not None and (other := beside(*age_of(ranks, path, name))) is not None:
                return other, {}
            if failure is not None and is_rank_zero():
                logger.warning("%s Going back to checkpoint %s.", failure, name)
            try:
                return self._load_one(path, name, wanted)
            except DamagedError as error:
                failure = error
        if beside is not None and (other := beside(-1, "")) is not None:
            return other, {}
        if failure is not None:
            raise failure
        refuse_foreign(ranks, path)
        if is_rank_zero():
            what = "there is no checkpoint in" if path.is_dir() else "there is no directory"
            begun = self.run.counters()["global_steps"] > 0
            then = "the run goes on as it is" if begun else "training starts from the beginning"
            weights = any(path.glob("*.safetensors"))
            remedy = " What is there are weights alone: zerorun.load_pretrained(model, dir) reads them." if weights else ""
            logger.warning("%s %s: %s.%s", what, path, then, remedy)
        return None, {}

    def wait(self) -> None:
        """Wait until the last asynchronous save is over. Raises its CheckpointError if it failed."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait as ``wait`` does, then release the process group."""
        if self._saver is not None:
            try:
                self._saver.close()
            finally:
                self._saver = None

    def _load_one(self, directory: Path, tag: str, wanted: Wanted) -> tuple[Path, dict[str, Any]]:
        with open_on_all(self.saver.ranks, directory, tag) as reader:
            return reader.path, self.restore(reader, wanted)

    def restore(self, reader: Reader, wanted: Wanted) -> dict[str, Any]:
        """Load what ``reader`` has, and return the client state."""
        manifest, ranks = reader.manifest, self.saver.ranks
        assert manifest is not None
        loader = ModelLoader.compared(self.inventory, reader, wanted, ranks)
        ranks.agree(attempt(lambda: self._require(reader, wanted))[1])
        loader.compare_base(ranks, self.subject.comm.dense.peer_reader())
        tensors, given = reader.state_tensors(ranks), client_state_of(manifest, self.subject.topology)
        ranks.agree(attempt(lambda: self._refuse_strange_values(reader.path, manifest, given, tensors))[1])
        fits, problem = attempt(lambda: wanted.weights_only or self._position_fits(reader, wanted, tensors))
        fits = all(ranks.gather_unless(problem, fits))
        loads_schedule, problem = attempt(lambda: _loads_schedule(self.run.lr_scheduler, reader, wanted, tensors))
        ranks.agree(problem)
        prepared, trains = None, any(ranks.gather(self.subject.optimizer is not None))  # a stage may have nothing to train
        if wanted.optimizer and not wanted.weights_only and trains:
            prepared = loader.prepare_optimizer(ranks, tensors)
        lines, half_loaded = [], self.subject.model.half_loaded
        if prepared is not None:
            with half_loaded.loading(reader.path, "optimizer state"):
                goes_on = loads_schedule or (wanted.scheduler and not has_state(self.run.lr_scheduler))
                anew = None if goes_on else self.run.lr_scheduler
                lines.append(f"optimizer {loader.load_optimizer(prepared, ranks, anew)}")
        with half_loaded.loading(reader.path, "weights"):
            loader.load_weights(ranks)
            ranks.agree(attempt(lambda: loader.load_extra(tensors))[1])
        client_state = decode(given, tensors) or {}
        if wanted.weights_only:
            return client_state
        with half_loaded.loading(reader.path, "counters and schedule"):
            found, problem = attempt(
                lambda: _restore_counters(self.run, manifest, wanted, tensors, with_schedule=bool(loads_schedule))
            )
            ranks.agree(problem)
            lines += found or []
            if wanted.optimizer:
                lines += loader.load_residuals(ranks, self.subject.topology)
            found, problem = attempt(lambda: self._restore_position(manifest, wanted, tensors, with_data=bool(fits)))
            ranks.agree(problem)
            lines += found or []
        if is_rank_zero():
            logger.info(
                "loaded %s of step %d: weights, %s", reader.path, manifest.global_steps, ", ".join(lines) or "nothing else"
            )
        return client_state

    def _refuse_strange_values(
        self, path: Path, manifest: Manifest, client_state: Any, tensors: dict[str, torch.Tensor]
    ) -> None:
        """Raise CheckpointError, before anything is changed, if this rank cannot decode a value that it may need."""
        own = [states[self._place_in(manifest, states)] for states in (manifest.rng, manifest.data) if states]
        groups = manifest.optimizer["groups"] if manifest.optimizer else None
        for value in (manifest.scheduler, client_state, manifest.extra_state, groups, *own):
            try:
                decode(value, tensors)
            except CheckpointError as error:
                raise type(error)(f"{path}: {error}") from error

    def _require(self, reader: Reader, wanted: Wanted) -> None:
        """Raise CheckpointError if the checkpoint lacks a component that this run has, unless ``wanted`` allows that."""
        manifest, run = reader.manifest, self.run
        assert manifest is not None
        if wanted.weights_only:
            return
        components = {
            "scheduler": manifest.scheduler is None and wanted.scheduler and _is_kept(run.lr_scheduler),
            "data": hasattr(run.dataloader, "state_dict") and not self._has_position(manifest),
            "rng": wanted.random_numbers and manifest.rng is None,
        }
        missing = [name for name, lacking in components.items() if lacking and not wanted.allows(name)]
        if missing:
            raise CheckpointError(
                f"{reader.path} has no {', no '.join(missing)} state, and this run needs it to continue exactly. Remedy: "
                f"pass allow_missing={missing} if it may start from the beginning."
            )

    def _has_position(self, manifest: Manifest) -> bool:
        """True if the checkpoint has a position for the data loader of this run.

        The position of an ``EpochLoader`` suits any ranks, unless its dataset divides itself. Other loaders know that of
        their own rank only, so for them the ranks must be laid out as they were.
        """
        if manifest.data is None:
            return False
        loader = self.run.dataloader
        suits_any = isinstance(loader, EpochLoader) and not loader.is_state_of_rank
        return suits_any or is_by_rank(self.subject.topology, manifest.layout, len(manifest.data))

    def _position_fits(self, reader: Reader, wanted: Wanted, tensors: dict[str, torch.Tensor]) -> bool:
        """False if the data begins anew, because the loader cannot go on, and ``wanted`` allows that.

        Otherwise raises CheckpointError. Only loaders of our own can tell before anything is changed.
        """
        manifest, loader = reader.manifest, self.run.dataloader
        if manifest is None or not isinstance(loader, EpochLoader) or not self._has_position(manifest):
            return True
        try:
            loader.check_state(decode(manifest.data[self._place_in(manifest, manifest.data)], tensors))
        except CheckpointError as error:
            if not wanted.allows("data"):
                raise CheckpointError(f"{reader.path}: {error}") from error
            if is_rank_zero():
                logger.warning("%s: %s It begins anew.", reader.path, str(error).partition(" Remedy")[0])
            return False
        return True

    def _place_in(self, manifest: Manifest, states: Sequence[Any]) -> int:
        """The index of this rank's state in ``states``, one per rank that saved; 0 if the ranks were laid out otherwise."""
        return self.subject.topology.rank if is_by_rank(self.subject.topology, manifest.layout, len(states)) else 0

    def _restore_position(
        self, manifest: Manifest, wanted: Wanted, tensors: dict[str, torch.Tensor], *, with_data: bool
    ) -> list[str]:
        """Restore the position in the data and, if they are wanted and the ranks are laid out as they were, random numbers.

        Return what was restored, in words.
        """
        topology, lines = self.subject.topology, []
        if with_data and hasattr(self.run.dataloader, "load_state_dict") and self._has_position(manifest):
            own = manifest.data[self._place_in(manifest, manifest.data)]
            self.run.dataloader.load_state_dict(decode(own, tensors))
            self.data_moves += 1
            lines.append("position in the data")
        if manifest.rng is None or not wanted.random_numbers:
            return lines
        if is_by_rank(topology, manifest.layout, len(manifest.rng)):
            random_state.restore(decode(manifest.rng[topology.rank], tensors), self.subject.comm.device)
            lines.append("random numbers")
        elif is_rank_zero():
            logger.info("random numbers begin afresh: there were %d ranks, or other parallel degrees.", len(manifest.rng))
        return lines


def _loads_schedule(schedule: Any, reader: Reader, wanted: Wanted, tensors: dict[str, torch.Tensor]) -> bool:
    """True if ``schedule`` goes on from the checkpoint. Raises CheckpointError if that has one of another kind.

    Schedules take any state, and some would begin anew with it. If ``wanted`` allows that, this one does.
    """
    manifest, asked = reader.manifest, wanted.scheduler and not wanted.weights_only
    if manifest is None or manifest.scheduler is None or not asked or not _is_kept(schedule):
        return False
    stored, live = (_public(state) for state in (decode(manifest.scheduler, tensors), schedule.state_dict()))
    kinds = manifest.scheduler_kind, _kind_of(schedule)
    differ = None not in kinds and kinds[0] != kinds[1]
    if not differ and (stored <= live or live <= stored):  # one version of a schedule may have more than another
        return True
    that = f"that of {kinds[0]}" if differ else ""
    has = f"it has {listed(sorted(stored - live))}, and lacks {listed(sorted(live - stored))}"
    what = (
        f"{reader.path} has the state of another kind of schedule than this run's {type(schedule).__name__}: {that or has}."
    )
    if not wanted.allows("scheduler"):
        raise CheckpointError(
            f"{what} Remedy: use the same schedule, or pass load_scheduler=False if it may start from the beginning."
        )
    if is_rank_zero():
        logger.warning("%s It begins anew.", what)
    return False


def _is_kept(schedule: Any) -> bool:
    """True if there is a schedule, and checkpoints have its state. Tell of one that cannot be asked for it."""
    if schedule is not None and not has_state(schedule):
        warn_once(
            f"checkpoints have no state of lr_scheduler={type(schedule).__name__}, which has not both state_dict() and "
            "load_state_dict(): a run that goes on from one has the rates of then, and a schedule that begins anew. "
            "Remedy: give it both, or pass one of torch.optim.lr_scheduler."
        )
    return has_state(schedule)


def _kind_of(schedule: Any) -> str | None:
    """The class of a schedule of torch's, whose states have the same names for other meanings; None for others.

    zerorun's are formulas of the number of steps, so that any goes on where another one was. Scripts may rename theirs.
    """
    kind = type(schedule)
    return f"torch.{kind.__name__}" if kind.__module__.partition(".")[0] == "torch" else None


def _public(state: Any) -> set[str]:
    """The names in the state of a schedule, without private ones."""
    return {name for name in state if isinstance(name, str) and not name.startswith("_")}


def _restore_counters(
    run: TrainingRun, manifest: Manifest, wanted: Wanted, tensors: dict[str, torch.Tensor], *, with_schedule: bool
) -> list[str]:
    """Restore the counters, the schedule and the loss scale. Return what was restored beside the counters, in words."""
    lines = []
    run.set_counters({name: manifest.counters[name] for name in run.counters() if name in manifest.counters})
    _tell_of_batch(manifest.layout.get("train_batch_size"), run.train_batch_size())
    if with_schedule:
        run.lr_scheduler.load_state_dict(decode(manifest.scheduler, tensors))
        lines.append("schedule")
    if manifest.loss_scale is not None and run.config.scales_loss and wanted.optimizer:
        lines.append(run.scaler.go_on_from(manifest.loss_scale))
    return lines


def _tell_of_another(path: Path, saver: Saver) -> None:
    """Warn if ``saver`` replaces the checkpoint of another engine of this process, such as the other half of a GAN."""
    if _last_to_save.get(path, saver) is not saver:
        warn_once(
            f"{path}, which another engine of this script has saved, is replaced by this engine's. Remedy, if both are "
            "to stay: give each engine a directory of its own (checkpoint.keep_last counts all tags of one together)."
        )
    _last_to_save[path] = saver


def _tell_of_batch(saved: Any, own: int) -> None:
    """Warn if steps had ``saved`` samples and have ``own`` now: a script may have changed them, which no file says."""
    if isinstance(saved, int) and saved != own:
        warn_once(
            f"steps have {own} samples from here on (train_batch_size), and had {saved} in the run that was saved. Remedy, "
            f"if they are to have as many: engine.set_train_batch_size({saved}), or the configuration."
        )


def _exported(part: TensorPart, dtype: torch.dtype | None) -> TensorPart | None:
    """``part`` as an export has it: floating-point values in ``dtype``, or None: in the model's dtype; others unchanged.

    None for a master whose weights are among the parts themselves.
    """
    if part.set == MASTER and part.rounded is None:
        return None  # the weights are a part of their own
    if not part.dtype.is_floating_point:
        return part
    wanted = dtype or part.rounded or part.dtype
    if part.set == MODEL and wanted == part.dtype:
        return part
    return replace(part, set=CAST, rounded=wanted)


def _model_description(module: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """config.json and generation_config.json of a Hugging Face model, without which transformers cannot load the weights.

    Empty for any other model.
    """
    module = getattr(module, "whole_model", module)  # a pipeline stage has only some of its layers
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(module, "save_pretrained") or hasattr(module, "peft_config"):
        return {}
    described = {**config.to_dict(), "architectures": [type(module).__name__]}
    if dtype is not None:
        described["dtype"] = str(dtype).removeprefix("torch.")
    files = {"config.json": described}
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "to_dict"):
        files["generation_config.json"] = generation.to_dict()
    try:
        return {name: json.dumps(content, indent=2).encode() for name, content in files.items()}
    except TypeError:  # the configuration has values that only its own class can write
        return {"config.json": config.to_json_string().encode()} if hasattr(config, "to_json_string") else {}
