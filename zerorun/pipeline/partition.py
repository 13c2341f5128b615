"""Partition: cuts a list of layers into contiguous parts. Pure arithmetic.

A cut into p parts of n layers is its *bounds*: p + 1 ascending numbers from 0 to n; part k has the layers
``bounds[k] .. bounds[k + 1] - 1``.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..errors import PipelineError

Bounds = tuple[int, ...]


@dataclass(frozen=True)
class LayerFacts:
    """What a cut may depend on: the layer's class name, and the number of elements of its trainable parameters."""

    class_name: str
    trainable_numel: int


@dataclass(frozen=True)
class Measured:
    """A cut by measurement: ``seconds`` per layer and, with a ``byte_limit`` for each stage, ``bytes`` per layer."""

    seconds: Sequence[float]
    bytes: Sequence[int] | None = None
    byte_limit: int | None = None


Method = str | Sequence[int] | Measured


def bounds_of(method: Method, layers: Sequence[LayerFacts], parts: int, chunks: int = 1) -> Bounds:
    """Cut ``layers`` into ``parts`` by ``method``. A stage has ``chunks`` parts, which share its byte limit evenly.

    method: what the parts balance: "uniform" (number of layers), "parameters" or "best" (trainable elements), "type:REGEX"
    (number of layers whose class name matches, ignoring case) or ``Measured`` (seconds). Or a list of ``parts + 1`` bounds
    or of ``parts`` counts; only a list can ask for a part without layers.
    Raises PipelineError.
    """
    if parts < 1:
        raise PipelineError(f"a pipeline of {parts} parts: at least one is needed. Remedy: give a positive number.")
    if isinstance(method, Measured):
        return _by_measurement(method, len(layers), parts, chunks)
    if not isinstance(method, str):
        return _explicit(method, len(layers), parts)
    name = method.lower()
    if name == "uniform":
        return partition([1] * len(layers), parts)
    if name in ("parameters", "best"):
        return partition([layer.trainable_numel for layer in layers], parts)
    if name.startswith("type:"):
        return partition(_matches(method[len("type:") :], layers), parts)
    raise PipelineError(
        f"partition_method = {method!r} is not known. Remedy: use 'uniform', 'parameters', 'best', 'type:REGEX', a list of "
        "bounds or of layers per stage, or Measured(seconds)."
    )


def partition(weights: Sequence[float], parts: int) -> Bounds:
    """Return the cut into ``parts`` contiguous parts, none empty, whose largest sum of ``weights`` is as small as possible.

    It is exact, and takes O(n + parts * log(n) * log(sum)) for n weights. Of the best cuts it is one with even parts.
    Raises PipelineError for fewer layers than parts, and for weights that are negative or not finite.
    """
    weighed = any(_checked(weights, "weight"))
    return _cut(weights if weighed else [1] * len(weights), None, math.inf, parts)


def _cut(weights: Sequence[float], sizes: Sequence[int] | None, limit: float, parts: int) -> Bounds:
    """Make the largest part's weight as small as possible, with at most ``limit`` as the sum of ``sizes`` of any part."""
    if len(weights) < parts:
        raise _too_few(len(weights), parts)
    walk = _Walk(weights, sizes, limit)
    best = walk.smallest(parts)
    return _even(walk, best, parts)


class _Walk:
    """Sums over ranges of layers, and the greedy walk that fills one part after the other as far as possible."""

    def __init__(self, weights: Sequence[float], sizes: Sequence[int] | None, limit: float) -> None:
        self.numel = len(weights)
        self.total = list(accumulate(weights, initial=0))
        self._filled = list(accumulate(sizes, initial=0)) if sizes is not None else None
        self._limit = limit

    def sum(self, start: int, end: int) -> float:
        return self.total[end] - self.total[start]

    def end(self, start: int, weight: float) -> int:
        """Return the farthest end of a part that begins at ``start`` and weighs at most ``weight``."""
        # The first guess can be off by a layer, because total[start] + weight is rounded. ``sum`` decides everywhere.
        found = bisect_right(self.total, self.total[start] + weight, lo=start) - 1
        while found < self.numel and self.sum(start, found + 1) <= weight:
            found += 1
        while found > start and self.sum(start, found) > weight:
            found -= 1
        if self._filled is not None:
            found = min(found, bisect_right(self._filled, self._filled[start] + self._limit) - 1)
        return found

    def smallest(self, parts: int) -> float:
        """Return the smallest weight that ``parts`` parts can keep to. Exact, as every candidate is the sum of a range."""
        low, high = 0.0, float(self.sum(0, self.numel))
        while low < high:
            middle = low + (high - low) / 2
            middle = low if middle >= high else middle  # neighbouring floats
            start, largest, following = 0, 0.0, math.inf
            for _ in range(parts):
                end = self.end(start, middle)
                largest = max(largest, self.sum(start, end))
                if end < self.numel:
                    overflow = self.sum(start, end + 1)
                    following = min(following, overflow if overflow > middle else math.inf)
                start = end
            if start == self.numel:
                high = largest
            else:  # below ``following`` the walk would stop at the same layers, and fail again
                low = min(following, high)
        return high


def _even(walk: _Walk, weight: float, parts: int) -> Bounds:
    """Return a cut in which no part exceeds ``weight`` and each is as near as possible to the mean of what is left."""
    latest = [walk.numel]  # latest[k]: the earliest layer at which the last k parts can begin
    for _ in range(parts):
        latest.append(_first_start(walk, weight, latest[-1]))
    bounds = [0]
    for left in range(parts - 1, 0, -1):
        start = bounds[-1]
        low = max(start + 1, latest[left])
        high = min(walk.end(start, weight), walk.numel - left)
        target = walk.total[start] + walk.sum(start, walk.numel) / (left + 1)
        end = bisect_right(walk.total, target, lo=start) - 1
        if end < walk.numel and walk.total[end + 1] - target <= target - walk.total[end]:
            end += 1
        bounds.append(min(max(end, low), high))
    return (*bounds, walk.numel)


def _first_start(walk: _Walk, weight: float, end: int) -> int:
    """Return the smallest start from which one part of at most ``weight`` reaches ``end``."""
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if walk.end(middle, weight) >= end:
            high = middle
        else:
            low = middle + 1
    return low


def _too_few(layers: int, parts: int) -> PipelineError:
    return PipelineError(
        f"{layers} layers cannot be cut into {parts} parts: a part would have no layer. Remedy: use at most {layers} "
        "stages (times chunks), or ask for empty stages with a list of layers per stage as partition_method."
    )


def _checked(weights: Sequence[float], noun: str) -> Sequence[float]:
    for index, weight in enumerate(weights):
        if not weight >= 0 or weight == math.inf:
            raise PipelineError(f"the {noun} of layer {index} is {weight}. Remedy: give finite numbers from 0 on.")
    return weights


def _matches(pattern: str, layers: Sequence[LayerFacts]) -> list[int]:
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PipelineError(
            f"partition_method = 'type:{pattern}' is no regular expression: {error}. Remedy: correct it, or escape it."
        ) from None
    weights = [1 if wanted.search(layer.class_name) else 0 for layer in layers]
    if not any(weights):
        classes = ", ".join(dict.fromkeys(layer.class_name for layer in layers))
        raise PipelineError(
            f"partition_method = 'type:{pattern}' matches no layer. The layers are of the classes {classes}. "
            "Remedy: name one of these."
        )
    return weights


def _explicit(given: Sequence[int], layers: int, parts: int) -> Bounds:
    values = [int(value) for value in given]
    if values != list(given):
        raise PipelineError(f"partition_method = {list(given)} has values that are not whole. Remedy: give integers.")
    if len(values) == parts and sum(values) == layers and min(values) >= 0:
        return tuple(accumulate(values, initial=0))
    ascending = all(before <= after for before, after in pairwise(values))
    if len(values) == parts + 1 and values[0] == 0 and values[-1] == layers and ascending:
        return tuple(values)
    raise PipelineError(
        f"partition_method = {values} does not cut {layers} layers into {parts} parts. Remedy: give {parts} counts that "
        f"add up to {layers}, or {parts + 1} ascending bounds from 0 to {layers}."
    )


def _by_measurement(measured: Measured, layers: int, parts: int, chunks: int) -> Bounds:
    _checked(measured.seconds, "time")
    _one_per_layer(len(measured.seconds), layers, "times")
    if measured.byte_limit is None:
        return partition(measured.seconds, parts)
    if measured.bytes is None:
        raise PipelineError("a byte limit was given without bytes. Remedy: give Measured(bytes=...) as well.")
    _checked(measured.bytes, "number of bytes")
    _one_per_layer(len(measured.bytes), layers, "numbers of bytes")
    if layers < parts:
        raise _too_few(layers, parts)
    limit = measured.byte_limit // chunks
    bounds = partition(measured.bytes, parts)
    needed = max(sum(measured.bytes[start:end]) for start, end in pairwise(bounds))
    if needed > limit:
        raise PipelineError(
            f"no cut of {layers} layers into {parts} parts keeps to {limit} bytes for each: the best one needs {needed}. "
            "Remedy: use more stages, recompute activations, or raise the limit."
        )
    return _cut(measured.seconds, measured.bytes, limit, parts)


def _one_per_layer(given: int, layers: int, noun: str) -> None:
    if given != layers:
        raise PipelineError(f"{given} {noun} were given for {layers} layers. Remedy: give one for each layer.")
