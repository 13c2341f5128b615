"""Ranks over four axes: look-ups at 4,096 ranks, DeepSpeed's answers, bad degrees, the picture. No processes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from harness import patience
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerorun
from zerorun.deepspeed.mpu import Grid
from zerorun.distributed import topology
from zerorun.distributed.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zerorun.distributed.topology import AXES, Coordinate, Topology
from zerorun.errors import TopologyError

LARGE = Topology.plan(4096, pipe=16, tensor=8, shard_degree=8)  # 16 x 4 x 8 x 8
EVERY_AXIS = (*AXES, "data", "model", "replica")
degrees = st.tuples(*[st.integers(1, 4)] * 4)
LOOK_UP_S = 0.2


def of_degrees(pipe: int, replicate: int, shard: int, tensor: int, rank: int = 0) -> Topology:
    return Topology(replicate, shard, rank, pipe, tensor)


# -- look-ups ----------------------------------------------------------------------------------------------------


def check_lookups(made: Topology) -> None:
    """Every look-up against the definition: row-major over pipe, replicate, shard, tensor."""
    shape = (made.pipe, made.replicate, made.shard, made.tensor)
    places = [Coordinate(*indices) for indices in product(*map(range, shape))]
    assert made.world_size == len(places)
    for rank, place in list(enumerate(places))[:: max(len(places) // 64, 1)]:
        here = replace(made, rank=rank)
        assert made.coordinate(rank) == here.coordinate() == place
        assert made.rank_at(**place._asdict()) == rank
        assert (here.pipe_rank, here.replicate_rank, here.shard_rank, here.tensor_rank) == place
        assert here.data_parallel_rank == place.replicate * made.shard + place.shard
        assert here.ranks_along("data")[here.data_parallel_rank] == rank
    for axis in EVERY_AXIS:
        groups = made.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(made.world_size))
        assert {len(group) for group in groups} == {made.size(axis)}
        assert list(groups) == sorted(tuple(sorted(group)) for group in groups)
        members = topology._MEMBERS[axis]
        for group in groups[:: max(len(groups) // 16, 1)]:
            assert made.ranks_along(axis, group[-1]) == group
            fixed = {name: getattr(places[group[0]], name) for name in AXES if name not in members}
            assert made.filter_match(**fixed) == group


def test_4096_ranks() -> None:
    assert (LARGE.pipe, LARGE.replicate, LARGE.shard, LARGE.tensor) == (16, 4, 8, 8)
    assert (LARGE.data_parallel_size, LARGE.size("model"), LARGE.size("replica")) == (32, 128, 1024)
    check_lookups(LARGE)


@pytest.mark.parametrize(
    "look_up",
    [
        *[lambda made, axis=axis: made.groups(axis) for axis in EVERY_AXIS],
        *[lambda made, axis=axis: made.ranks_along(axis, 4095) for axis in EVERY_AXIS],
        lambda made: made.coordinate(4095),
        lambda made: made.rank_at(pipe=15, replicate=3, shard=7, tensor=7),
        lambda made: made.filter_match(tensor=3),
        lambda made: made.describe(8),
        lambda made: Topology.plan(4096, 4095, pipe=16, tensor=8, shard_degree=8, ranks_per_host=8),
        lambda made: made.process_topology.get_axis_comm_lists("model"),
        lambda made: made.process_topology.get_coord(4095),
        lambda made: Grid(made).stage_to_global(15, data=31, model=7),
    ],
)
def test_no_look_up_at_4096_ranks_takes_long(look_up: Callable[[Topology], Any]) -> None:
    begun = time.perf_counter()
    look_up(LARGE)
    assert time.perf_counter() - begun < LOOK_UP_S * patience()


@settings(max_examples=40, deadline=None)
@given(degrees)
def test_random_degrees(wanted: tuple[int, int, int, int]) -> None:
    check_lookups(of_degrees(*wanted))


def test_without_pipe_and_tensor_as_ever() -> None:
    made = Topology(2, 4, 5)
    assert (made.world_size, made.data_parallel_size, made.shard_rank, made.replicate_rank) == (8, 8, 1, 1)
    assert made == Topology.plan(8, 5, shard_degree=4)
    assert (made.pipe, made.tensor, made.pipe_rank, made.tensor_rank, made.data_parallel_rank) == (1, 1, 0, 0, 5)
    assert Topology.plan(8) == Topology(1, 8, 0)


def test_rank_at_keeps_this_ranks_place() -> None:
    here = of_degrees(3, 2, 2, 2, rank=5)
    assert here.coordinate() == Coordinate(0, 1, 0, 1)
    assert here.coordinate(here.rank_at(pipe=2)) == Coordinate(2, 1, 0, 1)


@settings(deadline=None)
@given(degrees, st.data())
def test_views_of_the_data_ranks(wanted: tuple[int, int, int, int], data: st.DataObject) -> None:
    plain = of_degrees(*wanted)
    count = plain.size("data")
    places = [n for n in topology.divisors(count) if plain.shard % n == 0 or n % plain.shard == 0]
    context, place = data.draw(st.sampled_from(topology.divisors(count))), data.draw(st.sampled_from(places))
    expert = place * plain.tensor if place > 1 else 1
    made = Topology.plan(
        plain.world_size,
        shard_degree=plain.shard,
        pipe=plain.pipe,
        tensor=plain.tensor,
        context=context,
        expert=expert,
    )
    assert (made.data_parallel_size * context, made.size("context"), made.size("expert")) == (count, context, expert)
    for rank in range(made.world_size):
        here = replace(made, rank=rank)
        assert here.data_rank == here.data_parallel_rank * context + here.context_rank
        assert here.ranks_along("data")[here.data_rank] == rank
        assert here.ranks_along("context")[here.context_rank] == rank
        assert here.ranks_along("batch")[here.data_parallel_rank] == rank
        assert here.ranks_along("expert")[here.expert_rank] == rank
        same = [other for other in here.ranks_along("data") if other % expert == rank % expert]
        assert list(here.ranks_along("expert_data")) == same
        assert list(here.ranks_along("expert_shard")) == ([r for r in here.ranks_along("shard") if r in same] or [rank])
    for axis in ("batch", "context", "expert", "expert_shard", "expert_replicate", "expert_data"):
        assert sorted(rank for group in made.groups(axis) for rank in group) == list(range(made.world_size))


def test_views_share_the_groups_of_the_axes_that_they_are(made_groups: Callable[[int], list[list[int]]]) -> None:
    listed = made_groups(8)
    made = Topology.create(8, 0, shard_degree=4, device_type="cpu", context=4, expert=2)
    before = len(listed)
    assert made.group("context") is made.group("shard")
    assert made.group("expert_replicate") is made.group("replicate") is made.group("batch")
    assert len(listed) == before
    assert made.group("expert") is made.group("expert")
    assert listed[before:] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_picture_has_the_views_in_use() -> None:
    picture = Topology.plan(8, shard_degree=4, context=2, expert=4).describe().splitlines()
    assert [" ".join(line.split()) for line in picture[-6:]] == [
        "batch 2 4 0, 2, 4, 6",
        "context 4 2 0-1",
        "expert 2 4 0-3",
        "expert_shard 8 1 0",
        "expert_replicate 4 2 0, 4",
        "expert_data 4 2 0, 4",
    ]


def test_a_topology_can_be_copied_and_sent() -> None:
    LARGE.coordinate(7)
    assert pickle.loads(pickle.dumps(LARGE)) == copy.deepcopy(LARGE) == LARGE
    assert hash(LARGE) == hash(replace(LARGE))


@pytest.mark.parametrize(
    ("look_up", "words"),
    [
        (lambda made: made.coordinate(8), "rank 8 lies outside the 8 ranks .*Remedy: use a rank in 0 to 7."),
        (lambda made: made.coordinate(-1), "rank -1"),
        (lambda made: made.ranks_along("pipe", 9), "rank 9"),
        (lambda made: made.ranks_along("row"), "'row'"),
        (lambda made: made.groups("model_parallel"), "'model_parallel'"),
        (lambda made: made.rank_at(pipe=2), "pipe = 2 .*Remedy: use pipe in 0 to 1."),
        (lambda made: made.rank_at(stage=0), "stage=0"),
        (lambda made: made.filter_match(data=0), "'data'"),
        (lambda made: made.group("shard"), "no process groups"),
        (lambda made: made.own_group(), "no process groups"),
    ],
)
def test_look_ups_of_what_is_not_there(look_up: Callable[[Topology], Any], words: str) -> None:
    with pytest.raises(TopologyError, match=words) as caught:
        look_up(of_degrees(2, 1, 2, 2))
    assert "Remedy: " in str(caught.value)


# -- degrees that do not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "wanted", "words"),
    [
        (12, {"pipe": 5, "tensor": 2}, ["pipe 5 x tensor 2 = 10", "size 12", "pipe degree of 1, 2, 3 or 6", "start 10"]),
        (8, {"tensor": 3}, ["pipe 1 x tensor 3", "tensor degree of 1, 2, 4 or 8"]),
        (7, {"pipe": 2, "tensor": 2}, ["world size 7", "start 4 ranks or a multiple", "product is 1 or 7"]),
        (4, {"pipe": 4, "tensor": 2}, ["= 8 ranks", "world size 4", "pipe degree of 1 or 2", "tensor degree of 1"]),
        (16, {"pipe": 2, "tensor": 2, "shard_degree": 3}, ["shard degree 3", "the 4 data-parallel", "[1, 2, 4]"]),
        (16, {"pipe": 2, "tensor": 2, "shard_degree": 8}, ["shard degree 8", "world size 16 / pipe 2 / tensor 2"]),
        (4, {"shard_degree": 3}, ["shard degree 3 does not divide the 4 data-parallel ranks. Remedy: set zero"]),
        (4, {"shard_degree": 0}, ["shard degree 0"]),
        (4, {"pipe": 0}, ["pipe degree is 0"]),
        (4, {"tensor": -2}, ["tensor degree is -2"]),
        (0, {}, ["world size is 0"]),
        (4, {"rank": 4}, ["rank 4", "world size 4"]),
        (24, {"tensor": 4, "ranks_per_host": 6}, ["tensor degree 4", "hosts of 6 ranks", "ranks 4 to 7", "1, 2, 3 or 6"]),
        (24, {"tensor": 12, "ranks_per_host": 8}, ["tensor degree 12", "hosts of 8", "ranks 0 to 11", "multiple of 12"]),
        (4, {"ranks_per_host": 0}, ["host has 0 ranks"]),
        (8, {"context": 3}, ["3 ranks are to divide each sequence", "sequence_parallel_size to one of [1, 2, 4, 8]"]),
        (8, {"expert": 3}, ["over 3 of the 8 data-parallel ranks,", "expert_parallel.autoep_size to 1, 2, 4 or 8"]),
        (12, {"expert": 3, "shard_degree": 4}, ["4 of which divide the states", "autoep_size to 1, 2, 4 or 12"]),
        (8, {"expert": 2, "tensor": 4}, ["x 4 tensor ranks", "expert_parallel.autoep_size to 1, 4 or 8"]),
    ],
)
def test_degrees_that_do_not_fit(
    world_size: int, wanted: dict[str, int], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error that names them and says what would do, before any group is made."""
    monkeypatch.setattr(topology, "init_device_mesh", lambda *_, **__: pytest.fail("groups were made"))
    with pytest.raises(TopologyError) as planned:
        Topology.plan(world_size, **wanted)
    with pytest.raises(TopologyError) as created:
        Topology.create(world_size, wanted.pop("rank", 0), device_type="cpu", **wanted)
    assert str(planned.value) == str(created.value)
    assert "Remedy: " in str(planned.value)
    for part in words:
        assert part in str(planned.value)


def test_tensor_groups_of_whole_hosts_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(topology, "warn_once", given.append)
    Topology.plan(32, tensor=16, ranks_per_host=8)
    assert len(given) == 1
    assert "span 2 hosts of 8 ranks" in given[0]
    for world_size, tensor in ((32, 8), (32, 2), (32, 1), (8, 8)):
        Topology.plan(world_size, tensor=tensor, ranks_per_host=8)
    Topology.plan(6, tensor=3, ranks_per_host=8)  # all on one host
    assert len(given) == 1


# -- process groups, in one process ------------------------------------------------------------------------------


@pytest.fixture
def made_groups(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[list[int]]]:
    """Starts a world of ranks that only this process plays; gives the list of groups made in it."""
    made: list[list[int]] = []
    real = dist.new_group

    def count(ranks: list[int] | None = None, **options: Any) -> Any:
        made.append(list(ranks or []))
        return real(ranks, **options)

    def start(world_size: int) -> list[list[int]]:
        if dist.is_initialized():  # a test of another file has left a group of one
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        return made

    monkeypatch.setattr(dist.distributed_c10d, "new_group", count)
    monkeypatch.setattr("torch.distributed.device_mesh.new_group", count)
    yield start  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "options", "axes"),
    [
        (8, {}, []),
        (8, {"shard_degree": 1}, []),
        (8, {"tensor": 8}, []),
        (8, {"pipe": 8}, []),
        (1, {}, []),
        (8, {"shard_degree": 2}, ["replicate", "shard"]),
        (8, {"tensor": 2}, ["shard", "tensor"]),
        (16, {"pipe": 2, "tensor": 2, "shard_degree": 2}, list(AXES)),
        (4096, {"pipe": 16, "tensor": 8, "shard_degree": 8}, list(AXES)),
    ],
)
def test_only_groups_that_are_needed_are_made(
    world_size: int, options: dict[str, int], axes: list[str], made_groups: Callable[[int], list[list[int]]]
) -> None:
    made = made_groups(world_size)
    created = Topology.create(world_size, 0, device_type="cpu", **options)
    assert made == [list(group) for axis in axes for group in created.groups(axis)]
    for axis in EVERY_AXIS:
        if created.size(axis) == 1 and axis in ("pipe", "tensor"):
            with pytest.raises(TopologyError, match=f"topology.{axis} is 1"):
                created.group(axis)
        elif created.size(axis) == world_size > 1:
            assert created.group(axis) is dist.group.WORLD
    created.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1


def test_groups_beside_the_mesh_are_made_once_and_given_back(made_groups: Callable[[int], list[list[int]]]) -> None:
    made = made_groups(16)
    created = Topology.create(16, 0, device_type="cpu", pipe=2, tensor=2, shard_degree=2)
    del made[:]
    for axis in ("data", "model"):
        assert created.group(axis) is created.group(axis)
        assert made == [list(group) for group in created.groups(axis)]
        del made[:]
    assert created.own_group().size() == 1
    created.close()
    created.close()
    assert len(dist.distributed_c10d._world.pg_map) == 1
    with pytest.raises(TopologyError, match="closed"):
        created.group("data")


def test_composite_axes_share_the_groups_of_their_only_member(made_groups: Callable[[int], list[list[int]]]) -> None:
    made = made_groups(8)
    created = Topology.create(8, 0, device_type="cpu", tensor=2)
    del made[:]
    assert created.group("data") is created.group("shard")
    assert created.group("model") is created.group("tensor")
    assert created.group("replica") is dist.group.WORLD
    assert not made
    created.close()
    created = Topology.create(8, 0, device_type="cpu", pipe=2, tensor=2, shard_degree=1)
    assert created.group("model") is created.group("replica")
    created.close()


def test_a_topology_is_of_the_whole_job(made_groups: Callable[[int], list[list[int]]]) -> None:
    made_groups(8)
    with pytest.raises(TopologyError, match=r"has 4 ranks, but torch\.distributed runs 8"):
        Topology.create(4, 0, device_type="cpu")


# -- DeepSpeed's look-ups ----------------------------------------------------------------------------------------

REFUSALS = (ValueError, AssertionError, TypeError, AttributeError, KeyError)
named = st.lists(st.sampled_from(["pipe", "data", "model", "expert", "x", "y"]), min_size=1, max_size=4, unique=True)


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        return pytest.importorskip("deepspeed.runtime.pipe.topology")


def same(ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Equal answers, or TopologyError where DeepSpeed raises."""
    try:
        expected = theirs()
    except REFUSALS:
        with pytest.raises(TopologyError):
            ours()
        return
    answer = ours()
    assert answer == expected
    assert getattr(answer, "_fields", None) == getattr(expected, "_fields", None)


@settings(max_examples=60, deadline=None)
@given(named, st.data())
def test_process_topology_answers_as_deepspeeds(deepspeed: Any, axes: list[str], data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(1, 4), min_size=len(axes), max_size=len(axes)))
    ours, theirs = ProcessTopology(axes, dims), deepspeed.ProcessTopology(axes, dims)
    assert ours.world_size() == theirs.world_size()
    assert ours.get_axis_names() == theirs.get_axis_names()
    assert ours.mapping == theirs.mapping
    assert ours.ProcessCoord._fields == theirs.ProcessCoord._fields
    omitted = data.draw(st.lists(st.sampled_from(axes)))
    for rank in range(-1, ours.world_size() + 1):
        same(lambda rank=rank: ours.get_coord(rank), lambda rank=rank: theirs.get_coord(rank))
        if 0 <= rank < ours.world_size():
            assert ours.get_rank(**ours.get_coord(rank)._asdict()) == rank
            assert ours.get_rank_repr(rank) == theirs.get_rank_repr(rank)
            assert ours.get_rank_repr(rank, omitted, "-", "/") == theirs.get_rank_repr(rank, omitted, "-", "/")
    for axis in [*axes, "nothing"]:
        assert ours.get_dim(axis) == theirs.get_dim(axis)
        assert ours.get_axis_comm_lists(axis) == theirs.get_axis_comm_lists(axis)
        for index in range(-1, 5):
            same(lambda a=axis, i=index: ours.get_axis_list(a, i), lambda a=axis, i=index: theirs.get_axis_list(a, i))
    some = st.dictionaries(st.sampled_from([*axes, "nothing"]), st.integers(-1, 4))
    for coords in data.draw(st.lists(some, min_size=4, max_size=4)):
        if "nothing" in coords:  # DeepSpeed looks at this axis only if the others match
            with pytest.raises(TopologyError, match="nothing"):
                ours.filter_match(**coords)
        else:
            assert ours.filter_match(**coords) == theirs.filter_match(**coords)
        same(lambda c=coords: ours.get_rank(**c), lambda c=coords: theirs.get_rank(**c))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("PipeDataParallelTopology", {"num_pp": 3, "num_dp": 2}),
        ("PipeModelDataParallelTopology", {"num_pp": 2, "num_mp": 3, "num_dp": 4}),
    ],
)
def test_the_ready_made_ones_are_deepspeeds(deepspeed: Any, name: str, arguments: dict[str, int]) -> None:
    ours, theirs = getattr(zerorun, name)(**arguments), getattr(deepspeed, name)(**arguments)
    assert (ours.axes, ours.dims, ours.mapping) == (theirs.axes, theirs.dims, theirs.mapping)
    assert isinstance(ours, zerorun.ProcessTopology)


@pytest.mark.parametrize(
    ("axes", "dims"),
    [([], []), (["x"], [2, 3]), (["x", "x"], [2, 2]), (["x"], [0]), (["two words"], [2]), (["class"], [2]), (["_x"], [1])],
)
def test_process_topologies_that_cannot_be(axes: list[str], dims: list[int]) -> None:
    with pytest.raises(TopologyError, match="Remedy: "):
        ProcessTopology(axes, dims)


@settings(max_examples=40, deadline=None)
@given(degrees)
def test_both_number_ranks_alike(wanted: tuple[int, int, int, int]) -> None:
    made = of_degrees(*wanted)
    processes = made.process_topology
    assert Topology.from_process_topology(processes, 0, shard_degree=made.shard) == made
    for rank in range(made.world_size):
        here, place = replace(made, rank=rank), processes.get_coord(rank)
        assert (here.pipe_rank, here.data_parallel_rank, here.tensor_rank) == place
    for axis, theirs in (("pipe", "pipe"), ("data", "data"), ("tensor", "model")):
        assert [list(group) for group in made.groups(axis)] == processes.get_axis_comm_lists(theirs)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (PipeDataParallelTopology(2, 3), (2, 1, 3, 1)),
        (PipeModelDataParallelTopology(2, 4, 3), (2, 1, 3, 4)),
        (ProcessTopology(["data"], [4]), (1, 1, 4, 1)),
        (ProcessTopology(["model"], [4]), (1, 1, 1, 4)),
        (ProcessTopology(["data", "model"], [2, 4]), (1, 1, 2, 4)),
        (ProcessTopology(["model", "pipe", "data"], [1, 2, 4]), (2, 1, 4, 1)),  # an axis of one rank may lie anywhere
    ],
)
def test_topology_of_a_process_topology(processes: ProcessTopology, expected: tuple[int, ...]) -> None:
    made = Topology.from_process_topology(processes, 1)
    assert made.rank == 1
    assert (made.pipe, made.replicate, made.shard, made.tensor) == expected


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (ProcessTopology(["model", "data"], [2, 2]), "data, model"),
        (ProcessTopology(["data", "pipe"], [2, 2]), "pipe, data"),
        (ProcessTopology(["pipe", "expert"], [2, 2]), "'expert'"),
        (PipeDataParallelTopology(2, 2), "shard degree 4"),
    ],
)
def test_process_topologies_that_number_ranks_otherwise(processes: ProcessTopology, words: str) -> None:
    with pytest.raises(TopologyError, match=words) as caught:
        Topology.from_process_topology(processes, 0, shard_degree=4 if "shard" in words else None)
    assert "Remedy: " in str(caught.value)


# -- the mpu -----------------------------------------------------------------------------------------------------

NUMBERS = [
    *(f"get_{kind}_parallel_{what}" for kind in ("pipe", "data", "model", "slice") for what in ("rank", "world_size")),
    *(f"get_{kind}_model_parallel_{what}" for kind in ("pipeline", "tensor") for what in ("rank", "world_size")),
    *("get_global_rank", "get_stage_id", "get_data_parallel_id", "get_data_parallel_group_ranks"),
]
THEIR_GROUPS = {"pipe": "pipe", "data": "data", "model": "model", "slice": "tensor"}  # names in methods, our axes


def groups_asked_for(method: str, rank_groups: Any) -> Any:
    return getattr(rank_groups, f"get_{method}_parallel_group")()


@pytest.mark.parametrize("wanted", [(2, 1, 2, 2), (2, 2, 2, 1), (1, 1, 4, 2), (4, 1, 1, 2), (1, 1, 1, 1), (3, 1, 2, 2)])
def test_the_grid_answers_as_deepspeeds(deepspeed: Any, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(of_degrees(*wanted).world_size):
        made = of_degrees(*wanted, rank=rank)
        ranks_of = SimpleNamespace(
            get_rank=lambda rank=rank: rank,
            get_world_size=lambda made=made: made.world_size,
            new_group=lambda ranks: list(ranks),  # its groups are lists of ranks here
        )
        monkeypatch.setattr(deepspeed, "dist", ranks_of)
        theirs = deepspeed.PipelineParallelGrid(
            deepspeed.PipeModelDataParallelTopology(made.pipe, made.tensor, made.data_parallel_size)
        )
        ours = Grid(made)
        for name in NUMBERS:
            assert getattr(ours, name)() == getattr(theirs, name)(), name
        assert (ours.is_first_stage, ours.is_last_stage) == (theirs.is_first_stage, theirs.is_last_stage)
        assert ours.topology().mapping == theirs.topology().mapping
        for name, axis in THEIR_GROUPS.items():
            assert groups_asked_for(name, theirs) == list(made.ranks_along(axis))
        for stage in range(made.pipe):
            assert ours.stage_to_global(stage) == theirs.stage_to_global(stage)
            assert ours.stage_to_global(stage, data=0, model=0) == theirs.stage_to_global(stage, data=0, model=0)


def test_source_ranks_are_the_first_of_their_groups() -> None:
    made = of_degrees(2, 2, 2, 2, rank=13)
    grid = Grid(made)
    assert grid.get_tensor_model_parallel_src_rank() == made.ranks_along("tensor")[0] == 12
    assert grid.get_data_parallel_src_rank() == made.ranks_along("data")[0] == 9
    assert grid.get_model_parallel_src_rank() == made.ranks_along("model")[0] == 4
    assert (grid.is_pipeline_first_stage(), grid.is_pipeline_last_stage()) == (False, True)
    with pytest.raises(TopologyError, match="pipe = 2"):
        grid.stage_to_global(2)


# -- the picture -------------------------------------------------------------------------------------------------


def test_picture_of_8_ranks() -> None:
    assert of_degrees(2, 1, 2, 2).describe(4).splitlines() == [
        "8 ranks = pipe 2 x replicate 1 x shard 2 x tensor 2; ranks rise fastest along tensor",
        "",
        "                     shard 0   shard 1",
        "pipe 0, replicate 0      0-1       2-3   host 0",
        "pipe 1, replicate 0      4-5       6-7   host 1",
        "",
        "A cell is a tensor group, a row holds one copy of its stage's states.",
        "A bar stands where another host of 4 ranks begins.",
        "",
        "axis       groups  of  the first",
        "tensor          4   2  0-1",
        "shard           4   2  0, 2",
        "replicate       8   1  0",
        "pipe            4   2  0, 4",
        "data            4   2  0, 2",
    ]


@pytest.mark.parametrize("ranks_per_host", [None, 8])
@pytest.mark.parametrize(
    "made", [LARGE, Topology(1, 4096, 0), Topology(4096, 1, 0), Topology(1, 1, 0, 4096), Topology(1, 1, 0)]
)
def test_picture_stays_readable(made: Topology, ranks_per_host: int | None) -> None:
    lines = made.describe(ranks_per_host).splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 160
    assert not any(line.endswith(" ") for line in lines)
    text = "\n".join(lines)
    assert all(axis in text for axis in AXES)
    assert str(made.world_size - 1) in text
    if made is LARGE:
        assert "... 50 rows more" in text
        assert "pipe          256  16  0, 256, 512, 768, ..., 3584, 3840" in text
        assert ("hosts 504-511" in text) == (ranks_per_host is not None)


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert topology.main(["--world-size", "64", "--tensor", "8", "--pipe", "2", "--ranks-per-host", "8"]) == 0
    assert capsys.readouterr().out == Topology.plan(64, tensor=8, pipe=2).describe(8) + "\n"
    config = tmp_path / "ds.json"
    config.write_text('{"tensor_parallel": {"size": 8}, "pipeline": {"stages": 2}}')
    assert topology.main(["--world-size", "64", "--config", str(config), "--pipe", "4"]) == 0
    assert capsys.readouterr().out == Topology.plan(64, tensor=8, pipe=4).describe() + "\n"
    config.write_text('{"sequence_parallel_size": 4, "expert_parallel": {"enabled": true, "autoep_size": 2}}')
    assert topology.main(["--world-size", "8", "--config", str(config), "--expert", "8"]) == 0
    assert capsys.readouterr().out == Topology.plan(8, context=4, expert=8).describe() + "\n"
    assert topology.main(["--world-size", "64", "--config", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert topology.main(["--world-size", "64", "--tensor", "7"]) == 2
    captured = capsys.readouterr()
    assert "tensor 7" in captured.err
    assert not captured.out


@pytest.mark.nightly  # by day: unit/test_import_paths.py
def test_run_as_a_module() -> None:
    command = [sys.executable, "-m", "zerorun.distributed.topology", "--world-size", "8", "--shard", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * patience())
    assert (done.returncode, done.stderr) == (0, "")
    assert "replicate 4 x shard 2" in done.stdout
