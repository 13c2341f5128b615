"""EpochLoader: the order of DistributedSampler, and the same order over stops, other world sizes and workers."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from covering import by_day
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

import zerorun.data
from zerorun.data import EpochLoader, EpochSampler, RepeatingLoader
from zerorun.distributed.topology import Topology
from zerorun.errors import CheckpointError

SEED = 7
quick = settings(max_examples=100, deadline=None, database=None)
sizes = st.integers(1, 40)
worlds = st.integers(1, 6)
batches = st.integers(1, 5)


class Numbers(Dataset[int]):
    """Sample i is i. Remembers which samples were asked for in this process."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return index


class WorkerSeeds(Numbers):
    """Each sample is the seed of the worker that reads it."""

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


class Stream(IterableDataset[int]):
    """0 .. length - 1, without random access and without a state."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            self.read += 1
            yield number


class StatefulStream(IterableDataset[int]):
    """0 .. length - 1, continued from where the state says."""

    def __init__(self, length: int) -> None:
        self.length, self.place, self.read = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            self.read += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class LateStream(StatefulStream):
    """Knows only when it is read what it has loaded, and remembers its end, as some libraries' datasets do."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.place, self.begin = self.begin, 0
        while self.place < self.length:
            self.place += 1
            self.read += 1
            yield self.place - 1

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


def topology(world: int, rank: int) -> Topology:
    return Topology(replicate=1, shard=world, rank=rank)


def make(data: Any, batch: int = 2, world: int = 1, rank: int = 0, **options: Any) -> EpochLoader:
    return EpochLoader(data, batch, topology(world, rank), **{"seed": SEED, **options})


def permutation(length: int, epoch: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def flat(found: Any) -> list[int]:
    return [number for batch in found for number in batch.tolist()]


class Job:
    """The loaders of all ranks, read in step. Each is told to go on from ``state``, after a way through JSON."""

    def __init__(self, length: int, batch: int, world: int, state: Any = None, **options: Any) -> None:
        self.data = Numbers(length)
        self.loaders = [make(self.data, batch, world, rank, **options) for rank in range(world)]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        self.begin()

    def begin(self) -> None:
        self.iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> list[int] | None:
        """The ids of one batch on every rank, in the order of the epoch; None at its end, on all ranks alike."""
        found: list[Any] = [next(iterator, None) for iterator in self.iterators]
        if found[0] is None:
            assert found == [None] * len(found)
            return None
        return torch.stack(found, dim=1).flatten().tolist()

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]


def job_steps(job: Job, steps: int) -> list[int]:
    found: list[int] = []
    for _ in range(steps):
        ids = job.step()
        assert ids is not None
        found += ids
    return found


# -- the order ---------------------------------------------------------------------------------------------------


@quick
@given(st.integers(0, 60), worlds, st.integers(0, 5), st.booleans())
def test_sampler_is_distributed_sampler(length: int, world: int, epoch: int, drop_last: bool) -> None:
    for rank in range(world):
        theirs: DistributedSampler[int] = DistributedSampler(Numbers(length), world, rank, seed=SEED, drop_last=drop_last)
        theirs.set_epoch(epoch)
        ours = EpochSampler(length, topology(world, rank), SEED + epoch, 0, [], drop_last)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@quick
@given(sizes, batches, worlds, st.booleans())
def test_epochs_are_those_of_a_dataloader_with_distributed_sampler(
    length: int, batch: int, world: int, drop_last: bool
) -> None:
    for rank in range(world):
        sampler: DistributedSampler[int] = DistributedSampler(Numbers(length), world, rank, seed=SEED, drop_last=drop_last)
        reference: DataLoader[int] = DataLoader(Numbers(length), batch, sampler=sampler, drop_last=drop_last)
        loader = make(Numbers(length), batch, world, rank, drop_last=drop_last)
        assert len(loader) == len(reference)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert [found.tolist() for found in loader] == [found.tolist() for found in reference]
            assert (loader.epoch, loader.position) == (epoch, length)


# -- resuming ----------------------------------------------------------------------------------------------------


def expected_steps(length: int, position: int, epoch: int, chunk: int, world: int, drop_last: bool) -> list[list[int]]:
    """What all ranks together must get from ``position`` on, per batch. Written without the sampler's tricks."""
    order = permutation(length, epoch)
    rest = order[position:]
    if drop_last:
        rest = rest[: len(rest) // world * world]
    filler = 0
    while len(rest) % world:
        rest.append(order[filler % length])
        filler += 1
    steps = [rest[first : first + chunk] for first in range(0, len(rest), chunk)]
    return [step for step in steps if len(step) == chunk] if drop_last else steps


@quick
@given(
    sizes,
    st.integers(0, 3),
    st.lists(st.tuples(worlds, batches, st.integers(0, 12)), min_size=1, max_size=6),
    st.booleans(),
)
def test_chain_of_stops_continues_the_permutation(
    length: int, epoch: int, segments: list[tuple[int, int, int]], drop_last: bool
) -> None:
    """Each segment is a new job of another shape that runs some batches, over the ends of epochs, and is stopped."""
    position = 0
    state: dict[str, Any] = {"seed": SEED, "length": length, "epoch": epoch, "position": 0, "skipped": []}
    for world, batch, steps in segments:
        chunk = world * batch
        job = Job(length, batch, world, state, drop_last=drop_last)
        assert job.data.asked == []
        rest = expected_steps(length, position, epoch, chunk, world, drop_last)
        asked = 0
        for _ in range(steps):
            if not rest and position:
                epoch, position = epoch + 1, 0
                rest = expected_steps(length, 0, epoch, chunk, world, drop_last)
            ids = job.step()
            if not rest:  # drop_last leaves nothing of so small a dataset
                assert ids is None
                break
            assert ids == rest.pop(0)
            asked += len(ids)
            position = min(position + chunk, length) if rest else length
            assert (job.state()["epoch"], job.state()["position"]) == (epoch, position)
            if not rest:
                assert job.step() is None
                job.begin()
                epoch, position = epoch + 1, 0
                rest = expected_steps(length, 0, epoch, chunk, world, drop_last)
        assert len(job.data.asked) == asked  # no sample is loaded to be thrown away
        state = job.state()
        epoch, position = state["epoch"], state["position"]


@quick
@given(sizes, worlds, batches, worlds, batches, st.integers(0, 40), st.integers(0, 9))
def test_no_sample_is_lost_or_twice(
    length: int, world: int, batch: int, world2: int, batch2: int, stop: int, epoch: int
) -> None:
    first = Job(length, batch, world, {"seed": SEED, "length": length, "epoch": epoch, "position": 0, "skipped": []})
    seen = job_steps(first, min(stop, len(first.loaders[0])))
    second = Job(length, batch2, world2, first.state())
    over = len(seen) >= length
    while (ids := second.step()) is not None:
        seen += ids
    if over:  # the stop was at the very end: the second job reads the whole next epoch
        assert seen[:length] == permutation(length, epoch)
        seen, epoch = seen[-(-length // world) * world :], epoch + 1
    assert second.loaders[0].epoch == epoch
    assert seen[:length] == permutation(length, epoch)
    assert len(seen) - length < max(world2, 2)


@pytest.mark.parametrize("stop", by_day((0, 1, 3, 7, 8, 9), 0, 7))
def test_four_ranks_to_three_with_the_same_global_batch_and_workers(stop: int) -> None:
    """12 samples per step: 4 ranks of 3, then 3 ranks of 4 with two workers each, over the end of an epoch of 96."""
    whole = permutation(96, 0) + permutation(96, 1)
    before = Job(96, 3, 4)
    seen = []
    for _ in range(stop):
        ids = before.step()
        if ids is None:
            before.begin()
            ids = before.step()
        assert ids is not None
        seen += ids
    after = Job(96, 4, 3, before.state(), num_workers=2)
    for _ in range(10 - stop):
        ids = after.step()
        if ids is None:
            after.begin()
            ids = after.step()
        assert ids is not None
        seen += ids
    assert seen == whole[:120]


def test_workers_read_ahead_but_the_position_is_the_loops() -> None:
    loader = make(Numbers(40), 2, num_workers=2)
    iterator = iter(loader)
    for number in range(1, 5):
        next(iterator)
        assert loader.state_dict()["position"] == 2 * number


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_end_of_an_epoch_is_followed_by_the_next(drop_last: bool) -> None:
    """Ten samples, four per step: with drop_last the epoch ends at 8, and a smaller world must not read the other two."""
    job = Job(10, 2, 2, drop_last=drop_last)
    while job.step() is not None:
        pass
    assert job.state()["position"] == 10
    later = Job(10, 1, 1, job.state(), drop_last=drop_last)
    assert job_steps(later, 10) == permutation(10, 1)
    assert later.step() is None


def test_a_rest_too_short_for_drop_last_is_left_for_the_next_epoch() -> None:
    job = Job(10, 2, 4, drop_last=True, state=make(Numbers(10)).state_dict() | {"position": 6})
    assert job.step() == permutation(10, 1)[:8]
    assert job.step() is None
    assert job.loaders[0].epoch == 1


def test_state_before_the_first_batch_and_between_iter_and_next() -> None:
    loader = make(Numbers(6))
    assert loader.state_dict()["epoch"] == 0
    iterator = iter(loader)
    assert (loader.epoch, loader.position) == (0, 0)
    state = loader.state_dict()
    assert next(iterator).tolist() == permutation(6, 0)[:2]
    other = make(Numbers(6))
    other.load_state_dict(state)
    assert next(iter(other)).tolist() == permutation(6, 0)[:2]


def test_loading_twice_and_saving_at_once_changes_nothing() -> None:
    loader = make(Numbers(20), 3)
    next(iter(loader))
    loader.skip(10, 12)
    state = loader.state_dict()
    other = make(Numbers(20), 3)
    other.load_state_dict(state)
    other.load_state_dict(other.state_dict())
    assert other.state_dict() == state


# -- iterators ---------------------------------------------------------------------------------------------------


def test_an_abandoned_pass_is_followed_by_the_next_epoch() -> None:
    loader = make(Numbers(8))
    for _ in loader:
        break
    assert next(iter(loader)).tolist() == permutation(8, 1)[:2]
    assert (loader.epoch, loader.position) == (1, 2)


def test_only_the_first_pass_after_loading_continues() -> None:
    loader = make(Numbers(8))
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert flat(loader) == permutation(8, 0)[2:]
    assert flat(loader) == permutation(8, 1)


def test_the_newest_iterator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(zerorun.data, "warn_once", said.append)
    loader = make(Numbers(8))
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    assert not said
    assert next(old).tolist() == permutation(8, 0)[2:4]  # goes on, as it always did
    assert (loader.epoch, loader.position) == (1, 2)
    assert "leaves out the rest of this pass" in said[0]
    assert [found.tolist() for found in old] == [permutation(8, 0)[4:6], permutation(8, 0)[6:]]
    assert (loader.epoch, loader.position) == (1, 2)
    assert next(new).tolist() == permutation(8, 1)[2:4]


def test_a_live_iterator_follows_a_loaded_state() -> None:
    loader = make(Numbers(8))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    next(iterator)
    loader.load_state_dict(state)
    assert next(iterator).tolist() == permutation(8, 0)[2:4]
    assert loader.position == 4
    assert next(iter(loader)).tolist() == permutation(8, 1)[:2]


def test_only_the_newest_iterator_follows() -> None:
    loader = make(Numbers(8))
    old, new = iter(loader), iter(loader)
    loader.load_state_dict(loader.state_dict() | {"epoch": 5, "position": 6})
    assert next(old).tolist() == permutation(8, 0)[:2]
    assert (loader.epoch, loader.position) == (5, 6)
    assert next(new).tolist() == permutation(8, 5)[6:]


def test_a_finished_iterator_keeps_no_workers_and_stays_finished() -> None:
    before = len(multiprocessing.active_children())
    loader = make(Numbers(4), num_workers=1)
    iterator = iter(loader)
    assert len(flat(iterator)) == 4
    assert len(multiprocessing.active_children()) == before
    state = loader.state_dict()
    assert next(iterator, None) is None
    assert loader.state_dict() == state
    empty = make(Numbers(4), 5, drop_last=True)
    iterator = iter(empty)
    assert [next(iterator, None), next(iterator, None)] == [None, None]
    assert (empty.epoch, empty.position) == (0, 4)


class Fails(Numbers):
    """Reading sample 3 fails the first time."""

    def __getitem__(self, index: int) -> int:
        if index == 3 and 3 not in self.asked:
            self.asked.append(index)
            raise OSError("disk")
        return index


def test_a_pass_goes_on_after_a_sample_that_could_not_be_read() -> None:
    loader, seen = make(Fails(8), 1), []
    iterator = iter(loader)
    for _ in range(8):
        try:
            seen += next(iterator).tolist()
        except OSError:
            continue
    assert seen == [number for number in permutation(8, 0) if number != 3]
    assert loader.position == 8


# -- random numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_random_state_is_left_alone(workers: int) -> None:
    before = torch.get_rng_state()
    for _ in make(Numbers(4), num_workers=workers):
        pass
    assert torch.equal(before, torch.get_rng_state())


def test_worker_seeds_are_those_of_seed_epoch_and_rank() -> None:
    def seeds(**options: Any) -> list[list[int]]:
        loader = make(WorkerSeeds(2), 1, 2, num_workers=1, **options)
        return [[int(found) for found in loader] for _ in range(2)]

    torch.manual_seed(1)
    first, other_rank = seeds(rank=0), seeds(rank=1)
    torch.manual_seed(2)
    assert seeds(rank=0) == first
    assert first[0] != first[1]
    assert first[0] != other_rank[0]
    assert seeds(rank=0, seed=8)[0] != first[0]
    resumed = make(WorkerSeeds(2), 1, num_workers=1)
    resumed.load_state_dict(resumed.state_dict() | {"position": 1})
    assert int(next(iter(resumed))) not in first[0]  # else a worker would draw again what it drew at the beginning


def test_ranks_that_share_their_data_share_the_worker_seeds() -> None:
    """Two pipeline stages of two tensor ranks: what workers draw at random belongs to the samples."""
    found: dict[int, set[int]] = {0: set(), 1: set()}
    for rank in range(8):
        place = Topology(replicate=1, shard=2, rank=rank, pipe=2, tensor=2)
        (seed,) = EpochLoader(WorkerSeeds(2), 1, place, seed=SEED, num_workers=1)
        found[place.data_parallel_rank].add(int(seed))
    assert [len(seeds) for seeds in found.values()] == [1, 1]
    assert found[0] != found[1]


# -- skipping ----------------------------------------------------------------------------------------------------


@quick
@given(st.data(), sizes, worlds, batches, worlds, batches)
def test_skipped_samples_are_left_out_over_a_stop(
    data: Any, length: int, world: int, batch: int, world2: int, batch2: int
) -> None:
    job = Job(length, batch, world)
    seen = job_steps(job, data.draw(st.integers(0, len(job.loaders[0]) - 1), label="steps before"))
    position, skipped = job.state()["position"], set[int]()
    for _ in range(data.draw(st.integers(1, 3), label="skips")):
        start = data.draw(st.integers(0, length - 1), label="start")
        stop = data.draw(st.integers(max(start, position) + 1, length), label="stop")
        skipped |= set(range(max(start, position), stop))
        for loader in job.loaders:
            loader.skip(start, stop)
    order = permutation(length, 0)
    wanted = [order[place] for place in range(position, length) if place not in skipped]
    seen = []
    for _ in range(data.draw(st.integers(0, 4), label="steps between")):
        ids = job.step()
        if ids is None:
            break
        seen += ids
    if len(seen) >= len(wanted):
        assert not wanted or seen[: len(wanted)] == wanted
        return
    later = Job(length, batch2, world2, job.state())
    while (ids := later.step()) is not None:
        seen += ids
    assert seen[: len(wanted)] == wanted
    assert len(seen) - len(wanted) < world2
    assert {order.index(number) for number in seen}.isdisjoint(skipped)
    later.begin()
    ids = later.step()
    assert ids is not None
    assert ids[:length] == permutation(length, 1)[: world2 * batch2]  # skips belong to one epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_in_a_running_loop(workers: int) -> None:
    loader, seen = make(Numbers(12), num_workers=workers), []
    for found in loader:
        seen += found.tolist()
        if loader.position == 4:
            loader.skip(4, 9)
    order = permutation(12, 0)
    assert seen == order[:4] + order[9:]
    assert flat(loader) == permutation(12, 1)


def test_skipping_the_rest_ends_the_running_pass_but_is_no_empty_one() -> None:
    loader = make(Numbers(8))
    iterator = iter(loader)
    next(iterator)
    loader.skip(2, 8)
    state = loader.state_dict()
    assert next(iterator, None) is None
    assert (loader.epoch, loader.position) == (0, 8)
    other = make(Numbers(8))
    other.load_state_dict(state)
    assert next(iter(other)).tolist() == permutation(8, 1)[:2]


@pytest.mark.parametrize("loaded", [False, True])
def test_skip_at_the_end_of_an_epoch_is_for_the_coming_one(loaded: bool) -> None:
    loader = make(Numbers(8))
    passes = []
    for number in range(2):
        seen = []
        for found in loader:
            seen += found.tolist()
            if number == 0 and loader.position == 8:
                if loaded:
                    state, loader = loader.state_dict(), make(Numbers(8))
                    loader.load_state_dict(state)
                loader.skip(0, 6)
        passes.append(seen)
    assert passes == [permutation(8, 0), permutation(8, 1)[6:]]
    assert loader.epoch == 1


def test_skip_of_a_whole_epoch_before_it_begins() -> None:
    loader = make(Numbers(8))
    loader.skip(0, 5)
    loader.skip(4, 8)
    assert flat(loader) == permutation(8, 1)


def test_skip_between_iter_and_next_of_a_finished_epoch() -> None:
    loader = make(Numbers(8))
    loader.load_state_dict(loader.state_dict() | {"position": 8})
    iterator = iter(loader)
    loader.skip(0, 6)
    assert flat(iterator) == permutation(8, 1)[6:]


def test_a_dataset_that_grows_is_told_of_and_keeps_its_length(warnings: list[str]) -> None:
    """Ranks do not begin an epoch together, so they cannot agree on another one: it may differ between them."""
    data = Numbers(8)
    loader = EpochLoader(data, 2, topology(2, 0), shuffle=False)
    assert len(list(loader)) == 2 and not warnings
    data.length = 12
    assert len(list(loader)) == 2 and loader.state_dict()["length"] == 8
    assert len(warnings) == 1 and "has 12 samples now, and had 8" in warnings[0]


def test_skip_refuses_what_it_cannot_do() -> None:
    loader = make(Numbers(8))
    next(iter(loader))
    for start, stop in ((-1, 4), (4, 4), (5, 4), (0, 9), (0, 2)):
        with pytest.raises(ValueError, match=rf"skip\({start}, {stop}\).* 2 of the epoch's 8 .*Remedy: .*stop > 2"):
            loader.skip(start, stop)
    with pytest.raises(ValueError, match="Remedy: use a dataset with __getitem__"):
        make(Stream(8)).skip(0, 2)


# -- wrong states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "seed was 8 .* is 7 now.*Remedy"),
        ({"length": 30}, "length was 30 .* is 20 now.*Remedy"),
        ({"length": None}, "length was None .* is 20 now.*Remedy"),
    ],
)
def test_another_order_is_refused_and_nothing_changed(change: dict[str, Any], message: str) -> None:
    loader = make(Numbers(20))
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(CheckpointError, match=message):
        loader.load_state_dict(before | {"epoch": 3, "position": 4} | change)
    assert loader.state_dict() == before


# -- datasets without random access ------------------------------------------------------------------------------


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(zerorun.data, "warn_once", said.append)
    return said


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(zerorun.data, "info_once", said.append)
    return said


@pytest.mark.parametrize(("kind", "workers"), [(Stream, 0), (Stream, 1), (StatefulStream, 1)])
def test_a_stream_is_read_again_and_thrown_away(kind: Any, workers: int, warnings: list[str]) -> None:
    loader = make(kind(10), num_workers=workers)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    other = make(kind(10), num_workers=workers)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [found.tolist() for found in other] == [[6, 7], [8, 9]]
    assert len(warnings) == 1
    assert kind.__name__ in warnings[0] and "3 batches per rank are read and thrown away" in warnings[0]
    assert next(iter(other)).tolist() == [0, 1]


@pytest.mark.parametrize("kind", [Stream, StatefulStream, LateStream])
@pytest.mark.parametrize("seen_end", [False, True])
def test_a_stream_at_its_end_is_followed_by_the_next_epoch(kind: Any, seen_end: bool, warnings: list[str]) -> None:
    loader = make(kind(4))
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    if seen_end:
        assert next(iterator, None) is None
    other = make(kind(4))
    other.load_state_dict(loader.state_dict())
    iterator = iter(other)
    assert [found.tolist() for found in iterator] == [[0, 1], [2, 3]]
    assert (other.epoch, other.position) == (2, 0)
    assert len(warnings) == (kind is Stream)


@pytest.mark.parametrize("kind", [StatefulStream, LateStream])
def test_a_stream_with_a_state_is_not_read_again(kind: Any, warnings: list[str]) -> None:
    loader = make(kind(10))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    data = kind(10)
    other = make(data)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert other.state_dict() == loader.state_dict()
    iterator = iter(other)
    assert next(iterator).tolist() == [6, 7]
    assert other.state_dict()["dataset"] == {"place": 8}
    assert flat(iterator) == [8, 9]
    assert (data.read, warnings) == (4, [])
    assert flat(other) == list(range(10))


@pytest.mark.parametrize("batches", [0, 1])
def test_a_stream_that_cannot_be_told_its_epoch_is_told_of_once(batches: int, warnings: list[str]) -> None:
    """Such as one that counts its passes. Workers begin the first pass each time, and what has a state goes on."""

    class Counts(Stream):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(range(10 * self.passes, 10 * self.passes + self.length))

    class Told(Counts):
        def set_epoch(self, epoch: int) -> None:
            self.passes = epoch

    for kind, workers, epoch in ((Counts, 0, 0), (Counts, 1, 2), (Told, 0, 2), (StatefulStream, 0, 2)):
        loader = make(kind(4), num_workers=workers)
        loader.load_state_dict(loader.state_dict() | {"epoch": epoch, "position": 2 * batches})
        next(iter(loader))
    assert not any("cannot be told" in told for told in warnings)
    warnings.clear()
    before = RepeatingLoader(make(Counts(4)))
    for _ in range(4 + batches):
        next(before)
    loader = make(Counts(4))
    state = before.state_dict() if batches else before.state_dict() | {"epoch": 2, "position": 0}
    loader.load_state_dict(state)
    expected, found = next(before).tolist(), next(iter(loader)).tolist()
    assert expected[0] >= 30 > found[0]
    assert len(warnings) == 1
    assert "Counts cannot be told that it goes on in epoch 2" in warnings[0]
    assert "Remedy: give it set_epoch()" in warnings[0]
    assert ("thrown away" in warnings[0]) == bool(batches)


def test_a_stream_read_again_has_the_same_worker_seeds(warnings: list[str]) -> None:
    class Seeds(Stream):
        def __iter__(self) -> Iterator[int]:
            return (torch.initial_seed() + number for number in range(self.length))

    whole = flat(make(Seeds(6), num_workers=1))
    loader = make(Seeds(6), num_workers=1)
    loader.load_state_dict(loader.state_dict() | {"position": 4})
    assert flat(loader) == whole[4:]


def test_a_streams_position_must_be_whole_batches(warnings: list[str]) -> None:
    loader = make(Stream(20), 3, world=2)
    next(iter(loader))
    with pytest.raises(CheckpointError, match=r"6 samples .* not a multiple of 4.* 2 on every rank.*Remedy"):
        make(Stream(20), 2, world=2).load_state_dict(loader.state_dict())
    other = make(Stream(20), 1, world=2)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other)).tolist() == [6]


@pytest.mark.parametrize("changed", [{"num_workers": 0}, {"num_workers": 2}, {"world": 1}, {"batch": 4}])
def test_workers_that_give_a_stream_in_another_order_are_refused(changed: dict[str, int]) -> None:
    """They divide it, so that samples would be lost, and others come twice."""
    usual = {"world": 2, "num_workers": 1, "batch": 2}
    loader = make(ByWorker(24), **usual)
    before = loader.state_dict()
    next(iter(loader))
    other = make(ByWorker(24), **(usual | changed))
    other.load_state_dict(before)  # nothing was read
    told = r"read by 2 ranks with 1 workers and batches of 2, and would be by .* another order|not a multiple of 8"
    with pytest.raises(CheckpointError, match=told):
        other.load_state_dict(loader.state_dict())
    make(ByWorker(24), **usual).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("length", [1, 7])
def test_a_dataset_that_gives_no_batch_is_told(length: int, warnings: list[str]) -> None:
    make(Numbers(length), 4, world=2, drop_last=True)
    assert len(warnings) == 1 and f"a dataset of {length} samples gives no batch" in warnings[0]


def drawn() -> list[float]:
    """A number of each generator that a checkpoint has the state of."""
    return [float(torch.rand(1)), random.random(), float(numpy.random.rand())]


@pytest.mark.parametrize("begins", [False, True])
def test_throwing_away_leaves_the_random_state_alone(begins: bool, warnings: list[str]) -> None:
    """``begins``: the dataset draws when it begins a pass, such as an order, and else for each sample."""

    class Noise(Stream):
        def __iter__(self) -> Iterator[int]:
            if begins:
                drawn()
            return (number for number in super().__iter__() if begins or drawn())

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    expected = drawn()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    loader = make(Noise(10))
    loader.load_state_dict(loader.state_dict() | {"position": 6})
    iterator = iter(loader)
    assert drawn() == expected
    assert next(iterator).tolist() == [6, 7]


def test_a_stream_with_epochs_is_told_them() -> None:
    class Epochs(Stream):
        def set_epoch(self, epoch: int) -> None:
            self.told = epoch

    data = Epochs(4)
    loader = make(data)
    for epoch in range(2):
        assert len(list(loader)) == 2
        assert data.told == epoch


class WithEpochs(StatefulStream):
    """Each epoch has other numbers, in an order that belongs to the state: ``sets`` is what set_epoch() does to the place.

    ``keeps``: the state has the epoch. ``begins``: reading begins the epoch anew where set_epoch() was told another one
    than the state has, as Hugging Face's does.
    """

    def __init__(self, length: int, *, resets: bool, keeps: bool, begins: bool) -> None:
        super().__init__(length)
        self.epoch, self.resets, self.keeps, self.begins, self.of = 0, resets, keeps, begins, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.place = 0 if self.resets else self.place

    def __iter__(self) -> Iterator[int]:
        self.place = 0 if self.begins and self.of != self.epoch else self.place
        self.of = self.epoch
        return (100 * self.epoch + number for number in super().__iter__())

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"epoch": self.of}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.of = state["epoch"]
        self.epoch = state["epoch"] if self.keeps else self.epoch


@pytest.mark.parametrize("seen", [0, 1, 4, 5, 7, 8])
@pytest.mark.parametrize(
    "kind",
    [
        {"resets": True, "keeps": False, "begins": False},
        {"resets": True, "keeps": True, "begins": False},
        {"resets": False, "keeps": False, "begins": True},
        {"resets": False, "keeps": True, "begins": False},
    ],
)
def test_a_stream_with_epochs_and_a_state_goes_on_in_its_epoch(kind: dict[str, bool], seen: int) -> None:
    """In another process, and in the one that was further; also from the end of an epoch."""
    before = RepeatingLoader(make(WithEpochs(8, **kind)))
    for _ in range(seen):
        next(before)
    state = json.loads(json.dumps(before.state_dict()))
    expected = [next(before).tolist() for _ in range(9)]
    for loader in (RepeatingLoader(make(WithEpochs(8, **kind))), before):
        loader.load_state_dict(state)
        assert [next(loader).tolist() for _ in range(9)] == expected


def test_length_of_a_stream_is_the_datasets() -> None:
    class Sized(Stream):
        def __len__(self) -> int:
            return self.length

    assert len(make(Sized(5))) == 3
    with pytest.raises(TypeError):
        len(make(Stream(5)))


# -- ranks divide such datasets ----------------------------------------------------------------------------------


class ByWorker(Stream):
    """As a stream for several workers is: each has other samples."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        return iter(range(worker.id, self.length, worker.num_workers))


class OfRank(StatefulStream):
    """A stream that divides itself."""

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        super().__init__(length)
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[int]:
        return (number for number in super().__iter__() if number % self.ranks == self.rank)


@quick
@given(length=sizes, world=worlds, batch=batches, drop_last=st.booleans())
def test_ranks_divide_a_stream_as_they_divide_a_dataset(length: int, world: int, batch: int, drop_last: bool) -> None:
    whole = Numbers(length - length % world)
    for rank in range(world):
        options = {"shuffle": False, "drop_last": drop_last}
        found = [each.tolist() for each in make(Stream(length), batch, world, rank, **options)]
        wanted = [each.tolist() for each in make(whole, batch, world, rank, **options)] if len(whole) else []
        assert found == wanted


def test_each_worker_divides_what_it_reads() -> None:
    found = [flat(make(ByWorker(16), 2, 2, rank, num_workers=2)) for rank in range(2)]
    assert [len(samples) for samples in found] == [8, 8]
    assert sorted(found[0] + found[1]) == list(range(16))


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_a_divided_stream_goes_on_at_another_number_of_ranks(
    kind: Any, before: int, after: int, warnings: list[str]
) -> None:
    loaders = [make(kind(24), 6 // before, before, rank) for rank in range(before)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(2):
        for iterator in iterators:
            next(iterator)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    others = [make(kind(24), 6 // after, after, rank) for rank in range(after)]
    for other in others:
        other.load_state_dict(json.loads(json.dumps(states[0])))
    assert sorted(number for other in others for number in flat(other)) == list(range(12, 24))


def test_a_stream_that_divides_itself_is_read_as_it_is(notes: list[str]) -> None:
    loaders = [make(OfRank(8, rank, 2), 2, 2, rank, divide=False) for rank in range(2)]
    assert [flat(loader) for loader in loaders] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [loader.is_state_of_rank for loader in loaders] == [True, True]
    assert all("OfRank is read as it is" in note for note in notes) and len(notes) == 2
    assert not make(StatefulStream(8), 2, 2).is_state_of_rank
    assert "StatefulStream" in notes[-1] and "every 2-th" in notes[-1] and "divide_stream" in notes[-1]
    make(Stream(8), 2, 1, divide=True)
    make(Numbers(8), 2, 2)
    assert len(notes) == 3, "there is nothing to say"


def test_streams_that_are_known_to_divide_themselves() -> None:
    theirs = type("StreamingDataset", (Stream,), {"__module__": "streaming.base.dataset"})
    own = type("Mine", (theirs,), {})
    assert flat(make(own(4), 2, 2, 1)) == [0, 1, 2, 3]
    assert flat(make(own(4), 2, 2, 1, divide=True)) == [1, 3]


# -- RepeatingLoader ---------------------------------------------------------------------------------------------


def test_repeating_loader_goes_over_epochs_and_continues() -> None:
    repeating = RepeatingLoader(make(Numbers(4)))
    whole = [next(repeating).tolist() for _ in range(6)]
    assert [number for found in whole for number in found] == permutation(4, 0) + permutation(4, 1) + permutation(4, 2)
    for stop in range(6):
        first = RepeatingLoader(make(Numbers(4)))
        for _ in range(stop):
            next(first)
        second = RepeatingLoader(make(Numbers(4)))
        next(second)
        second.load_state_dict(first.state_dict())
        assert [next(second).tolist() for _ in range(6 - stop)] == whole[stop:]


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_repeating_loader_follows_a_load_of_what_it_wraps(used: int, stop: int) -> None:
    """As when it was made from engine.dataloader before the checkpoint is loaded into the engine."""
    source = RepeatingLoader(make(Numbers(4)))
    whole = [next(source).tolist() for _ in range(6)]
    first = RepeatingLoader(make(Numbers(4)))
    for _ in range(stop):
        next(first)
    inner = make(Numbers(4))
    repeating = RepeatingLoader(inner)
    for _ in range(used):
        next(repeating)
    inner.load_state_dict(first.state_dict())
    assert [next(repeating).tolist() for _ in range(6 - stop)] == whole[stop:]


def test_repeating_loader_over_something_without_a_state() -> None:
    repeating = RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(3)] == [1, 2, 1]
    assert repeating.state_dict() == {}
    repeating.load_state_dict({})
    assert next(repeating) == 1
    with pytest.raises(CheckpointError, match=r"list .*Remedy"):
        repeating.load_state_dict({"epoch": 1})


# -- data in its own order ---------------------------------------------------------------------------------------


@quick
@given(length=sizes, world=worlds, batch=batches)
def test_unshuffled_is_distributed_sampler_in_every_epoch(length: int, world: int, batch: int) -> None:
    for rank in range(world):
        data = Numbers(length)
        sampler = DistributedSampler(data, world, rank, shuffle=False)
        expected = [each.tolist() for each in DataLoader(data, batch, sampler=sampler)]
        loader = make(data, batch, world, rank, shuffle=False)
        assert [[each.tolist() for each in loader] for _ in range(2)] == [expected] * 2


def test_unshuffled_goes_on_in_the_middle_and_only_unshuffled() -> None:
    loader = make(Numbers(10), 2, shuffle=False)
    passing = iter(loader)
    assert [next(passing).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    state = json.loads(json.dumps(loader.state_dict()))
    again = make(Numbers(10), 2, shuffle=False)
    again.load_state_dict(state)
    assert [each.tolist() for each in again] == [[4, 5], [6, 7], [8, 9]]
    with pytest.raises(CheckpointError, match=r'shuffle was False .* and is True now.*"dataloader": {"shuffle"'):
        make(Numbers(10), 2).load_state_dict(state)
    older = {key: value for key, value in make(Numbers(10), 2).state_dict().items() if key != "shuffle"}
    make(Numbers(10), 2).load_state_dict(older)  # as versions wrote it that always shuffled
    with pytest.raises(CheckpointError, match="shuffle was True"):
        make(Numbers(10), 2, shuffle=False).load_state_dict(older)
