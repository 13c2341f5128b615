"""Hosts with different numbers of ranks: all ranks make the same groups, or all raise the same error."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_ranks
from models import CASES
from reference import Result, differences, train_reference
from training import make_config, make_engine, train

from zerorun.config.parse import load_config
from zerorun.distributed.quantised_hops import QuantisedHop, plan_hops
from zerorun.errors import TopologyError
from zerorun.model_setup.job_topology import sizes_of_hosts, topology_of_job

CASE, STEPS = CASES["plain"], 2


@contextmanager
def on_hosts(here: Sequence[int]) -> Iterator[None]:
    """As if a launcher had told each rank that so many are on its host."""
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(here[dist.get_rank()])
    try:
        yield
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


def shards(here: Sequence[int], config: dict[str, Any]) -> tuple[int, tuple[QuantisedHop, ...]] | str:
    """The ranks that divide the states, and the hops of their sums; or the error."""
    with on_hosts(here):
        try:
            made = topology_of_job(load_config(config))
        except TopologyError as error:
            return str(error)
    return made.shard, plan_hops(made, between=4)


HYBRID = make_config(3, zero_optimization={"hybrid_shard": True})


@pytest.mark.parametrize(
    ("here", "config", "words"),
    [
        ((2, 2, 1, 1), HYBRID, ["hybrid_shard", "1 x 2 ranks, 2 x 1 ranks", "shard_degree"]),
        (
            (3, 3, 3, 1),
            make_config(1, tensor_parallel={"size": 2}),
            ["degree 2", "1 x 3 ranks, 1 x 1 ranks", "of 1,"],
        ),
    ],
)
def test_groups_that_are_nodes_are_refused_on_all_ranks(
    here: tuple[int, ...], config: dict[str, Any], words: list[str]
) -> None:
    (error,) = set(run_ranks(4, shards, here, config))
    assert isinstance(error, str) and "Remedy: " in error
    for part in words:
        assert part in error


@pytest.mark.parametrize(
    ("here", "config", "shard", "hops"),
    [
        ((2, 2, 2, 2), HYBRID, 2, [2]),
        ((4, 4, 4, 4), HYBRID, 4, [4]),
        ((2, 2, 1, 1), make_config(3), 4, [4]),
        ((2, 2, 2, 2), make_config(3), 4, [2, 2]),
    ],
)
def test_all_ranks_make_the_same_groups(here: tuple[int, ...], config: dict[str, Any], shard: int, hops: list[int]) -> None:
    (found,) = set(run_ranks(4, shards, here, config))
    assert isinstance(found, tuple)
    assert (found[0], [hop.size for hop in found[1]]) == (shard, hops)


def train_on(here: Sequence[int], config: dict[str, Any]) -> Result:
    with on_hosts(here):
        return train(CASE, config, STEPS, topology=None)


def test_training_on_unequal_hosts_equals_one_process() -> None:
    for found in run_ranks(3, train_on, (2, 2, 1), make_config(3)):
        assert not differences(found, train_reference(CASE, world_size=3, steps=STEPS))


def shards_of_an_engine(here: Sequence[int]) -> str:
    with on_hosts(here), pytest.raises(TopologyError) as raised:
        make_engine(CASE, HYBRID, topology=None)
    return str(raised.value)


def test_initialize_raises_on_all_ranks() -> None:
    (error,) = set(run_ranks(3, shards_of_an_engine, (2, 2, 1)))
    assert "hybrid_shard" in error


def test_the_sizes_of_hosts() -> None:
    """By what launchers tell; by names, if one does not."""
    assert sizes_of_hosts([(1, "a"), (2, "b"), (2, "b"), (1, "c")]) == [2, 1, 1]
    assert sizes_of_hosts([(2, "a"), (2, "a"), (2, "a"), (2, "a")]) == [2, 2]  # containers may have one name
    assert sizes_of_hosts([(None, "a"), (2, "a"), (None, "b")]) == [2, 1]
    assert sizes_of_hosts([(None, "a")]) == [1]
