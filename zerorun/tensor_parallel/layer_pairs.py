"""Checks that column- and row-parallel layers of a plan belong together: what one leaves divided, another must join."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .heads import FUSED_NAMES, KEY_VALUE_NAMES, QUERY_NAMES
from .styles import DIVIDED_COLUMN, Assignment


def pairing_problems(model: nn.Module, entries: list[Assignment]) -> Iterator[str]:
    """Yield a message for each column-parallel layer that no layer joins, and for each row-parallel layer whose input no
    layer divides, or divides differently.

    Partners are searched in the module that holds the layer, then in the one around it.
    """
    columns = [e for e in entries if e.style in DIVIDED_COLUMN and not e.parameter]
    rows = [e for e in entries if e.style == "rowwise" and not e.parameter]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for entry in columns:
        if model.get_submodule(entry.name) is not head and not _partners(entry, rows):
            yield (
                f"{entry.name} ({entry.style}) has columns on each rank that no row-parallel layer near it joins. Remedy: "
                "divide the layer that follows as rowwise, or use colwise_gather_output."
            )
    for entry in rows:
        partners = _partners(entry, columns)
        widths = {e.lengths[0] if len(e.lengths) > 1 else sum(e.lengths) for e in partners if not e.shared_heads}
        by_heads = any(e.leaf in QUERY_NAMES | FUSED_NAMES for e in partners)
        if not partners:
            yield (
                f"{entry.name} (rowwise) needs an input that is divided, and no column-parallel layer is near it. Remedy: "
                "divide the layer before it as colwise, or use rowwise_split_input."
            )
        elif entry.lengths[0] not in widths and not by_heads:
            yield (
                f"{entry.name} (rowwise) has {entry.lengths[0]} input columns, and the column-parallel layers near it "
                f"have {sorted(widths)}, so that its input is not divided as its weight. Remedy: rowwise_split_input with "
                "colwise_gather_output."
            )


def norms_of_heads(model: nn.Module, owner: str, planned: list[str]) -> list[str]:
    """Return the names of norms in the attention ``owner`` that work on outputs of its column-parallel layers, not on
    their inputs.

    They are recognized by their size. If they treat all heads alike, each rank has a summand of their gradients.
    """
    holder = model.get_submodule(owner)
    projections = {name for name, _ in holder.named_children()} & (QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES)
    if not projections:
        return []
    widths = {_input_width(child) for child in holder.children()}
    start = f"{owner}." if owner else ""
    found = []
    for name, child in holder.named_children():
        sizes = {param.numel() for param in child._parameters.values() if param is not None and param.dim() == 1}
        if sizes and not sizes & widths and f"{start}{name}" not in planned and not isinstance(child, nn.Linear):
            found.append(f"{start}{name}")
    return found


def _input_width(layer: nn.Module) -> int | None:
    width = getattr(layer, "in_features", getattr(layer, "nx", None))
    return width if isinstance(width, int) else None


def norm_problems(model: nn.Module, entries: list[Assignment]) -> Iterator[str]:
    """Yield a message for each norm of heads that the plan leaves out."""
    planned = [entry.name for entry in entries]
    for owner in dict.fromkeys(entry.owner for entry in entries if entry.style in DIVIDED_COLUMN and not entry.parameter):
        for name in norms_of_heads(model, owner, planned):
            yield (
                f"{name} works on heads that the plan divides, so that each rank has a summand of its gradient, and the "
                "plan leaves it out. Remedy: add it as replicated_with_grad_allreduce if it treats every head by itself; "
                "else use colwise_gather_output for the projections."
            )


def _partners(entry: Assignment, others: list[Assignment]) -> list[Assignment]:
    scope = entry.owner
    for _ in range(2):
        found = [other for other in others if not scope or other.name.startswith(scope + ".")]
        if found or not scope:
            return found
        scope = scope.rpartition(".")[0]
    return []
