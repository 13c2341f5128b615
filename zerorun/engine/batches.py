"""Batches: the sizes that a step has, which a training loop may change between steps, and the data loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config.batch import resolve_batch
from ..config.parse import Config
from ..data import EpochLoader
from ..distributed.topology import Topology
from ..errors import ConfigError, ConfigProblem, StepError
from .accumulation import Accumulation, is_in_a_step


class Batches:
    """The part of an engine that knows the sizes of a batch, and where its data comes from."""

    config: Config
    topology: Topology
    accumulation: Accumulation
    dataloader: EpochLoader | Any

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.accumulation.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one data-parallel rank."""
        return self.accumulation.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accumulation.batch.accumulation

    def managed_gradient_accumulation(self) -> bool:
        """True if step() counts micro-batches, and False if each step() updates the weights."""
        return self.config.managed_gradient_accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step, samples per forward on one rank, micro-batches per step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Let later steps have ``train_batch_size`` samples, by other numbers of micro-batches. All ranks must call it.

        Raises ConfigError if micro-batches of all ranks do not fit it, and StepError in the middle of a step.
        """
        self._resize(train_batch_size, self.train_micro_batch_size_per_gpu(), None)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Let later micro-batches have ``micro_batch_size`` samples, and steps as many micro-batches as before.

        The loop, or the loader that it makes, has to cut its data so: a loader that there is stays as it is. All ranks must
        call it. Raises ConfigError for a number below 1, and StepError in the middle of a step.
        """
        self._resize(None, micro_batch_size, self.gradient_accumulation_steps())

    def _resize(self, train: int | None, micro: int, accumulation: int | None) -> None:
        if is_in_a_step(self.accumulation):
            raise StepError(
                f"batch sizes were changed after {self.accumulation.backwards} backwards of a step. Remedy: change them "
                "after the step() that updates the weights."
            )
        batch = resolve_batch(train, micro, accumulation, self.topology.data_parallel_size)
        self.settle()  # the samples of the last step are counted in its own size
        self.accumulation.resize(batch)

    # -- data ----------------------------------------------------------------------------------------------------

    @property
    def training_dataloader(self) -> EpochLoader | Any:
        """The data loader that ``initialize`` made, or was given; None without training data."""
        return self.dataloader

    def set_dataloader(self, loader: Any) -> None:
        """Let the engine have this data loader. If it has a ``state_dict``, checkpoints save its position."""
        self.dataloader = loader

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> EpochLoader:
        """Return a loader of this rank's samples of ``dataset``, as ``initialize(training_data=...)`` makes one.

        ``batch_size``: samples of one micro-batch, as configured by default. ``route`` and ``pin_memory`` have no effect.
        Raises ConfigError for a ``data_sampler``.
        """
        if data_sampler is not None:
            reason = "a sampler of the script's own would have to divide samples between ranks, and to be resumable."
            remedy = "Make a DataLoader with it, and pass that to engine.set_dataloader()."
            raise ConfigError([ConfigProblem("data_sampler", data_sampler, reason, remedy)], "deepspeed_io()")
        config = self.config
        return EpochLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            self.topology,
            collate_fn=collate_fn,
            shuffle=config.dataloader.shuffle,
            drop_last=config.dataloader_drop_last,
            seed=config.seed or 0,
            num_workers=config.dataloader.num_workers if num_local_io_workers is None else num_local_io_workers,
            divide=config.dataloader.divide_stream,
        )

    def settle(self) -> None:
        """Learn what has come of the last step."""
        raise NotImplementedError
