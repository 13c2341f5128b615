"""Data loading for ``initialize(training_data=...)``: each data-parallel rank its own part of every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from .topology import Topology


class EpochLoader:
    """A DataLoader over this rank's samples that reshuffles at every new pass, alike on all ranks."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        topology: Topology,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.epoch = 0
        self.sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            self.sampler = DistributedSampler(
                dataset, topology.data_parallel_size, topology.rank, shuffle=True, seed=seed, drop_last=drop_last
            )
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size, sampler=self.sampler, collate_fn=collate_fn, drop_last=drop_last
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


class RepeatingLoader:
    """Starts an iterable again whenever it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
