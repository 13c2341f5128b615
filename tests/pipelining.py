"""The stages of a pipeline, run one after the other in one process, and what they have together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zerorun.pipeline.pipelined import Pipelined


def run(stages: Sequence[Pipelined], given: Any) -> Tensor:
    """One micro-batch through all parts, with a cut in the graph where data would be sent. Returns the loss."""
    cuts: list[tuple[Any, Any]] = []
    value = stages[0].inputs_of(given)
    for part in range(len(stages) * stages[0].chunks):
        module, chunk = stages[part % len(stages)], part // len(stages)
        assert module.is_first(chunk) == (part == 0)
        if part:
            arrived = tree_map(received, value)
            cuts.append((value, arrived))
            value = arrived
        last = module.is_last(chunk)
        value = module(value, chunk, given if last else None)
    assert last
    loss = module.loss_of(value, given)
    loss.backward()
    for sent, arrived in reversed(cuts):
        leaves = [(a, b) for a, b in zip(tensors(sent), tensors(arrived), strict=True) if b.grad is not None]
        torch.autograd.backward([a for a, _ in leaves], [b.grad for _, b in leaves])
    return loss.detach()


def received(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def gathered(stages: Sequence[Pipelined], of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor | None]:
    """``of`` every parameter of the whole model, summed over the stages that share one."""
    ties = stages[0].ties()
    canonical = {}
    for tie in ties:
        for part, name in zip(tie.parts, tie.local_names, strict=True):
            param = stages[part % len(stages)].get_parameter(name)
            canonical[id(param)] = tie.name
    found: dict[str, Tensor | None] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            own = canonical.get(id(param), name)
            value, before = of(param), found.get(own)
            found[own] = value if before is None else before + value if value is not None else before
    return found
