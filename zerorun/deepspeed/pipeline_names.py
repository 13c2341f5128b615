"""The pipeline engine with what scripts made for DeepSpeed ask of it and tell it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from ..engine.pipeline_engine import PipelineEngine
from ..errors import PipelineError
from .engine_module import ModuleEngine
from .mpu import PipelineParallelGrid


class PipelineModuleEngine(PipelineEngine, ModuleEngine):  # type: ignore[misc]  # see ModuleEngine
    """A PipelineEngine with DeepSpeed's attributes. It is a module, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_attention_mask = False
        self._micro_batches: int | None = None  # where a script has set another number than that of a step

    # -- places --------------------------------------------------------------------------------------------------

    @cached_property
    def grid(self) -> PipelineParallelGrid:
        """This rank's place among the stages and the ranks beside them."""
        return PipelineParallelGrid(self.topology)

    @property
    def mpu(self) -> PipelineParallelGrid:
        """The grid, by the name that it has where a script passes it on."""
        return self.grid

    @property
    def num_stages(self) -> int:
        return self.topology.pipe

    @property
    def stage_id(self) -> int:
        return self.topology.pipe_rank

    @property
    def is_pipe_parallel(self) -> bool:
        return self.topology.pipe > 1

    @property
    def is_data_parallel(self) -> bool:
        return self.topology.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        return self.topology.tensor > 1

    # -- micro-batches -------------------------------------------------------------------------------------------

    @property
    def micro_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu()

    @property
    def micro_batches(self) -> int:
        """How many micro-batches ``eval_batch`` takes: those of a step, unless a script has set it for an evaluation."""
        return self._micro_batches or self.gradient_accumulation_steps()

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        if count < 1:
            raise PipelineError(f"engine.micro_batches = {count}: a batch has at least one. Remedy: set a positive number.")
        self._micro_batches = None if count == self.gradient_accumulation_steps() else count

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train as ever. Raises PipelineError if ``micro_batches`` is another number than that of a step."""
        if self.micro_batches != self.gradient_accumulation_steps():
            raise PipelineError(
                f"engine.micro_batches = {self.micro_batches}, and a step has {self.gradient_accumulation_steps()} "
                "micro-batches: the number holds for eval_batch() only. Remedy: set it back after the evaluation; "
                "engine.set_train_batch_size() changes the number of a step."
            )
        return super().train_batch(data_iter)

    @property
    def _evaluated(self) -> int:
        return self.micro_batches

    def eval_batch(self, data_iter: Iterator[Any], return_logits: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ever. ``return_logits``: return (loss, the last stage's output for the last micro-batch, or None)."""
        found = super().eval_batch(data_iter, return_logits, *args, **kwargs)
        if not return_logits:
            return found
        loss, outputs = found
        return loss, outputs[-1] if outputs else None

    # -- what stages send one another ----------------------------------------------------------------------------

    def set_has_attention_mask(self, value: bool) -> None:
        """Keep ``value`` as ``has_attention_mask``. Stages send one another tensors of any dtype, as masks are."""
        self.has_attention_mask = value

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may differ from one micro-batch to the next."""
