"""Families in a plan: the ranks between which the states of a parameter are divided, and who may update experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..distributed.replication import Family
from ..distributed.topology import Topology
from ..errors import ModelError
from ..optim.requested_optimizer import RawOptimizer


@dataclass(frozen=True)
class FamilyPlace:
    """Where a rank is in a family: which of ``degree`` shards it has, and which of ``copies`` of this shard."""

    degree: int
    shard_rank: int
    copies: int
    copy: int

    @classmethod
    def of(cls, family: Family, topology: Topology) -> FamilyPlace:
        """Return that of rank ``topology.rank``."""
        shards, copies = topology.ranks_along(family.shard_axis), topology.ranks_along(family.replicate_axis)
        return cls(len(shards), shards.index(topology.rank), len(copies), copies.index(topology.rank))


def refuse_optimizer(experts: Sequence[str], matrices: Sequence[str], raw: RawOptimizer, topology: Topology) -> None:
    """Raise ModelError for an optimizer that looks at more of trained ``experts`` than one rank has.

    ``matrices``: those of them that Muon is to update.
    """
    if not matrices and not raw.whole and raw.parts is None:
        return
    kind = raw.name if raw.optimizer is None else type(raw.optimizer).__name__
    remedy = "put it into a group with use_muon: false" if matrices else "use one that goes element by element (AdamW)"
    raise ModelError(
        f"{kind} looks at more than single elements of {[*matrices, *experts][0]!r}, of which {topology.expert} ranks have "
        f"different experts (expert_parallel.autoep_size). Remedy: {remedy}, or set autoep_size to 1."
    )
