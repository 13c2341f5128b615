"""ProcessTopology: ranks numbered over named axes, with the look-ups of DeepSpeed's class of that name. Pure data.

Arguments and answers are DeepSpeed's; its errors (ValueError, AssertionError, AttributeError) are TopologyError here.
Coordinates are computed when asked for and not kept in a table, so that the cost of a look-up grows only with the
length of its answer.
"""

from __future__ import annotations

import keyword
from collections import namedtuple
from collections.abc import Collection, Sequence
from functools import cached_property
from math import prod
from typing import Any

from ..errors import TopologyError


class ProcessTopology:
    """``prod(dims)`` ranks, numbered row-major over ``axes``: the last axis varies fastest.

    ``axes``: distinct names. ``dims``: the degree of each, at least 1. Raises TopologyError.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        _check(self.axes, self.dims)
        self._strides = [prod(self.dims[place + 1 :]) for place in range(len(self.dims))]

    def __repr__(self) -> str:
        degrees = ", ".join(f"{axis}={dim}" for axis, dim in zip(self.axes, self.dims, strict=True))
        return f"{type(self).__name__}({degrees})"

    @cached_property
    def ProcessCoord(self) -> Any:
        """The type of coordinates: a named tuple with one index for each axis."""
        return namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]

    @property
    def mapping(self) -> dict[Any, int]:
        """The rank of every coordinate."""
        return {self.get_coord(rank): rank for rank in range(self.world_size())}

    def world_size(self) -> int:
        """How many ranks there are."""
        return prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """The names of the axes, the outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The degree of ``axis``; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coords: int) -> int:
        """Return the rank at ``coords``, one index for each axis; ``filter_match`` accepts fewer. Raises TopologyError."""
        if set(coords) != set(self.axes):
            raise TopologyError(
                f"get_rank({_named(coords)}) needs one index for each of the axes {', '.join(self.axes)}. "
                "Remedy: give them all, or use filter_match() for all ranks that match some."
            )
        for axis, index in coords.items():
            if not 0 <= index < self.get_dim(axis):
                raise TopologyError(
                    f"get_rank({_named(coords)}): {axis} = {index} lies outside {self!r}. "
                    f"Remedy: use {axis} in 0 to {self.get_dim(axis) - 1}."
                )
        return sum(coords[axis] * stride for axis, stride in zip(self.axes, self._strides, strict=True))

    def get_coord(self, rank: int) -> Any:
        """The coordinate of ``rank``, as a ``ProcessCoord``. Raises TopologyError for a rank that does not exist."""
        return self.ProcessCoord(*self._indices(rank))

    def get_rank_repr(
        self, rank: int, omit_axes: Collection[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """``rank`` as text for file names, such as ``model_01``: its index on every axis that is not omitted."""
        named = zip(self.axes, self._indices(rank), strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{index:02d}" for axis, index in named if axis not in omit_axes)

    def filter_match(self, **coords: int) -> list[int]:
        """All ranks at ``coords``, ascending; axes not given may have any index. Raises TopologyError for unknown axes."""
        for axis in coords:
            self._place(axis)
        if any(not 0 <= index < self.get_dim(axis) for axis, index in coords.items()):
            return []
        base = sum(index * self._strides[self._place(axis)] for axis, index in coords.items())
        return [base + offset for offset in self._offsets(set(self.axes) - set(coords))]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks whose index on ``axis`` is ``idx``, ascending."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks of every group along ``axis``; an empty list if there is no such axis."""
        return self.lists_along(axis) if axis in self.axes else []

    # -- over several axes at once, which DeepSpeed's class lacks ------------------------------------------------

    def ranks_along(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from ``rank`` on ``axes`` only, itself included; ascending."""
        indices = self._indices(rank)
        places = [self._place(axis) for axis in axes]
        base = rank - sum(indices[place] * self._strides[place] for place in places)
        return [base + offset for offset in self._offsets(axes)]

    def lists_along(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ on ``axes`` only, ordered by their first rank. They partition the ranks."""
        for axis in axes:
            self._place(axis)
        inner = self._offsets(axes)
        return [[base + offset for offset in inner] for base in self._offsets(set(self.axes) - set(axes))]

    def _offsets(self, axes: Collection[str]) -> list[int]:
        """The ranks with index 0 on all axes but ``axes``, ascending."""
        offsets = [0]
        for axis, dim, stride in zip(self.axes, self.dims, self._strides, strict=True):
            if axis in axes and dim > 1:
                offsets = [offset + index * stride for offset in offsets for index in range(dim)]
        return offsets

    def _indices(self, rank: int) -> tuple[int, ...]:
        if not 0 <= rank < self.world_size():
            raise TopologyError(
                f"rank {rank} lies outside the {self.world_size()} ranks of {self!r}. "
                f"Remedy: use a rank in 0 to {self.world_size() - 1}."
            )
        return tuple(rank // stride % dim for dim, stride in zip(self.dims, self._strides, strict=True))

    def _place(self, axis: str) -> int:
        if axis not in self.axes:
            raise TopologyError(f"there is no axis {axis!r} in {self!r}. Remedy: use one of {', '.join(self.axes)}.")
        return self.axes.index(axis)


class PipeDataParallelTopology(ProcessTopology):
    """Axes pipe, data: neighbouring ranks are data-parallel, so that gradients travel over short distances."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Axes pipe, data, model: neighbouring ranks divide tensors among themselves."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _check(axes: list[str], dims: list[int]) -> None:
    if not axes or len(axes) != len(dims):
        raise TopologyError(f"axes {axes} and dims {dims} do not pair up. Remedy: give one degree for each axis.")
    for axis, dim in zip(axes, dims, strict=True):
        if not axis.isidentifier() or keyword.iskeyword(axis) or axis.startswith("_") or axes.count(axis) > 1:
            raise TopologyError(
                f"axis {axis!r} of {axes} cannot name a coordinate. Remedy: use distinct names such as pipe, data, model."
            )
        if dim < 1:
            raise TopologyError(f"axis {axis!r} has degree {dim}. Remedy: use a degree of at least 1.")


def _named(coords: dict[str, int]) -> str:
    return ", ".join(f"{axis}={index}" for axis, index in coords.items())
