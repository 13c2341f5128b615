"""Proves that a Hugging Face model can be split: compares its parts with the whole model, on a few made-up tokens.

A model of up to ``LARGEST`` parameters is tried itself. For a larger model, or one without values here (it is on the meta
device, or partitioned by zero.Init), a copy is made from its configuration. The copy has all layers, but narrow ones; if
the class cannot be made narrow, it has fewer layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..activations.random_streams import streams
from ..distributed.generators import generators_as_before
from ..errors import ModelError
from ..plan.small_model_copies import LARGEST_COPY, narrow, shorten, small_copy
from ..zero.init import part_of
from .pipelined import evaluating
from .pretrained_anatomy import Anatomy, find_blocks, observe, refusal

LARGEST = LARGEST_COPY  # in parameters
LENGTH = 6

Forward = Callable[[list[dict[str, Any]]], list[Any]]

NO_TOKENS = (
    "it has no embedding of tokens, as models for speech and images have none, so that it cannot be tried on a few tokens"
)


def embeds_tokens(model: nn.Module) -> bool:
    """True if a transformers ``model`` takes ids of tokens, so that it can be tried on some that are made up."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:  # as of models for speech
        return False
    return hasattr(embedding, "num_embeddings")  # what models for images have cuts these into patches


def specimen(model: nn.Module) -> nn.Module:
    """Return the model to try: ``model`` if it is small and has values, else a small copy. Raises ModelError."""
    params = list(model.parameters())
    has_values = not any(param.is_meta or part_of(param) is not None for param in params)
    if has_values and sum(param.numel() for param in params) <= LARGEST:
        return model
    failures = []
    for shrink in (narrow, shorten):
        try:
            found = small_copy(model, shrink)
            with _probing(found), torch.no_grad():
                found(**_tokens(found))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        else:
            return found
    raise refusal(model, f"no small copy of it could be made to try it ({failures[0][:300]})")


def examine(model: nn.Module) -> Anatomy:
    """Find out which modules run where. Raises ModelError, also for any error that the model itself raises."""
    blocks = find_blocks(model)
    with _probing(model), torch.no_grad():
        try:
            return observe(model, blocks, lambda: model(**_tokens(model)))
        except ModelError:
            raise
        except Exception as error:
            raise refusal(model, f"it could not be run on a few tokens ({type(error).__name__}: {error})") from error


def compare(model: nn.Module, forward: Forward) -> None:
    """Raise ModelError unless ``forward`` (the parts one after the other) gives what ``model`` gives, bit for bit."""
    with _probing(model), torch.no_grad():
        tokens = [_tokens(model, padded) for padded in (False, True)]
        try:
            batches = [{**batch, "labels": _labels(model, batch)} for batch in tokens]
            outputs = [model(**batch) for batch in batches]
            parts = forward(batches)
        except ModelError:
            raise
        except Exception as error:
            raise refusal(
                model, f"it, or its parts one by one, could not be run with labels ({type(error).__name__}: {error})"
            ) from error
        for found, wanted in zip(parts, outputs, strict=True):
            for name in ("logits", "loss"):
                if not torch.equal(getattr(found, name), getattr(wanted, name)):
                    raise refusal(model, f"its parts, run one after the other, do not give the {name} of the whole model")


def _tokens(model: nn.Module, padded: bool = False) -> dict[str, torch.Tensor]:
    """Return input_ids [2, LENGTH]; if ``padded``, the second row is padded on the right, with an attention mask."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    device = embedding.weight.device
    generator = torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(1, embedding.num_embeddings, (2, LENGTH), generator=generator).to(device)}
    if padded:
        batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.int64, device=device)
        batch["attention_mask"][1, -2:] = 0
        batch["input_ids"][1, -2:] = getattr(model.config, "pad_token_id", None) or 0
    return batch


def _labels(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return labels for each token or for each row, depending on the shape of the model's logits."""
    logits = getattr(model(**batch), "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise refusal(model, "it computes no logits, and so no loss. Pass a model with a head, or write the stages by hand")
    if logits.dim() == 3:
        return batch["input_ids"] % logits.shape[-1]
    return batch["input_ids"][:, 0] % logits.shape[-1]


@contextlib.contextmanager
def _probing(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode; afterwards restore all modes and the random number generators."""
    with evaluating(model), generators_as_before(), streams.as_before():
        yield
