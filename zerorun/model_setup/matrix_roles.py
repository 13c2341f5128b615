"""Roles: which parameters are matrices that Muon updates, and which go by AdamW.

[Note: by role, not by name]
Muon is for the matrices between a model's input and its output. These are the parameters with two dimensions in repeated
blocks, unless an embedding or the output head has them, tied or not. A model that is cut or divided has the same roles as
the whole one, because they are found before that; a PipelineModule tells the classes of all its layers. Filters of
convolutions have more dimensions, and go by AdamW. ``use_muon`` in a parameter group wins: false is AdamW for all that is
in it, and true is Muon, which takes filters as matrices [out, ...]. With ``ns_parts``, matrices in it consist of parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..errors import ModelError
from ..optim.muon import dim_of_parts
from ..pipeline.pipelined import Pipelined
from ..plan.parameter_kinds import own_weight
from ..plan.units import repeated_blocks

Groups = list[dict[str, Any]]


def divide_by_role(model: nn.Module, groups: Groups) -> Groups:
    """Return ``groups`` with ``use_muon`` in each: one that does not say so becomes two, of which one may be empty.

    Raises ModelError if there is no matrix, or if a group with ``use_muon`` has something else.
    """
    matrices, found = matrices_of_blocks(model), Groups()
    for group in groups:
        if "use_muon" in group:
            if group["use_muon"]:
                _refuse_others(model, group["params"])
                _refuse_other_lengths(group)
            found.append(group)
            continue
        for use in (True, False):
            own = [param for param in group["params"] if (id(param) in matrices) is use]
            found.append({**group, "use_muon": use, "params": own})
    given = any(group["params"] and group["use_muon"] for group in found)
    if not given and not isinstance(model, Pipelined) and not any("use_muon" in group for group in groups):
        raise ModelError(
            "Muon finds no matrix to update: it takes the two-dimensional parameters of repeated blocks, and this model "
            "has none, or they are frozen. Remedy: give model_parameters as groups that say which are Muon's, such as "
            "[{'params': [...], 'use_muon': True}, {'params': [...], 'use_muon': False}], or use AdamW."
        )
    return found


def described(groups: Groups, params: dict[str, Any]) -> str:
    """Say how much goes which way, and for which learning rates. ``params``: of the optimizer, as far as they are given."""
    counts = []
    for use in (True, False):
        own = [p for group in groups if bool(group["use_muon"]) is use for p in group["params"] if p.requires_grad]
        counts.append((len(own), sum(param.numel() for param in own)))
    (matrices, elements), (others, rest) = counts
    ways = f"Muon updates {matrices} matrices with {elements:,} elements, and AdamW {others} parameters with {rest:,}."
    if "adjust_lr_fn" in params:
        return ways
    return f'{ways} Learning rates are as for AdamW; those for DeepSpeed need "adjust_lr_fn": "original".'


def matrices_of_blocks(model: nn.Module) -> set[int]:
    """Return id(parameter) of the matrices of repeated blocks, which are Muon's by their role."""
    blocks = list(_blocks(model))
    inside = {id(p): p for block in blocks for p in block.parameters() if p.dim() == 2}
    return set(inside) - set(map(id, _embeddings(model))) - set(map(id, _head(model, blocks)))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    if not (isinstance(model, Pipelined) and model.layer_classes):
        yield from (block for _, block in repeated_blocks(model))
        return
    counts = Counter(model.layer_classes)
    for chunk in range(model.chunks):
        for layer in model.modules_of(chunk):
            if counts[type(layer).__name__] > 1:
                yield layer
            else:
                yield from (block for _, block in repeated_blocks(layer))


def _embeddings(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield from module.parameters(recurse=False)


def _head(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters of the output head: the model's own, and the last layer where layers themselves are blocks.

    Where something else than blocks and embeddings has matrices, the head is there, unless layers run in their order.
    """
    whole = getattr(model, "whole_model", model)
    ask = getattr(whole, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    if isinstance(head, nn.Module):
        yield from head.parameters()
    if isinstance(model, Pipelined) and not any(model.is_last(chunk) for chunk in range(model.chunks)):
        return
    holders = [module for module in model.modules() if any(p.dim() == 2 for p in module.parameters(recurse=False))]
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = [h for h in holders if id(h) not in inside and not isinstance(h, (nn.Embedding, nn.EmbeddingBag))]
    in_order = isinstance(model, (nn.Sequential, Pipelined))
    if holders and any(holders[-1] is block for block in blocks) and (in_order or not outside):
        yield from holders[-1].parameters()


def _refuse_other_lengths(group: dict[str, Any]) -> None:
    lengths = group.get("ns_parts", ())
    for param in group["params"] if lengths else ():
        if dim_of_parts(param.shape, lengths) < 0:
            raise ModelError(
                f"a group has ns_parts = {list(lengths)}, but a matrix of shape {list(param.shape)}, which has no side of "
                "that length. Remedy: put matrices that consist of parts into groups of their own, with the parts' lengths."
            )


def _refuse_others(model: nn.Module, params: Sequence[nn.Parameter]) -> None:
    filters = {id(own_weight(m)) for m in model.modules() if isinstance(m, _ConvNd)}
    names = {id(param): name for name, param in model.named_parameters()}
    wrong = [p for p in params if p.dim() != 2 and not (p.dim() > 2 and id(p) in filters)]
    if wrong:
        name, shape = names.get(id(wrong[0]), "of another model"), tuple(wrong[0].shape)
        raise ModelError(
            f"parameter {name!r} of shape {shape} is in a group with use_muon: true, but Muon updates matrices and filters "
            "of convolutions. Remedy: put it into a group with use_muon: false, or without use_muon."
        )
