"""Which models can have their sequences divided, and how: found by their structure, and proven on a small copy.

The copy (pipeline/pretrained_proof.py) runs once whole, and once divided over two threads as ranks, for each way that may
fit: the first one with the same loss and gradients is taken. What would change results is refused before: layers that
carry a state from token to token, biases by distance, chains of blocks that attend to another sequence.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ConfigProblem, ModelError
from ..pipeline.pretrained_proof import NO_TOKENS, embeds_tokens, specimen
from ..plan.units import layerdrop_of
from ..tensor_parallel.axis import Axis
from ..tensor_parallel.thread_ranks import Outcome, ThreadAxis, first_difference, in_short, on_threads
from .attention import AUTO, GATHER, ULYSSES
from .attention_exchange import fits
from .divided_model import DividedBlocks, Division, Way
from .shard_loss import InHead, InModel, ShardLoss

RANKS, TOKENS = 2, 7  # of the proof: rows of 4 and 3
_COMMON_LOSS = "ForCausalLMLoss"
_TOLERANCE = 1e-3  # relative to the largest element of a tensor: what is not right differs in the first digit
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "rwkv", "hybrid")  # among config.layer_types


def refusal(model: nn.Module, reason: str) -> ModelError:
    """The error for a model whose sequences cannot be divided with certainty."""
    return ModelError(
        f"sequence_parallel_size: the sequences of {type(model).__name__} cannot be divided: {reason}. Remedy: remove the "
        "key, and use tensor_parallel, pipeline or activation_checkpointing for long sequences."
    )


def inner_model(model: nn.Module) -> nn.Module:
    """Return the transformers model that ``model`` is or wraps. Raises ModelError if there is none."""
    model = getattr(model, "whole_model", model)  # of a pipeline stage
    for module in model.modules():
        kinds = type(module).__mro__
        if any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds):
            return module
    raise refusal(model, "it is no model of transformers, whose attention layers can be told that they have a part")


def refuse_unfit(model: nn.Module) -> str:
    """Return the path of the blocks of a transformers ``model``. Raises ModelError for what would change results."""
    config: Any = model.config
    text = _text_config(model)
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(model, "an encoder-decoder model attends from one sequence to another")
    if not embeds_tokens(model):
        raise refusal(model, NO_TOKENS)
    if getattr(text, "alibi", False) or any(hasattr(part, "build_alibi_tensor") for part in model.modules()):
        raise refusal(model, "its attention has biases by the distance of tokens (ALiBi)")
    kinds = [kind for kind in getattr(text, "layer_types", None) or () if any(word in kind for word in _RECURRENT)]
    path = _path_of_blocks(model)
    for name, block in model.get_submodule(path).named_children():
        if getattr(block, "is_elsewhere", False):
            continue
        convolution = next((part for part in block.modules() if isinstance(part, nn.Conv1d)), None)
        if kinds or convolution is not None:
            what = f"layers of {kinds[0]}" if kinds else f"a convolution over tokens in {path}.{name}"
            raise refusal(model, f"it has {what}, which would begin anew on each rank (linear attention, state spaces)")
        if not any(map(_attends, block.modules())):
            raise refusal(
                model, f"nothing in {path}.{name} ({type(block).__name__}) attends by transformers' attention functions"
            )
    return path


def _text_config(model: nn.Module) -> Any:
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def heads_in(model: nn.Module) -> tuple[int, int]:
    """Return how many heads of queries, and of keys and values, the configuration of a transformers ``model`` names."""
    text = _text_config(model)
    heads = getattr(text, "num_attention_heads", None) or 1
    return heads, getattr(text, "num_key_value_heads", None) or heads


def refuse_heads(model: nn.Module, tensor: int, context: int) -> None:
    """Raise ConfigError unless ``tensor`` x ``context`` ranks can divide the heads of ``model`` between them."""
    heads, key_heads = heads_in(inner_model(model))
    if heads % tensor or not fits(heads // tensor, max(key_heads // tensor, 1), context):
        ranks = f"{tensor} tensor x {context} context ranks" if tensor > 1 else f"{context} context ranks"
        reason = f"{ranks} cannot divide {heads} heads of queries and {key_heads} of keys and values."
        remedy = 'Use "auto" or "gather", or another sequence_parallel_size.'
        raise ConfigError([ConfigProblem("context_parallel.method", ULYSSES, reason, remedy)])


def _path_of_blocks(model: nn.Module) -> str:
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part)}
    with_attention = {name: part for name, part in lists.items() if any(map(_attends, part.modules()))}
    if not lists:
        raise refusal(model, "it has no list of repeated blocks")
    chosen = with_attention or lists
    return max(chosen, key=lambda name: (sum(param.numel() for param in chosen[name].parameters()), -len(name)))


def _attends(module: nn.Module) -> bool:
    """True for a layer whose forward asks for one of transformers' attention functions."""
    forward = inspect.unwrap(type(module).forward)
    return "get_interface" in getattr(getattr(forward, "__code__", None), "co_names", ())


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the layer that gives logits, if ``model`` is a causal language model with the common loss."""
    function = getattr(model, "loss_function", None)
    if getattr(function, "__name__", None) != _COMMON_LOSS:
        return None
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


class Divided:
    """A transformers model whose sequences are divided, in place. ``remove`` makes it what it was."""

    def __init__(self, model: nn.Module, way: Way, axis: Axis, method: str, *, in_stages: bool = False) -> None:
        """``in_stages``: other pipeline stages have other modules of ``model``."""
        blocks = list(model.get_submodule(way.path).children())
        decoder = model.get_submodule(way.path.rpartition(".")[0])
        head = model.get_output_embeddings() if way.divides_loss else None  # type: ignore[operator]
        tiles = way.tiles and type(head) is nn.Linear
        way = replace(way, tiles=tiles)
        self.division = Division(axis, method, way, in_stages=in_stages)
        self._parts: list[Any] = [DividedBlocks(decoder, blocks, self.division)]
        if head is not None:
            loss = ShardLoss(model, self.division)
            self._parts += [loss, InModel(model, self.division, loss)]
            if tiles:
                self._parts.append(InHead(head, self.division))

    def remove(self) -> None:
        for part in reversed(self._parts):
            part.remove()


# -- the proof ---------------------------------------------------------------------------------------------------


def way_of(model: nn.Module, method: str) -> Way:
    """Return how the sequences of a transformers ``model``, which is whole, can be divided. Raises ModelError."""
    model = inner_model(model)
    path = refuse_unfit(model)
    divides = head_of(model) is not None
    try:
        tried = specimen(model)
    except ModelError as error:
        raise refusal(model, f"no small copy of it could be made to try it ({error})") from None
    try:
        expected = _run(copy.deepcopy(tried), divides, lambda outcome: outcome)
    except Exception as error:
        raise refusal(model, f"it could not be run on a few tokens ({in_short(error)})") from error
    problem = "is not proven"
    for joins_early in (False, True):
        for tiles in (True, False) if divides else (False,):
            way = Way(path, joins_early, divides, tiles)
            found = [_difference(tried, way, tried_method, expected) for tried_method in _methods(tried, method)]
            if not any(found):
                if joins_early:
                    _refuse_layerdrop(model)
                return way
            problem = next(text for text in found if text)
    raise refusal(model, f"a small copy of it, over {RANKS} ranks, {problem}")


def _refuse_layerdrop(model: nn.Module) -> None:
    """Raise ModelError for a model that may leave out its last block, where sequences are joined."""
    layerdrop = layerdrop_of(model)
    if layerdrop > 0:
        reason = (
            f"layerdrop = {layerdrop} leaves out blocks at random, also the last one, after which it needs whole sequences"
        )
        raise refusal(model, f"{reason} (it can be made with a layerdrop of 0)")


def _methods(model: nn.Module, method: str) -> list[str]:
    """The methods to try on ``model``: those that the ranks may use, if its heads fit."""
    fit = fits(*heads_in(model), RANKS)
    return [way for way in (GATHER, ULYSSES) if method in (AUTO, way) and (way == GATHER or fit)] or [GATHER]


def _difference(model: nn.Module, way: Way, method: str, expected: Outcome) -> str | None:
    """Return how a divided copy of ``model`` differs from the whole one, or None."""

    def work(axis: ThreadAxis) -> Outcome:
        mine = copy.deepcopy(model)
        divided = Divided(mine, way, axis, method)
        try:
            return _run(mine, way.divides_loss, lambda outcome: _summed(outcome, axis))
        finally:
            divided.remove()

    try:
        outcomes = on_threads(RANKS, work)
    except Exception as error:
        return f"cannot be run ({in_short(error)})"
    name = first_difference(outcomes, expected, _TOLERANCE, 0.1 * _TOLERANCE)
    return f"gives another value for {name}" if name else None


def _run(model: nn.Module, labelled: bool, of_all: Callable[[Outcome], Outcome]) -> Outcome:
    """Return the loss and the gradients of ``model`` on a few tokens, in fp32 and without dropout."""
    model = model.float().eval()
    model.training = True  # of the outermost alone: in training it has no use for whole logits
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, embedding.num_embeddings, (1 + labelled, TOKENS), generator=generator)
    ids = ids.to(embedding.weight.device)
    with torch.enable_grad():
        loss = model(input_ids=ids, labels=ids.clone()).loss if labelled else _any_loss(model(input_ids=ids))
        if loss.requires_grad:
            loss.backward()
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    return {"the loss": loss.detach()[None], **of_all({f"the gradient of {name}": grad for name, grad in found.items()})}


def _any_loss(output: Any) -> torch.Tensor:
    """A number that depends on all that a model without the common loss returns first."""
    first: torch.Tensor = output[0]
    weight = torch.randn(first.shape, generator=torch.Generator().manual_seed(1)).to(first)
    return (first * weight).sum()


def _summed(gradients: Outcome, axis: ThreadAxis) -> Outcome:
    return {name: axis.all_reduce(value, "proof") / axis.size for name, value in sorted(gradients.items())}
