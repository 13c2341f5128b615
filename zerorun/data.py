"""Data loading for ``initialize(training_data=...)``: every rank reads its part of each epoch, resumable at any sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe, Sampler
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from .distributed.generators import generators_as_before
from .distributed.topology import Topology
from .errors import CheckpointError
from .log import info_once, warn_once
from .watch.board import Phase, during

Range = tuple[int, int]  # (first, last + 1): positions in the order of one epoch
# Packages whose iterable datasets look up by themselves which rank they are on.
_DIVIDING_PACKAGES = ("streaming", "litdata", "webdataset")


class EpochSampler(Sampler[int]):
    """This rank's share of the rest of an epoch, from position ``start`` on and without the ``skipped`` ranges.

    Positions count samples in the order that all ranks share: a permutation made from ``seed``, or the dataset's own order
    if ``seed`` is None. Of n data-parallel ranks, each takes every n-th sample. If nothing is left out, this is the
    sequence of torch's DistributedSampler.
    """

    def __init__(
        self, length: int, topology: Topology, seed: int | None, start: int, skipped: Iterable[Range], drop_last: bool
    ) -> None:
        self.length, self.seed = length, seed
        self.rank, self.ranks = topology.data_parallel_rank, topology.data_parallel_size
        self.whole, self.left = _without(skipped, 0, length), _without(skipped, start, length)
        samples = sum(stop - first for first, stop in self.left)
        self.share = samples // self.ranks if drop_last else -(-samples // self.ranks)

    def __len__(self) -> int:
        return self.share

    def __iter__(self) -> Iterator[int]:
        if not self.share:
            return iter(())
        order = torch.arange(self.length)
        if self.seed is not None:
            order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed))
        ids = torch.cat([order[first:stop] for first, stop in self.left])
        missing = self.share * self.ranks - len(ids)
        if missing > 0:  # filled up from the beginning of the epoch, so that all ranks have the same number of batches
            begin = torch.cat([order[first:stop] for first, stop in self.whole])
            ids = torch.cat([ids, begin.repeat(-(-missing // len(begin)))[:missing]])
        return iter(ids[self.rank : self.share * self.ranks : self.ranks].tolist())

    def position_after(self, taken: int) -> int:
        """Return the position of the next sample to read when every rank has taken ``taken`` samples of its share."""
        taken *= self.ranks
        for first, stop in self.left:
            if taken < stop - first:
                return first + taken
            taken -= stop - first
        return self.length


class StreamShare(IterableDataset[Any]):
    """This rank's share of an iterable dataset, which gives all ranks the same samples: every n-th of them.

    At the end, samples that are not enough for all ranks are left out. So all ranks have the same number of batches, and
    know it without a word to each other. Each worker divides what it reads.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, ranks: int) -> None:
        self.dataset, self.rank, self.ranks = dataset, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        while len(taken := list(islice(samples, self.ranks))) == self.ranks:
            yield taken[self.rank]

    def __len__(self) -> int:
        """Return the number of samples of this rank. Raises TypeError if the dataset has no length."""
        return len(self.dataset) // self.ranks  # type: ignore[arg-type]


class EpochLoader:
    """A DataLoader over this rank's samples. With ``shuffle`` it reshuffles for every new pass, on all ranks alike.

    ``position``: how many samples of ``epoch`` the training loops of all ranks have received; samples that workers have
    only read ahead do not count. A new iterator begins the next epoch, except for the first one after
    ``load_state_dict()``. If several iterators are alive, only the newest one moves the position and follows
    ``load_state_dict()`` and ``skip()``.

    ``divide``: whether ranks divide the samples of an iterable dataset; None: unless it is known to do so by itself.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        topology: Topology,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        divide: bool | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.topology, self.seed = dataset, batch_size, topology, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self._options: dict[str, Any] = {"collate_fn": collate_fn, "drop_last": drop_last, "num_workers": num_workers}
        self.length: int | None = None if isinstance(dataset, IterableDataset) else len(dataset)  # type: ignore[arg-type]
        self._resumable = self.length is None and not num_workers and has_state(dataset)
        self._source = self._divided(not divides_itself(dataset) if divide is None else divide)
        # A dataset that divides itself has a state for each rank.
        self.is_state_of_rank = self._resumable and topology.data_parallel_size > 1 and self._source is dataset
        self._samples = batch_size * topology.data_parallel_size  # in one batch of every rank, together
        self._passes = 0  # iterators made so far, which is also the number of the newest
        self._moved = False  # the newest iterator must go to a new position
        self._skipped: list[Range] = []
        self._dataset_state: Any = None  # the state that the dataset continues from, until a batch was received
        self._start_epoch(0)
        self._loader(None)  # so that the DataLoader raises its errors for wrong arguments here
        if self.length and not len(self):
            warn_once(
                f"a dataset of {self.length} samples gives no batch: a batch of all ranks takes {self._samples}, and "
                "dataloader_drop_last leaves out what is less. Remedy: a smaller micro-batch, or keep the last one."
            )

    def __len__(self) -> int:
        """Return the number of batches of a full epoch on this rank."""
        return len(self._loader(self._sampler(0, [])))

    def __iter__(self) -> Iterator[Any]:
        if self._begun or self._is_over():
            self._start_epoch(self.epoch + 1)
            self._tell_of_length()
        self._passes += 1
        return _Pass(self, self._passes)

    def skip(self, start: int, stop: int) -> None:
        """Leave out the samples at positions ``start`` to ``stop - 1`` of this epoch from now on. Every rank must call it.

        Skipped ranges are part of the state, and are forgotten at the end of the epoch. If all samples of this epoch were
        received, the next epoch is meant. Raises ValueError if nothing can be skipped.
        """
        if self.length is None:
            raise ValueError("skip() needs samples with positions. Remedy: use a dataset with __getitem__ and __len__.")
        done = 0 if self._is_over() else self.position
        if not 0 <= start < stop <= self.length or stop <= done:
            raise ValueError(
                f"skip({start}, {stop}) skips nothing: {done} of the epoch's {self.length} samples were received. Remedy: "
                f"give 0 <= start < stop <= {self.length} with stop > {done}, or load an earlier checkpoint first."
            )
        if self._is_over():
            self._start_epoch(self.epoch + 1)
        self._skipped = sorted([*self._skipped, (start, stop)])
        self._moved = self._moved or self._begun

    def state_dict(self) -> dict[str, Any]:
        """Return the training loop's position in numbers that JSON can hold, for any number of ranks and workers and any
        batch size. An iterable dataset that is resumable adds its own state.
        """
        state: dict[str, Any] = {"seed": self.seed, "length": self.length, "epoch": self.epoch, "shuffle": self.shuffle}
        state |= {"position": self.position, "skipped": [list(piece) for piece in self._skipped]}
        if self.length is None:
            state["read_by"] = self._read_by()
        if self._resumable:
            waiting = self._dataset_state  # some datasets show a loaded state only once they are read
            state["dataset"] = self.dataset.state_dict() if waiting is None else waiting  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``: the next pass begins in the middle of its epoch.

        Raises CheckpointError if the loader cannot continue from it.
        """
        self.check_state(state)
        dataset_state = state.get("dataset") if self._resumable else None
        self._start_epoch(state["epoch"])
        self.position, self._dataset_state, self._moved = state["position"], dataset_state, True
        self._skipped = [(start, stop) for start, stop in state["skipped"]]
        if dataset_state is not None:
            if hasattr(self.dataset, "set_epoch"):  # may begin the epoch anew, so it comes first
                self.dataset.set_epoch(self.epoch)
            self.dataset.load_state_dict(dataset_state)  # type: ignore[attr-defined]
        elif not self.position and (words := self._first_pass()):  # else they are told with what is thrown away
            warn_once(words.lstrip())

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError, naming the difference, if the loader cannot continue from ``state``."""
        remedies = {"seed": 'set the same "seed" in the configuration', "length": "train on the same dataset"}
        if self.length is not None:  # an iterable dataset has an order of its own
            remedies["shuffle"] = 'set the same "dataloader": {"shuffle": ...} in the configuration'
        for name, remedy in remedies.items():
            found, mine = state.get(name, True if name == "shuffle" else None), getattr(self, name)
            if found != mine:
                raise CheckpointError(
                    f"the data's {name} was {found} when the checkpoint was written and is {mine} now: its order cannot "
                    f'go on. Remedy: {remedy}, or pass allow_missing=["data"] to load_checkpoint(), which begins with the '
                    "data anew."
                )
        if self.length is None and not (self._resumable and state.get("dataset") is not None):
            self._check_stream(state["position"], state.get("read_by", self._read_by()))

    def _check_stream(self, position: int, readers: list[int]) -> None:
        """Raise CheckpointError if an iterable dataset, read again from its beginning, does not come to ``position``."""
        if position % self._samples:
            raise CheckpointError(
                f"{position} samples of an iterable dataset were read: not a multiple of {self._samples}, one "
                f"batch of {self.batch_size} on every rank. Remedy: choose a batch size that makes it one, or pass "
                'allow_missing=["data"] to load_checkpoint() to begin with the data anew.'
            )
        both = readers, self._read_by()
        if position and both[0] != both[1] and any(workers for _, workers, _ in both):
            then, now = (f"{ranks} ranks with {workers} workers and batches of {size}" for ranks, workers, size in both)
            raise CheckpointError(
                f"an iterable dataset was read by {then}, and would be by {now}: its workers give samples in another "
                'order. Remedy: the same numbers, no workers in both runs, or pass allow_missing=["data"] to '
                "load_checkpoint() to begin with the data anew."
            )

    def _read_by(self) -> list[int]:
        """[ranks, workers of each, samples in a batch]: with workers, the order of an iterable dataset depends on them."""
        return [self.topology.data_parallel_size, self._options["num_workers"], self.batch_size]

    def _divided(self, divide: bool) -> Dataset[Any]:
        """Return what this rank reads: if ``divide``, its share of an iterable dataset. A note says which, once."""
        rank, ranks = self.topology.data_parallel_rank, self.topology.data_parallel_size
        if self.length is not None or ranks == 1:
            return self.dataset
        name = type(self.dataset).__name__
        if not divide:
            info_once(f"the iterable dataset {name} is read as it is on each rank: it divides its samples by itself.")
            return self.dataset
        info_once(
            f"of the iterable dataset {name}, each of {ranks} ranks reads all samples and takes every {ranks}-th. If it "
            'gives ranks other samples by itself, set "dataloader": {"divide_stream": false}.'
        )
        return StreamShare(self.dataset, rank, ranks)  # type: ignore[arg-type]

    def _start_epoch(self, epoch: int) -> None:
        self.epoch, self.position, self._begun = epoch, 0, False
        self._skipped, self._dataset_state = [], None

    def _tell_of_length(self) -> None:
        """Warn of a dataset that has grown or shrunk: ranks divide the samples that it had, for it may differ on them."""
        if self.length is not None and (now := len(self.dataset)) != self.length:  # type: ignore[arg-type]
            warn_once(
                f"the dataset {type(self.dataset).__name__} has {now} samples now, and had {self.length} when its loader "
                "was made, which goes on with as many. Remedy: when it is as long on all ranks, let all of them call "
                "engine.set_dataloader(engine.deepspeed_io(dataset))."
            )

    def _is_over(self) -> bool:
        return self.length is not None and 0 < self.length <= self.position

    def _end_epoch(self) -> None:
        if self._begun and self.length is not None:
            self.position = self.length
        elif self._begun:  # without a length, an epoch's end can only be recorded as the beginning of the next one
            self._start_epoch(self.epoch + 1)

    def _sampler(self, start: int, skipped: list[Range]) -> EpochSampler | None:
        if self.length is None:
            return None
        seed = self.seed + self.epoch if self.shuffle else None
        return EpochSampler(self.length, self.topology, seed, start, skipped, self.drop_last)

    def _loader(self, sampler: EpochSampler | None) -> DataLoader[Any]:
        # The workers' seeds come from a generator of the loader's own, so that nothing is drawn from torch's global one,
        # wherever a pass begins. An iterable dataset is always read from its beginning, with the seeds of its beginning.
        start = self.position if sampler is not None else 0
        seed = random.Random(f"{self.seed} {self.epoch} {self.topology.data_parallel_rank} {start}").getrandbits(63)
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(self._source, self.batch_size, sampler=sampler, generator=generator, **self._options)

    def _open(self) -> Iterator[tuple[int, Any]]:
        """Return (position after a batch, batch) for the batches from the current position on."""
        self._begun, self._moved = True, False
        sampler = self._sampler(self.position, self._skipped)
        if sampler is None:
            return self._open_iterable()
        self.position = sampler.position_after(0)
        loader = self._loader(sampler)
        positions = (sampler.position_after(number * self.batch_size) for number in range(1, len(loader)))
        # The last batch ends the epoch, even if drop_last leaves samples after it.
        return zip(chain(positions, [sampler.length]), loader, strict=False)

    def _open_iterable(self) -> Iterator[tuple[int, Any]]:
        goes_on = self.position > 0 and self._dataset_state is not None
        with generators_as_before() if self.position else nullcontext():
            if hasattr(self.dataset, "set_epoch") and not goes_on:  # it has been told before it loaded its state
                self.dataset.set_epoch(self.epoch)
            batches = iter(self._loader(None))
            if self.position and not goes_on:
                lost = self.position // self._samples
                warn_once(
                    f"the dataset {type(self.dataset).__name__} cannot continue in the middle: {lost} batches per rank are "
                    "read and thrown away. Samples in an order that it draws from global random generators come in another "
                    "one now. To avoid both, give the dataset state_dict() and load_state_dict() and use no workers."
                    f"{self._first_pass()}"
                )
                next(islice(batches, lost, lost), None)
        return zip(count(self.position + self._samples, self._samples), batches, strict=False)

    def _first_pass(self) -> str:
        """Return, in words, that an iterable dataset may begin another pass than that of the epoch; else nothing.

        Workers have copies of the dataset, which all begin their first pass.
        """
        told = self.length is not None or self._options["num_workers"] or hasattr(self.dataset, "set_epoch")
        if told or not self.epoch:
            return ""
        name = type(self.dataset).__name__
        return (
            f" The dataset {name} cannot be told that it goes on in epoch {self.epoch}, counted from 0. If it counts its "
            "passes, or gives other samples in each, those of another epoch come now. Remedy: give it set_epoch(), which "
            "is called with the number of the epoch, or state_dict() and load_state_dict()."
        )


class _Pass:
    """An iterator of an EpochLoader over an epoch, or over the rest of one."""

    def __init__(self, owner: EpochLoader, number: int) -> None:
        self.owner, self.number, self.given, self.stream = owner, number, False, owner._open()

    def __iter__(self) -> _Pass:
        return self

    @during(Phase.DATA)
    def __next__(self) -> Any:
        owner, newest = self.owner, self.number == self.owner._passes
        if newest and owner._moved:
            self.stream = owner._open()
        found = next(self.stream, None)
        if found is None and newest and not self.given:
            # Nothing is left of the epoch that was to be continued. This pass is the next epoch instead of an empty one.
            owner._start_epoch(owner.epoch + (owner.position > 0))
            self.stream = owner._open()
            found = next(self.stream, None)
        if newest and found is None:
            owner._end_epoch()
        if found is None:
            self.stream, self.given = iter(()), True  # releases the workers
            raise StopIteration
        if newest:
            owner.position, owner._dataset_state = found[0], None
        else:
            warn_once(
                "an iterator of the engine's data loader is read on although a newer one was begun, and checkpoints have "
                "the position of the newest: a run that goes on from one leaves out the rest of this pass. Remedy: to look "
                "at a sample in between, take it from the dataset, as in dataset[0], or make a DataLoader of your own."
            )
        self.given = True
        return found[1]


class RepeatingLoader:
    """An iterator that starts an iterable again whenever it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped loader, or an empty dict if it has none."""
        return self.loader.state_dict() if has_state(self.loader) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state`` with the next batch. Raises CheckpointError if the wrapped loader cannot load a state."""
        if has_state(self.loader):
            self.loader.load_state_dict(state)
        elif state:
            name = type(self.loader).__name__
            raise CheckpointError(f"a {name} cannot load {state}. Remedy: wrap the kind of loader that wrote it.")
        self._iterator = iter(())  # the next batch asks the loader for a new one


def divides_itself(dataset: Dataset[Any]) -> bool:
    """True for an iterable dataset that is known to give other samples on each rank.

    Hugging Face's does so after ``split_dataset_by_node()``, which is what ``_distributed`` tells. A datapipe is divided by
    torch's DataLoader at its ``sharding_filter()``, over all ranks of the world.
    """
    if isinstance(dataset, IterDataPipe):
        return any(hasattr(pipe, "apply_sharding") for pipe in get_all_graph_pipes(traverse_dps(dataset)))
    packages = {kind.__module__.partition(".")[0] for kind in type(dataset).__mro__}
    return getattr(dataset, "_distributed", None) is not None or not packages.isdisjoint(_DIVIDING_PACKAGES)


def has_state(thing: object) -> bool:
    """True if ``thing`` can be asked where it is, and be put back there."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _without(skipped: Iterable[Range], start: int, length: int) -> list[Range]:
    """Return positions ``start`` to ``length - 1`` as ranges, without the ranges ``skipped``, which are ascending."""
    left = []
    for first, stop in [*skipped, (length, length)]:
        if start < first:
            left.append((start, first))
        start = max(start, stop)
    return left
