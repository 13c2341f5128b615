"""Saving and loading of an engine: checkpoints, on request or automatic, exports, and whole weights.

Whole weights are what DeepSpeed's clients ask for: gathered on rank 0, or in a file of torch.save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

import torch

from ..checkpoint.argument_checks import directory_of, names_of, translate
from ..checkpoint.automatic import AutomaticSaves
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.directory import newest_first
from ..checkpoint.files import replace_file
from ..checkpoint.inventory import Subject
from ..checkpoint.matching import Wanted
from ..checkpoint.memory_copies import MemoryCopies
from ..checkpoint.ranks import attempt
from ..config.parse import Config
from ..distributed.agreement import agree
from ..errors import CheckpointError, StepError
from ..log import logger, warn_once
from ..plan.replaced_forwards import uncompiled
from ..watch.board import Phase, board, during
from ..zero.sharded_model import is_trained, without_edits
from ..zero.value_access import full_state_dict
from ..zero.whole_weight_loads import load_full_state_dict
from .accumulation import is_in_a_step
from .step_outcomes import Outcomes


class Saving(Outcomes):
    """The part of an engine that saves and loads checkpoints, exports weights, and gathers the whole model on one rank."""

    automatic_saves: AutomaticSaves | None

    @uncompiled
    @during(Phase.SAVE)
    def save_checkpoint(
        self,
        dir: str | Path = "",
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool = False,
        unfinished_step: bool = False,
        **others: Any,
    ) -> Path:
        """Save into ``dir/tag`` everything that the run needs to continue exactly, and return that path.

        All ranks must call it. ``tag``: ``global_step<n>`` by default. ``client_state``: numbers, strings, lists, dicts and
        tensors of the script; all ranks get that of rank 0 back, but a rank that gives another one gets its own.
        ``save_latest``: let ``dir/latest`` name this checkpoint. ``exclude_frozen_parameters``: save only the checksums of
        frozen parameters; the model that loads the checkpoint must have the same values. ``trainable_only`` is another name
        for this option, and ``save_dir`` for ``dir``. ``asynchronous``: return when this rank's part has been copied, and
        write it in the background (see ``wait_for_checkpoint``). ``unfinished_step``: save also in the middle of an
        accumulation, with a warning: weights and states are those after the last update, its gradients are left out, and
        the step goes on in this process.

        Raises CheckpointError on all ranks alike, naming the rank and the file; earlier checkpoints stay untouched.
        Raises StepError in the middle of an accumulation otherwise, because its gradients would be lost. Raises
        CheckpointError after ``destroy``, as ``load_checkpoint`` and ``export`` do.
        """
        self._refuse_given_back("save_checkpoint")
        named = translate(others, {"save_dir": "dir", "trainable_only": "trainable_only"}, "save_checkpoint")
        if unfinished_step:
            self._leave_out_unfinished_step()
        else:
            self._refuse_unfinished_step()
        self.refuse_failed()
        with without_edits(self.sharded_model):
            path = self.checkpointer.save(
                named.get("dir", dir),
                tag,
                client_state,
                trainable_only=named.get("trainable_only", exclude_frozen_parameters),
                asynchronous=asynchronous,
                latest=save_latest,
                keep=self.config.checkpoint.keep_last,
            )
        if self.automatic_saves is not None:
            self.automatic_saves.saved()
        return path

    @uncompiled
    @during(Phase.LOAD)
    def load_checkpoint(
        self,
        dir: str | Path = "",
        tag: str | None = None,
        *,
        strict: bool = True,
        load_optimizer: bool = True,
        load_scheduler: bool = True,
        load_random_numbers: bool = True,
        allow_missing: Sequence[str] = (),
        **deepspeed: Any,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load ``dir/tag`` and return (its path, the script's client_state). All ranks must call it.

        Works for any number of ranks, stage and precision. Without ``tag``, load the checkpoint that ``dir/latest`` names.
        If that one is incomplete or damaged, warn and load the newest that is neither; if there is none at all, warn and
        return (None, {}). ``strict``: the weights must have the same names as the model's. ``load_random_numbers``: set
        this process's generators, those of torch, NumPy and Python, as they were. ``allow_missing``: names or
        patterns of weights, or of "optimizer", "scheduler", "data", "rng", that may be missing; with "data", a position in
        other training data is left, with a warning. Parameters that are trained now, and were frozen, have no moments
        there: that must be allowed by name, too. DeepSpeed's keywords (``load_module_strict``, ``load_optimizer_states``,
        ``load_lr_scheduler_states``, ``load_module_only``, ``load_dir``) are understood.

        Raises CheckpointError on all ranks alike. Logs what was restored.
        """
        self._refuse_given_back("load_checkpoint")
        names = {
            "load_dir": "dir",
            "load_module_strict": "strict",
            "load_optimizer_states": "optimizer",
            "load_lr_scheduler_states": "scheduler",
            "load_module_only": "weights_only",
        }
        named = translate(deepspeed, names, "load_checkpoint")
        wanted = Wanted(
            strict=named.get("strict", strict),
            optimizer=named.get("optimizer", load_optimizer),
            scheduler=named.get("scheduler", load_scheduler),
            weights_only=named.get("weights_only", False),
            random_numbers=load_random_numbers,
            allow_missing=names_of(allow_missing),
        )
        found = self._load(lambda: self.checkpointer.load(named.get("dir", dir), tag, wanted))
        if found[0] is not None and self.memory_copies is not None:
            self.memory_copies.begin_anew()  # a start after a failure goes on from here, and from no step that is given up
        return found

    def _load(self, load: Callable[[], tuple[Path | None, dict[str, Any]]]) -> tuple[Path | None, dict[str, Any]]:
        self.settle()
        self.history.fail(None)
        self.zero_grad(counted=True)
        begun = monotonic_ns()
        with torch.inference_mode(mode=False):  # what is made in that mode could not be trained
            path, client_state = load()
        if path is not None:
            board.note_load(begun, self.global_steps)
        else:
            self.sharded_model.half_loaded.refuse()
        return path, client_state

    def resume(self, dir: str | Path | None = None) -> tuple[Path | None, dict[str, Any]]:
        """Call ``load_checkpoint`` without a tag. ``dir`` defaults to ``checkpoint.dir`` of the configuration."""
        return Saving.load_checkpoint(self, dir or self._directory or "")  # the DeepSpeed mode has one that differs

    @cached_property
    def _directory(self) -> Path | None:
        """``checkpoint.dir`` of the configuration, from the root as it is when the engine is made."""
        given = self.config.checkpoint.dir
        return None if given is None else Path(given).absolute()

    def wait_for_checkpoint(self) -> None:
        """Wait until no save is running in the background. Raises the save's CheckpointError if it failed."""
        self.checkpointer.wait()

    @uncompiled
    @during(Phase.SAVE)
    def export(self, dir: str | Path, dtype: torch.dtype | str | None = None, *, merge_adapter: bool = False) -> Path:
        """Write the full weights as safetensors into the directory ``dir``, with config.json for a Hugging Face model.

        For a model with PEFT adapters, write the adapters alone, as ``PeftModel.save_pretrained`` does, or with
        ``merge_adapter`` the model that ``merge_and_unload()`` returns. ``dtype`` is that of the floating-point tensors;
        None means the dtype in which the model computes. All ranks must call it. The export appears whole or not at all.
        Raises CheckpointError on all ranks alike.
        """
        self._refuse_given_back("export")
        self.refuse_failed()
        with without_edits(self.sharded_model):
            return self.checkpointer.export(dir, dtype, merge_adapter=merge_adapter)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """The setting ``zero_optimization.stage3_gather_16bit_weights_on_model_save``."""
        return bool(self.config.zero_optimization.gather_16bit_weights_on_model_save)

    @uncompiled
    @during(Phase.WHOLE_WEIGHTS)
    def consolidated_state_dict(
        self, *, exclude_frozen_parameters: bool = False, exact: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the full weights in CPU memory on rank 0, and None on other ranks, which keep nothing.

        All ranks must call it. The tensors have the dtype that the model computes in; with ``exact``, those that have fp32
        masters have their values. ``exclude_frozen_parameters``: leave out parameters that are not trained; buffers stay,
        and so do parameters that are frozen for now. ``state_dict()`` returns the weights on every rank instead.
        """
        is_first = self.topology.rank == 0
        if self.topology.pipe > 1:
            found = self.state_dict(exact=exact)
        else:
            found = full_state_dict(self.sharded_model, keep=is_first, exact=exact)
        if exclude_frozen_parameters:
            frozen = self._frozen_names()
            found = {name: value for name, value in found.items() if name not in frozen}
        return found if is_first else None

    @uncompiled
    @during(Phase.LOAD)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Set weights and buffers to full values, as ``state_dict()`` returns them. All ranks must call it with the same.

        Masters get the digits that values have and weights lack, as with ``state_dict(exact=True)``. Moments, counts and
        gradients stay: ``load_checkpoint`` loads everything. Nothing is sent, and no device has the whole model for it.
        Returns (names that only the model has, names that only ``state_dict`` has), as a module does; with ``strict``, such
        names are a CheckpointError. So are quantised weights with other scales; a value in another shape is a ModelError.
        Nothing is changed then.
        """
        self._refuse_given_back("load_state_dict")
        return load_full_state_dict(self.sharded_model, state_dict, strict=strict)

    def _frozen_names(self) -> set[str]:
        """The names of all parameters that are not trained. A stage of a pipeline knows its own, so ranks tell them.

        What is frozen for now alone, as adapters of peft are while another one is active, is trained.
        """
        named = self.module.named_parameters(remove_duplicate=False)
        own = [name for name, param in named if not param.requires_grad and not is_trained(param)]
        return {name for names in self.sharded_model.comm.control.values(own) for name in names}

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """``consolidated_state_dict`` by the name that trainers use."""
        return self.consolidated_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the full weights into ``save_dir``, by torch.save on rank 0, and return True. All ranks must call it.

        At stage 3 without ``stage3_gather_16bit_weights_on_model_save``, as in DeepSpeed, nothing is written: a warning
        says so, and the result is False. Raises CheckpointError on all ranks alike; a file of before is then as it was.
        ``export`` writes safetensors by parts, without all weights on one rank.
        """
        self.refuse_failed()
        if self.zero_optimization_stage() == 3 and not self.zero_gather_16bit_weights_on_model_save():
            warn_once(
                "save_16bit_model() wrote nothing: zero_optimization.stage3_gather_16bit_weights_on_model_save is false. "
                "Remedy: set it to true, or call engine.export(dir)."
            )
            return False
        path = agree(lambda: directory_of(save_dir) / save_filename, self.sharded_model.comm.control.values)
        found = self.consolidated_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, partial(torch.save, found))

        problem = attempt(write)[1] if found is not None else None
        for other in self.sharded_model.comm.control.values(problem):  # nobody reads the file before it is there
            if other is not None:
                raise CheckpointError(f"save_16bit_model() could not write its file. {other.text}")
        return True

    save_fp16_model = save_16bit_model

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """The engine's checkpointer, which remembers the model as it is when this property is first read."""
        return Checkpointer(Subject(self.module, self.sharded_model), self)  # type: ignore[arg-type]

    @cached_property
    def memory_copies(self) -> MemoryCopies | None:
        """The copies that ``checkpoint.in_memory`` asks for, if this job keeps them."""
        every_steps = self.config.checkpoint.in_memory.every_steps
        return MemoryCopies.make(Subject(self.module, self.sharded_model), self, every_steps)

    def begin_saving(self) -> None:
        """Start what the section ``checkpoint`` asks for: automatic saves, signal handling, and resuming."""
        section, directory, first = self.config.checkpoint, self._directory, self.sharded_model.comm.topology.rank == 0
        if self.automatic_saves is not None:
            self.automatic_saves.watch()
        if self._resume_by_itself():
            if self.memory_copies is not None:
                self.memory_copies.keep()  # as after any step: what was lost with a host has no second copy yet
        elif first and directory is not None and not section.auto_resume and (newest := newest_first(directory)):
            logger.info("%s has checkpoints; engine.resume() or checkpoint.auto_resume loads %s", section.dir, newest[0])

    @during(Phase.LOAD)
    def _resume_by_itself(self) -> bool:
        """Load what a start goes on from: the newest of the copies in memory and, where asked for, the checkpoints."""
        section, copies = self.config.checkpoint, self.memory_copies

        def from_memory(steps: int, saved_at: str) -> Path | None:
            return None if copies is None else copies.load(Wanted(), steps, saved_at)

        if section.auto_resume and (directory := self._directory) is not None:
            return self._load(lambda: self.checkpointer.load(directory, None, Wanted(), from_memory))[0] is not None
        return copies is not None and self._load(lambda: (from_memory(-1, ""), {}))[0] is not None

    def end_saving(self) -> None:
        """Wait for a save in the background, and end automatic saves and signal handling."""
        self.checkpointer.close()
        if self.memory_copies is not None:
            self.memory_copies.close()
        if self.automatic_saves is not None:
            self.automatic_saves.unwatch()
        self.automatic_saves = None

    def forget_saved(self) -> None:
        """Forget the model that was saved: the module has it now."""
        self.checkpointer.inventory.forget()
        if self.memory_copies is not None:
            self.memory_copies.checkpointer.inventory.forget()

    def _refuse_given_back(self, function: str) -> None:
        """Raise CheckpointError if it has no weights any more: it would save those that it had, and load nothing."""
        if not self.sharded_model.units:
            raise CheckpointError(
                f"{function}() of an engine that has given its module back, by destroy() or to another engine: it has no "
                "weights any more. Nothing was read or written. Remedy: call it before destroy(), or call that of the "
                "engine that has the module now; without one, use module.state_dict() and module.load_state_dict()."
            )

    def _leave_out_unfinished_step(self) -> None:
        self.sharded_model.finish_reductions()  # which write what coding leaves out, a part of the checkpoint
        if is_in_a_step(self.accumulation):
            warn_once(
                "save_checkpoint() in the middle of a step: gradients of the micro-batches since the last update are not "
                "in the checkpoint, and a run that goes on from it begins this step anew; the engine's own data loader "
                "goes on after them. Here the step goes on. Remedy, if they should count there: save after a step() that "
                "updates the weights."
            )

    def _refuse_unfinished_step(self) -> None:
        if is_in_a_step(self.accumulation):
            never = " step() has not been called yet." if self.accumulation.micro_steps == 0 else ""
            raise StepError(
                f"save_checkpoint() in the middle of a step: gradients of {self.accumulation.backwards} micro-batches "
                f"would be lost.{never} Remedy: call it after a step() that updates the weights "
                "(is_gradient_accumulation_boundary() before it), or pass unfinished_step=True, as at the end of an epoch "
                "whose micro-batches do not fill the last step: their gradients are left out of the file."
            )

    def _save_if_due(self, saves: AutomaticSaves, told_to_end: int, due: int) -> None:
        if told_to_end:
            self.save_checkpoint(saves.directory)
            if saves.ends_job():
                self.automatic_saves = None
                saves.end()
        elif due or saves.due(self.global_steps):
            self.save_checkpoint(saves.directory, asynchronous=saves.asynchronous)


def automatic_saves_of(config: Config, *, first: bool) -> AutomaticSaves | None:
    """Return the automatic saves that ``config`` asks for, or None. ``first``: the clock of this rank decides for all."""
    section = config.checkpoint
    if section.dir is None or not (section.every_steps or section.every_minutes or section.on_signal):
        return None
    given = (section.every_steps, section.every_minutes, section.on_signal, section.asynchronous)
    return AutomaticSaves(Path(section.dir).absolute(), *given, first)
