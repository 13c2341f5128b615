"""Proves that a Hugging Face model can be split: compares its parts with the whole model, on a few made-up tokens.

A model of up to ``LARGEST`` parameters is tried itself. For a larger model, or one without values here (it is on the meta
device, or partitioned by zero.Init), a copy is made from its configuration. The copy has all layers, but narrow ones; if
the class cannot be made narrow, it has fewer layers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..zero.init import part_of
from .pretrained_anatomy import Anatomy, find_blocks, observe, refusal

# In parameters: a forward of a few tokens through so many takes a fraction of a second.
LARGEST = LARGEST_COPY = 50_000_000
VOCABULARY, LENGTH = 128, 6
# Widths of the copy. Names that a configuration does not have are left out.
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
FEWER_LAYERS = 4

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
    for shrink in (_narrow, _shorten):
        config = copy.deepcopy(model.config)
        try:
            shrink(config)
            found = _made_from(type(model), config)
            with _probing(found), torch.no_grad():
                found(**_tokens(found))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        else:
            return found
    raise refusal(model, f"no small copy of it could be made to try it ({failures[0][:300]})")


def _made_from(kind: type[nn.Module], config: Any) -> nn.Module:
    """Make a model with random values on the CPU. Raises MemoryError if it would not be small."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.device("meta"):
            numel = sum(param.numel() for param in kind(config).parameters())
        if numel > LARGEST_COPY:
            raise MemoryError(f"a copy would have {numel} parameters")
        with torch.device("cpu"):
            return kind(config)


def _narrow(config: Any) -> None:
    _few_words(config)
    projected = getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size
    equal_heads = getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", None)
    for name, value in NARROW.items():
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(AttributeError):  # an attribute that is computed from others
                setattr(config, name, value)
    if equal_heads and isinstance(getattr(config, "num_key_value_heads", None), int):
        config.num_key_value_heads = config.num_attention_heads
    if projected:
        config.word_embed_proj_dim = config.hidden_size // 2


def _shorten(config: Any) -> None:
    _few_words(config)
    config.num_hidden_layers = min(config.num_hidden_layers, FEWER_LAYERS)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) > FEWER_LAYERS and name.startswith("layer"):
            setattr(config, name, value[:FEWER_LAYERS])


def _few_words(config: Any) -> None:
    config.vocab_size = min(config.vocab_size, VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        config._attn_implementation = "eager"  # the others need a GPU


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
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for part, training in modes:
            part.training = training
