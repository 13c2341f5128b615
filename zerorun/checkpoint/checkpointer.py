"""Checkpointer: what an engine can do with checkpoints. Captures its state, saves, loads, and chooses what to load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ..dataloader import EpochLoader
from ..errors import CheckpointError, DamagedError, ZerorunError
from ..log import is_rank_zero, logger
from ..precision import LossScaler
from . import directory as folder
from . import random_state
from .inventory import Inventory, Part, Subject
from .load import IMPLEMENTATION, ModelLoader, Wanted, optimizer_kind
from .manifest import Manifest, never_cast
from .plain import decode, encode
from .plan import CAST, MASTER, MODEL
from .ranks import Ranks, attempt, leads_stage, speaking_up
from .read import Reader, candidates, open_on_all
from .save import Captured, Saver, now, scalar, versions
from .write import Target

_SCALER_STATE = ("scale", "hysteresis_left", "steps", "last_overflow")


class Run(Protocol):
    """The training run around the model: the engine."""

    module: torch.nn.Module
    config: Any
    scaler: LossScaler
    lr_scheduler: Any
    dataloader: Any
    compute_dtype: torch.dtype | None

    def counters(self) -> dict[str, int]: ...

    def set_counters(self, counters: dict[str, int]) -> None: ...


class Checkpointer:
    """Checkpoints of one engine. All public methods are collective."""

    def __init__(self, subject: Subject, run: Run) -> None:
        self.subject, self.run = subject, run
        self.inventory = Inventory.of(subject)
        self.expected = self.inventory.describe()  # as the model was when the engine was made
        self._saver: Saver | None = None
        self.check_point: Callable[[str], None] = lambda point: None  # tests interrupt a save here

    @property
    def saver(self) -> Saver:
        """Made, with a process group of its own, when it is needed first."""
        if self._saver is None:
            try:
                self.subject.comm.barrier()  # it notices a rank that has ended; making a group would wait for it
            except ZerorunError as error:
                raise CheckpointError(f"not all ranks came to save or load: {error}") from error
            self._saver = Saver(Ranks(self.subject.topology), self.subject.comm.peer_reader())
        return self._saver

    def _meet(self, what: str) -> Ranks:
        """Wait until all ranks have called ``what``."""
        with speaking_up(self.subject.topology.rank, what):  # making the saver waits for the others as well
            ranks = self.saver.ranks
            ranks.gather(None)
        return ranks

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
        """Save into ``directory/tag``. The path of the checkpoint."""
        self.wait()
        self._meet("save_checkpoint()")
        wanted = tag if tag is not None else f"global_step{self.run.counters()['global_steps']}"
        target = Target(_directory(directory), folder.check_tag(str(wanted)), latest, keep, check=self.check_point)
        if not asynchronous:
            self.subject.comm.quiesce()
        captured = self._capture(target.tag, client_state or {}, trainable_only=trainable_only)
        captured.manifest.becomes_latest = latest
        path = self.saver.save(captured, target, asynchronous=asynchronous)
        if is_rank_zero():
            logger.info("checkpoint %s %s", path, "is being written" if asynchronous else "is saved")
        return path

    def export(self, directory: str | Path, dtype: torch.dtype | None) -> Path:
        """Write the weights alone, for Hugging Face and others, as the new directory ``directory``."""
        self.wait()
        path = _directory(directory)
        self._meet("export()")
        self.saver.ranks.agree(attempt(self._compare_with_beginning)[1])
        self.subject.comm.quiesce()
        captured = self._capture(path.name, {}, trainable_only=False)
        captured.weights_only = True
        kept = [part for part in captured.parts if part.set in (MODEL, MASTER)]
        as_it_is = never_cast(self.expected)
        exported = (part if as_it_is(part.name) else _exported(part, dtype) for part in kept)
        captured.parts = [part for part in exported if part is not None]
        if self.subject.topology.rank == 0:
            captured.small = _model_description(self.subject.module, dtype or self.run.compute_dtype)
        target = Target(path.parent, folder.check_tag(path.name), latest=False, prune=False, check=self.check_point)
        return self.saver.save(captured, target, asynchronous=False)

    def _compare_with_beginning(self) -> None:
        """Raise CheckpointError if the model has not the tensors any more that it had when the engine was made."""
        found = self.inventory.describe()
        if found != self.expected:
            changed = sorted({name for name in {**found, **self.expected} if found.get(name) != self.expected.get(name)})
            raise CheckpointError(
                f"the model has changed since initialize(): {', '.join(changed[:5])}. Nothing was written. Remedy: make a "
                "new engine after changing parameters."
            )

    def _capture(self, tag: str, client_state: dict[str, Any], *, trainable_only: bool) -> Captured:
        captured, problem = attempt(lambda: self._capture_here(tag, client_state, trainable_only))
        self.saver.ranks.agree(problem)
        assert captured is not None
        return captured

    def _capture_here(self, tag: str, client_state: dict[str, Any], trainable_only: bool) -> Captured:
        inventory, rank = self.inventory, self.subject.topology.rank
        parts = list(inventory.weights(frozen=not trainable_only))
        named = {part.name for part in parts}
        frozen = [part for part in inventory.weights() if part.name not in named] if trainable_only else []
        buffers, extra = inventory.buffers()
        states, raw = inventory.optimizer_state()
        tensors: dict[str, torch.Tensor] = {}
        captured = Captured(
            parts=[*parts, *inventory.buffer_parts(buffers), *states],
            order=[*inventory.describe(), *buffers],
            scalars={k: {n: scalar(v, f"optimizer.{k}") for n, v in values.items()} for k, values in raw.items()},
            groups=inventory.groups(),
            manifest=self._manifest(tag, client_state, extra, tensors),
            rng=encode(random_state.capture(self.subject.comm.device), tensors, f"rng.{rank}"),
            data=self._data_state(tensors),
            frozen=frozen,
            small=_model_description(self.subject.module, self.run.compute_dtype) if rank == 0 else {},
        )
        captured.tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        return captured

    def _manifest(
        self, tag: str, client_state: dict[str, Any], extra: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> Manifest:
        """What rank 0 knows, and the first rank of every other stage of its part of the model; others' are not used."""
        run, topology = self.run, self.subject.topology
        manifest = Manifest(tag, now(), run.counters(), versions())
        if leads_stage(topology):
            manifest.parameters, manifest.aliases = self.inventory.describe(), dict(self.inventory.aliases)
            manifest.optimizer = self._describe_optimizer(tensors)
            manifest.extra_state = encode(extra, tensors, "extra_state") if extra else None
        if topology.rank != 0:
            return manifest
        dtype = str(run.compute_dtype or torch.float32).removeprefix("torch.")
        manifest.layout = {
            "world_size": topology.world_size,
            "stage": run.config.zero_optimization.stage,
            "shard": topology.shard,
            "replicate": topology.replicate,
            **{axis: topology.size(axis) for axis in ("pipe", "tensor") if topology.size(axis) > 1},
            "dtype": dtype,
        }
        if run.compute_dtype == torch.float16:
            manifest.loss_scale = asdict(run.scaler)
        if run.lr_scheduler is not None:
            manifest.scheduler = encode(run.lr_scheduler.state_dict(), tensors, "scheduler")
        manifest.client_state = encode(client_state, tensors, "client_state")
        return manifest

    def _describe_optimizer(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any] | None:
        """Its type and the hyperparameters of its groups."""
        if self.subject.sharded is None:
            return None
        optimizer = self.subject.sharded.optimizer
        groups = [{key: v for key, v in group.items() if key not in IMPLEMENTATION} for group in optimizer.param_groups]
        return {"type": optimizer_kind(optimizer), "groups": encode(groups, tensors, "optimizer.groups"), "scalars": {}}

    def _data_state(self, tensors: dict[str, torch.Tensor]) -> Any:
        if not hasattr(self.run.dataloader, "state_dict"):
            return None
        return encode(self.run.dataloader.state_dict(), tensors, f"data.{self.subject.topology.rank}")

    # -- loading -------------------------------------------------------------------------------------------------

    def load(self, directory: str | Path, tag: str | None, wanted: Wanted) -> tuple[Path | None, dict[str, Any]]:
        """Load ``tag``, or the newest checkpoint that is complete and undamaged. (None, {}) if there is none at all."""
        self.wait()
        path, ranks = _directory(directory), self._meet("load_checkpoint()")
        self.subject.runtime.finish_updates()  # else they would change what is loaded
        if tag is not None:
            return self._load_one(path, folder.check_tag(str(tag)), wanted)
        names = candidates(ranks, path)
        for index, name in enumerate(names):
            try:
                return self._load_one(path, name, wanted)
            except DamagedError as error:
                if index + 1 == len(names):
                    raise
                if is_rank_zero():
                    logger.warning("%s Going back to checkpoint %s.", error, names[index + 1])
        if is_rank_zero():
            what = "there is no checkpoint in" if path.is_dir() else "there is no directory"
            logger.warning("%s %s: training begins afresh.", what, path)
        return None, {}

    def wait(self) -> None:
        """Return when the last asynchronous save is over; raises its CheckpointError."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Wait as ``wait`` does, and give back the process group."""
        if self._saver is not None:
            try:
                self._saver.close()
            finally:
                self._saver = None

    def _load_one(self, directory: Path, tag: str, wanted: Wanted) -> tuple[Path, dict[str, Any]]:
        with open_on_all(self.saver.ranks, directory, tag) as reader:
            return reader.path, self._restore(reader, wanted)

    def _restore(self, reader: Reader, wanted: Wanted) -> dict[str, Any]:
        manifest, ranks, run = reader.manifest, self.saver.ranks, self.run
        assert manifest is not None
        loader = ModelLoader.compared(self.inventory, reader, wanted, ranks)
        ranks.agree(attempt(lambda: self._require(reader, wanted))[1])
        loader.compare_base(ranks, self.subject.comm.peer_reader())
        tensors = reader.state_tensors(ranks)
        lines = []
        trains = any(ranks.gather(self.subject.sharded is not None))  # a pipeline stage may have nothing to train
        if wanted.optimizer and not wanted.weights_only and trains:
            lines.append("optimizer " + loader.load_optimizer(ranks, tensors))
        loader.load_weights(ranks)
        loader.load_extra(tensors)
        if wanted.weights_only:
            return {}
        run.set_counters(manifest.counters)
        if wanted.scheduler and run.lr_scheduler is not None and manifest.scheduler is not None:
            run.lr_scheduler.load_state_dict(decode(manifest.scheduler, tensors))
            lines.append("schedule")
        if manifest.loss_scale is not None and run.compute_dtype == torch.float16 and wanted.optimizer:
            for key in _SCALER_STATE:
                setattr(run.scaler, key, manifest.loss_scale[key])
            lines.append(f"loss scale {run.scaler.scale:g}")
        lines += self._restore_position(manifest, tensors)
        if is_rank_zero():
            logger.info(
                "loaded %s of step %d: weights, %s", reader.path, manifest.global_steps, ", ".join(lines) or "nothing else"
            )
        return decode(manifest.client_state, tensors) or {}

    def _require(self, reader: Reader, wanted: Wanted) -> None:
        """Raise CheckpointError for a component that this run has and the checkpoint has not."""
        manifest, run = reader.manifest, self.run
        assert manifest is not None
        if wanted.weights_only:
            return
        components = {
            "scheduler": run.lr_scheduler is not None and wanted.scheduler and manifest.scheduler is None,
            "data": hasattr(run.dataloader, "state_dict") and not self._has_position(manifest),
            "rng": manifest.rng is None,
        }
        missing = [name for name, lacking in components.items() if lacking and not wanted.allows(name)]
        if missing:
            raise CheckpointError(
                f"{reader.path} has no {', no '.join(missing)} state, and this run needs it to go on exactly. Remedy: pass "
                f"allow_missing={missing} if it may begin afresh."
            )

    def _has_position(self, manifest: Manifest) -> bool:
        """True if the checkpoint says where the data loader was. Loaders of others know that for their own rank only."""
        if manifest.data is None:
            return False
        return isinstance(self.run.dataloader, EpochLoader) or self._is_by_rank(manifest, manifest.data)

    def _is_by_rank(self, manifest: Manifest, states: Sequence[Any]) -> bool:
        """True if ``states`` has one for each rank, and ranks have the places that they had."""
        topology, saved = self.subject.topology, manifest.layout
        same = (saved.get("pipe", 1), saved.get("tensor", 1)) == (topology.pipe, topology.tensor)
        return same and len(states) == topology.world_size

    def _restore_position(self, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> list[str]:
        """The position in the data, and the random numbers: rank by rank if there are as many ranks as there were."""
        topology, lines = self.subject.topology, []
        if manifest.data is not None and hasattr(self.run.dataloader, "load_state_dict"):
            states: Sequence[Any] = manifest.data
            own = states[topology.rank] if self._is_by_rank(manifest, states) else states[0]
            self.run.dataloader.load_state_dict(decode(own, tensors))
            lines.append("position in the data")
        if manifest.rng is not None and self._is_by_rank(manifest, manifest.rng):
            random_state.restore(decode(manifest.rng[topology.rank], tensors), self.subject.comm.device)
            lines.append("random numbers")
        elif manifest.rng is not None and is_rank_zero():
            logger.info("random numbers begin afresh: there were %d ranks, or other parallel degrees.", len(manifest.rng))
        return lines


def _exported(part: Part, dtype: torch.dtype | None) -> Part | None:
    """``part`` as an export has it: weights in ``dtype``, or in that of the model; whatever is no float as it is."""
    if part.set == MASTER and part.rounded is None:
        return None  # the weights are there as well
    if not part.tensor.is_floating_point():
        return part
    wanted = dtype or part.rounded or part.tensor.dtype
    if part.set == MODEL and wanted == part.tensor.dtype:
        return part
    return replace(part, set=CAST, rounded=wanted)


def translate(given: dict[str, Any], names: dict[str, str], function: str) -> dict[str, Any]:
    """DeepSpeed's keywords by the names here. Raises TypeError for what neither knows."""
    for key in given:
        if key not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {key!r}")
    return {names[key]: value for key, value in given.items()}


def _directory(directory: str | Path) -> Path:
    if not str(directory):
        raise CheckpointError("directory = '': checkpoints need a directory. Remedy: pass one, such as 'checkpoints'.")
    return Path(directory)


def _model_description(module: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """config.json and generation_config.json of a Hugging Face model, which make its weights loadable there."""
    module = getattr(module, "whole_model", module)  # of which a pipeline stage has some layers
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
    except TypeError:  # a configuration with values that its own class has to write
        return {"config.json": config.to_json_string().encode()} if hasattr(config, "to_json_string") else {}
