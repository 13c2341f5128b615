"""Styles of tensor parallelism, and plans as data: how each layer of a model is divided.

[Note: styles]
A plan maps patterns of module or parameter names ("*" stands for one part between dots) to styles. These are the styles of
Hugging Face's tensor-parallel plans, with the same meaning:

    colwise, rowwise                linear layers: columns of output, of input (Shoeybi et al. 2019, arXiv:1909.08053)
    colwise_gather_output           the output is whole again (also called colwise_rep)
    rowwise_split_input             the input is whole (also called rowwise_rep)
    embedding_rowwise               rows of an embedding, that is its vocabulary
    packed_colwise, packed_rowwise  two halves, gate and up, one after the other, each divided
    replicated_with_grad_allreduce  whole, but each rank's gradient is a summand (a norm of each head)
    all_reduce                      the ranks' outputs are summed
    moe_tp_experts                  experts whose 3-D parameters are divided; inputs enter, and the output is summed
    moe_identity_expert             its input is divided by the number of ranks, since outputs are summed
    mla_kv_a_proj                   whole; the gradients of the columns that go to all heads (rotary) are summed
    replicate, local_params         nothing to do

and one more, for query, key and value in one linear layer, as three blocks one after the other:

    fused_colwise                   or {"style": "fused_colwise", "lengths": [query, key, value]} where heads do not tell

"colwise" of such a fused layer means that it holds query, key and value of the first head, then of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..distributed.tensor_shard import Ranges, fused_ranges
from .heads import Attribute

COLUMN = ("colwise", "colwise_gather_output", "packed_colwise", "fused_colwise")
DIVIDED_COLUMN = ("colwise", "packed_colwise", "fused_colwise")
ROW = ("rowwise", "rowwise_split_input", "packed_rowwise")
HOOKED = ("all_reduce", "moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj")
WHOLE = ("replicated_with_grad_allreduce", "replicate", "local_params")
STYLES = (*COLUMN, *ROW, "embedding_rowwise", *HOOKED, *WHOLE)
SYNONYMS = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
Style = str | Mapping[str, Any]


@dataclass(frozen=True)
class Assignment:
    """One module, or one parameter if ``parameter`` is set, and its style.

    ``lengths``: the blocks that make up the divided dimension; each rank has an even part of each. ``dim``: the divided
    dimension of a parameter. ``shared_heads``: if not 0, the layer stays whole, and each rank uses the columns of one of
    this many heads.
    """

    name: str
    pattern: str
    style: str
    parameter: bool = False
    dim: int = 0
    lengths: tuple[int, ...] = ()
    shared_heads: int = 0

    def own(self, rank: int, size: int) -> Ranges:
        """Return the ranges of the divided dimension that ``rank`` keeps."""
        return fused_ranges(self.lengths, rank, size)

    def used(self, rank: int, size: int) -> tuple[int, int]:
        """Return the columns of a whole layer that ``rank`` uses: those of its head."""
        head, width = rank * self.shared_heads // size, self.lengths[0] // self.shared_heads
        return head * width, (head + 1) * width

    @property
    def owner(self) -> str:
        """The name of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class ParallelPlan:
    """What becomes of a model on ``size`` tensor ranks: entries in the model's order, and attributes to adapt.

    ``tried_bytes``: the most host memory of a process that trying the plan out has taken.
    """

    size: int
    entries: tuple[Assignment, ...]
    attributes: tuple[Attribute, ...] = ()
    tried_bytes: int = 0

    def here(self, model: nn.Module) -> ParallelPlan:
        """Return the part of the plan for layers that are in ``model``; others are on other pipeline stages."""
        known = {name for name, module in model.named_modules() if not getattr(module, "is_elsewhere", False)}
        known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
        entries = tuple(entry for entry in self.entries if entry.name in known)
        return ParallelPlan(
            self.size, entries, tuple(attribute for attribute in self.attributes if attribute.owner in known)
        )

    def beneath(self, prefix: str) -> ParallelPlan:
        """Return the same plan for a model that has this one as its module ``prefix``."""
        entries = tuple(replace(entry, name=f"{prefix}.{entry.name}") for entry in self.entries)
        owners = (f"{prefix}.{attribute.owner}".removesuffix(".") for attribute in self.attributes)
        attributes = tuple(replace(a, owner=owner) for a, owner in zip(self.attributes, owners, strict=True))
        return ParallelPlan(self.size, entries, attributes)

    def within(self, prefix: str) -> ParallelPlan:
        """Return the part of the plan for the module ``prefix``, with names relative to it; all for ""."""
        start = f"{prefix}." if prefix else ""
        entries = [replace(e, name=e.name[len(start) :]) for e in self.entries if e.name.startswith(start)]
        attributes = [
            replace(a, owner=a.owner[len(start) :])
            for a in self.attributes
            if a.owner == prefix or a.owner.startswith(start)
        ]
        return ParallelPlan(self.size, tuple(entries), tuple(attributes))
