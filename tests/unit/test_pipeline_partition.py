"""Cuts of layers into parts: complete and contiguous for every method, as even as can be, and the errors."""

from __future__ import annotations

import time
from functools import cache
from itertools import combinations, pairwise

import pytest
from harness import patience
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerorun.errors import PipelineError
from zerorun.pipeline.partition import LayerFacts, Measured, bounds_of, partition

WEIGHTS = st.lists(st.integers(0, 9) | st.floats(0, 1e3) | st.just(0), min_size=1, max_size=9)


def layers_of(numels: list[int]) -> list[LayerFacts]:
    return [LayerFacts("Block" if index % 3 else "Embedding", numel) for index, numel in enumerate(numels)]


def largest(weights: list[float], bounds: tuple[int, ...]) -> float:
    return max(sum(weights[start:end]) for start, end in pairwise(bounds))


def every_cut(layers: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in combinations(range(1, layers), parts - 1)]


@cache
def numels(layers: int) -> list[int]:
    """An embedding, blocks that grow, a large head."""
    return [50 * layers, *(10 + index // 3 for index in range(layers - 2)), 90 * layers][:layers]


@pytest.mark.parametrize("method", ["uniform", "parameters", "best", "type:block|embedding", "measured", "bytes"])
def test_every_cut_is_contiguous_disjoint_and_complete(method: str) -> None:
    for count in range(1, 65):
        layers = layers_of(numels(count))
        seconds = [0.1 * (index % 4) for index in range(count)]
        own = {
            "measured": Measured(seconds),
            "bytes": Measured(seconds, numels(count), sum(numels(count))),
        }.get(method, method)
        for parts in range(1, min(count, 16) + 1):
            bounds = bounds_of(own, layers, parts)
            assert bounds[0] == 0
            assert bounds[-1] == count
            assert len(bounds) == parts + 1
            assert all(start < end for start, end in pairwise(bounds))
        for parts in range(count + 1, 17):
            with pytest.raises(PipelineError, match=rf"{count} layers cannot be cut into {parts} parts.*Remedy"):
                bounds_of(own, layers, parts)


@settings(max_examples=300, deadline=None)
@given(WEIGHTS, st.integers(1, 9))
@example([0, 0, 0], 3)
@example([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 3)
def test_the_largest_part_is_as_small_as_any_cut_makes_it(weights: list[float], parts: int) -> None:
    parts = min(parts, len(weights))
    best = min(largest(weights, bounds) for bounds in every_cut(len(weights), parts))
    assert largest(weights, partition(weights, parts)) == pytest.approx(best, rel=1e-12)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_measured_cuts_are_the_fastest_that_keep_to_the_byte_limit(data: st.DataObject, parts: int) -> None:
    count = data.draw(st.integers(parts, 8))
    seconds = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    limit = data.draw(st.integers(1, 30))
    allowed = [bounds for bounds in every_cut(count, parts) if largest(sizes, bounds) <= limit]
    method = Measured(seconds, sizes, limit)
    if not allowed:
        with pytest.raises(PipelineError, match="the best one needs"):
            bounds_of(method, layers_of(sizes), parts)
        return
    found = bounds_of(method, layers_of(sizes), parts)
    assert largest(sizes, found) <= limit
    assert largest(seconds, found) == min(largest(seconds, bounds) for bounds in allowed)


def test_parts_are_even_beyond_the_largest_one() -> None:
    for layers in range(1, 40):
        for parts in range(1, min(layers, 12) + 1):
            counts = [end - start for start, end in pairwise(partition([1] * layers, parts))]
            assert max(counts) - min(counts) <= 1
    assert partition([9, 1, 1, 1, 1], 3) == (0, 1, 3, 5)
    assert partition([0] * 6, 3) == (0, 2, 4, 6)


def test_a_large_model_is_cut_at_once() -> None:
    weights = [((index * 7919) % 1000) / 7 for index in range(10_000)]
    start = time.perf_counter()
    bounds = partition(weights, 64)
    assert time.perf_counter() - start < 2 * patience()
    assert largest(weights, bounds) < 1.01 * sum(weights) / 64 + max(weights)


def test_a_list_says_where_to_cut() -> None:
    layers = layers_of([1] * 5)
    assert bounds_of([2, 0, 3], layers, 3) == (0, 2, 2, 5)
    assert bounds_of([0, 2, 2, 5], layers, 3) == (0, 2, 2, 5)
    assert bounds_of((5,), layers, 1) == (0, 5)
    assert bounds_of([1, 0, 0], layers_of([1]), 3) == (0, 1, 1, 1)
    for wrong in ([2, 2, 2], [0, 3, 2, 5], [0, 2, 5], [1, 2, 3, 5], [6, -1, 0], [2, 0, 3.5]):
        with pytest.raises(PipelineError, match="Remedy"):
            bounds_of(wrong, layers, 3)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="3 counts that add up to 5, or 4 ascending bounds from 0 to 5"):
        bounds_of([2, 2, 2], layers, 3)


def test_types_are_counted_in_any_case() -> None:
    layers = [LayerFacts(name, 1) for name in ("Embedding", "Block", "Block", "gelu", "BLOCK", "block", "Head")]
    bounds = bounds_of("TYPE:^block$", layers, 2)
    assert [sum(layer.class_name.lower() == "block" for layer in layers[a:b]) for a, b in pairwise(bounds)] == [2, 2]
    with pytest.raises(PipelineError, match=r"matches no layer.*Embedding, Block, gelu, BLOCK"):
        bounds_of("type:Decoder", layers, 2)
    with pytest.raises(PipelineError, match="no regular expression"):
        bounds_of("type:(", layers, 2)


@pytest.mark.parametrize(
    ("method", "parts", "message"),
    [
        ("profile", 2, "'profile' is not known"),
        ("uniform", 0, "at least one is needed"),
        (Measured([1.0]), 2, "1 times were given for 4 layers"),
        (Measured([1.0, 2.0, -1.0, 0.0]), 2, "the time of layer 2 is -1.0"),
        (Measured([1.0, 2.0, float("nan"), 0.0]), 2, "the time of layer 2 is nan"),
        (Measured([1.0] * 4, None, 10), 2, "without bytes"),
        (Measured([1.0] * 4, [5] * 3, 10), 2, "3 numbers of bytes"),
        (Measured([1.0] * 4, [5, 30, 5, 5], 20), 2, "keeps to 20 bytes.*needs 35"),
    ],
)
def test_what_cannot_be_cut_is_refused(method: str | Measured, parts: int, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        bounds_of(method, layers_of([1] * 4), parts)


def test_chunks_share_the_byte_limit_of_a_stage() -> None:
    method = Measured([1.0] * 4, [5] * 4, 10)
    assert bounds_of(method, layers_of([1] * 4), 4, chunks=2) == (0, 1, 2, 3, 4)
    with pytest.raises(PipelineError, match="keeps to 2 bytes"):
        bounds_of(method, layers_of([1] * 4), 4, chunks=4)
