"""What an engine saves and loads: checkpoints, asked for or by themselves, and exports."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.automatic import AutomaticSaves
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.directory import newest_first
from ..checkpoint.inventory import Subject
from ..checkpoint.load import Wanted
from ..checkpoint.requests import translate
from ..config.parse import Config
from ..errors import StepError
from ..log import logger
from .outcomes import Outcomes


class Saving(Outcomes):
    """The part of an engine that has to do with checkpoints."""

    automatic_saves: AutomaticSaves | None

    def save_checkpoint(
        self,
        dir: str | Path = "",
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool = False,
        **others: Any,
    ) -> Path:
        """Save everything that the run needs to go on exactly, into ``dir/tag``; returns that path. All ranks must call it.

        ``tag``: ``global_step<n>`` by default. ``client_state``: numbers, strings, lists, dicts and tensors of the script.
        ``save_latest``: let ``dir/latest`` name it. ``exclude_frozen_parameters``: leave them out and keep their checksums;
        the model that loads it must have them. ``trainable_only`` is another name for it, and ``save_dir`` for ``dir``.
        ``asynchronous``: return when this rank's part is copied, and write it in the background (``wait_for_checkpoint``).

        Raises CheckpointError on all ranks alike, naming the rank and the file, with the checkpoints before untouched;
        StepError in the middle of an accumulation, whose gradients would be lost.
        """
        named = translate(others, {"save_dir": "dir", "trainable_only": "trainable_only"}, "save_checkpoint")
        self._refuse_unfinished_step()
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

    def load_checkpoint(
        self,
        dir: str | Path = "",
        tag: str | None = None,
        *,
        strict: bool = True,
        load_optimizer: bool = True,
        load_scheduler: bool = True,
        allow_missing: Sequence[str] = (),
        **deepspeed: Any,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load ``dir/tag`` and return (its path, the script's client_state). All ranks must call it.

        Works at any number of ranks, stage and precision. Without ``tag``: what ``dir/latest`` names, or if that is not
        complete or damaged, with a warning, the newest that is; (None, {}) with a warning if there is none.
        ``strict``: the names of the weights must be those of the model. ``allow_missing``: names or patterns of weights,
        or of "optimizer", "scheduler", "data", "rng", that may be missing. DeepSpeed's keywords (``load_module_strict``,
        ``load_optimizer_states``, ``load_lr_scheduler_states``, ``load_module_only``, ``load_dir``) are understood.

        Raises CheckpointError on all ranks alike. What was restored is logged.
        """
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
            allow_missing=(allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing),
        )
        self.zero_grad()
        return self.checkpointer.load(named.get("dir", dir), tag, wanted)

    def resume(self, dir: str | Path | None = None) -> tuple[Path | None, dict[str, Any]]:
        """``load_checkpoint`` of the newest in ``dir`` (default: ``checkpoint.dir`` of the configuration)."""
        return self.load_checkpoint(dir or self.config.checkpoint.dir or "")

    def wait_for_checkpoint(self) -> None:
        """Return when no save is going on in the background; raises its CheckpointError if it failed."""
        self.checkpointer.wait()

    def export(self, dir: str | Path, dtype: torch.dtype | str | None = None, *, merge_adapter: bool = False) -> Path:
        """Write the weights, whole, as safetensors (and config.json of a Hugging Face model) into the directory ``dir``.

        Of a model with adapters of PEFT: the adapters alone, as ``PeftModel.save_pretrained`` does; with ``merge_adapter``
        the model that ``merge_and_unload()`` makes of it. ``dtype``: of floating tensors; None: as the model computes. All
        ranks must call it. Appears whole or not at all. Raises CheckpointError on all ranks alike.
        """
        return self.checkpointer.export(dir, dtype, merge_adapter=merge_adapter)

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """It remembers the model as it is when this is asked first."""
        return Checkpointer(Subject(self.module, self.sharded_model), self)  # type: ignore[arg-type]

    def begin_saving(self) -> None:
        """What the section ``checkpoint`` asks for: saves and signals from now on, and the newest checkpoint loaded."""
        section, first = self.config.checkpoint, self.sharded_model.comm.topology.rank == 0
        if self.automatic_saves is not None:
            self.automatic_saves.watch()
        if section.dir is None:
            return
        if section.auto_resume:
            self.resume()
        elif first and (newest := newest_first(Path(section.dir))[:1]):
            logger.info("%s has checkpoints; engine.resume() or checkpoint.auto_resume loads %s", section.dir, newest[0])

    def end_saving(self) -> None:
        """No save follows."""
        self.checkpointer.close()
        if self.automatic_saves is not None:
            self.automatic_saves.unwatch()
        self.automatic_saves = None

    def _refuse_unfinished_step(self) -> None:
        if self.accumulation.backwards:
            raise StepError(
                f"save_checkpoint() in the middle of a step: gradients of {self.accumulation.backwards} micro-batches "
                "would be lost. Remedy: call it after a step() that updates the weights "
                "(is_gradient_accumulation_boundary() before it)."
            )

    def _save_if_due(self, saves: AutomaticSaves, told_to_end: int, due: int) -> None:
        if told_to_end:
            self.save_checkpoint(saves.directory)
            self.automatic_saves = None
            saves.end()
        elif due or saves.due(self.global_steps):
            self.save_checkpoint(saves.directory, asynchronous=saves.asynchronous)


def automatic_saves_of(config: Config, *, first: bool) -> AutomaticSaves | None:
    """Those that ``config`` asks for. ``first``: this rank speaks for all."""
    section = config.checkpoint
    if section.dir is None or not (section.every_steps or section.every_minutes or section.on_signal):
        return None
    given = (section.every_steps, section.every_minutes, section.on_signal, section.asynchronous)
    return AutomaticSaves(Path(section.dir), *given, first)
