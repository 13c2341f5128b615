"""Places: how many ranks there are along each axis, and where this one is. Pure arithmetic.

[Note: views]
Context and expert parallelism need no ranks of their own, but group the data-parallel ranks of a stage once more:

    data x tensor = batch x context x tensor
                  = expert_replicate x expert_shard x (expert: places x tensor)

Ranks of a "context" group are neighbours and share each sequence; those of a "batch" group have different data. Ranks of
an "expert" group are neighbours, too, and have different experts. Tensor ranks are among them, because each may have
experts of its own: the ``expert`` ranks of a group are ``expert / tensor`` places of the axis data. The ranks with the same
experts, "expert_data", divide their states over "expert_shard", which is every so many ranks of the shard axis. If all
ranks of the shard axis have different experts, it is one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .process_topology import ProcessTopology

CONTEXT_VIEWS = ("batch", "context")
EXPERT_VIEWS = ("expert", "expert_shard", "expert_replicate", "expert_data")


@dataclass(frozen=True)
class Places:
    """``pipe x replicate x shard x tensor`` ranks, and the places of ``rank``. Topology has the look-ups.

    ``shard`` is the number of ranks that a unit's states are divided over, ``replicate`` the number of such groups,
    ``tensor`` the number of ranks that divide each layer between them, ``pipe`` the number of pipeline stages. ``context``
    is the number of ranks that divide each sequence, ``expert`` that of ranks with different experts.
    """

    replicate: int
    shard: int
    rank: int
    pipe: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @cached_property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.pipe * self.replicate * self.shard * self.tensor

    @cached_property
    def data_size(self) -> int:
        """How many ranks sum gradients, those of the axis data: ``replicate * shard``."""
        return self.replicate * self.shard

    @cached_property
    def data_parallel_size(self) -> int:
        """How many ranks see different data: those of the axis data, but one for each context group."""
        return self.data_size // self.context

    @property
    def pipe_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.rank // (self.data_size * self.tensor)

    @property
    def replicate_rank(self) -> int:
        """This rank's place along the axis replicate."""
        return self.rank // (self.shard * self.tensor) % self.replicate

    @property
    def shard_rank(self) -> int:
        """This rank's place along the axis shard."""
        return self.rank // self.tensor % self.shard

    @cached_property
    def tensor_rank(self) -> int:
        """This rank's place along the axis tensor."""
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """This rank's place along the axis data: ``replicate_rank * shard + shard_rank``."""
        return self.rank // self.tensor % self.data_size

    @property
    def data_parallel_rank(self) -> int:
        """Which data this rank sees: its place along the axis batch."""
        return self.data_rank // self.context

    @property
    def context_rank(self) -> int:
        """Which part of each sequence this rank has: its place along the axis context."""
        return self.data_rank % self.context

    @cached_property
    def same_batch(self) -> int:
        """How many neighbouring ranks of a stage are given the same batch: those of a context group, with tensor ranks."""
        return self.context * self.tensor

    @cached_property
    def same_batch_rank(self) -> int:
        """This rank's place among these."""
        return self.rank % self.same_batch

    @property
    def expert_rank(self) -> int:
        """Which experts this rank has: its place along the axis expert."""
        return self.rank % self.expert


def view_of(ranks: Places, axis: str) -> tuple[ProcessTopology, tuple[str, ...]] | None:
    """Return a numbering of all ranks, and those of its axes that ``axis`` stands for; None if it is not of a view."""
    if axis in CONTEXT_VIEWS:
        return _by_context(ranks), (axis,)
    if axis not in EXPERT_VIEWS:
        return None
    members = {"expert": ("place", "tensor"), "expert_data": ("expert_replicate", "expert_shard")}.get(axis, (axis,))
    return _by_expert(ranks), ("place",) if axis == "expert" and ranks.expert == 1 else members


def views_in_use(ranks: Places) -> list[str]:
    """The axes of views that say more than the mesh does."""
    return [*(CONTEXT_VIEWS if ranks.context > 1 else ()), *(EXPERT_VIEWS if ranks.expert > 1 else ())]


def _by_context(ranks: Places) -> ProcessTopology:
    sizes = [ranks.pipe, ranks.data_parallel_size, ranks.context, ranks.tensor]
    return ProcessTopology(("pipe", *CONTEXT_VIEWS, "tensor"), sizes)


def _by_expert(ranks: Places) -> ProcessTopology:
    places = max(ranks.expert // ranks.tensor, 1)
    sharded = max(ranks.shard // places, 1)
    replicated = ranks.data_size // (places * sharded)
    axes = ("pipe", "expert_replicate", "expert_shard", "place", "tensor")
    return ProcessTopology(axes, [ranks.pipe, replicated, sharded, places, ranks.tensor])
