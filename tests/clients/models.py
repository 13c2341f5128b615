"""Models and data of the clients' tests: random and tiny, the same in every process, and from no hub."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 12


def llama(layers: int = 2, **settings: Any) -> LlamaForCausalLM:
    """A model of some thousand parameters, with its embedding tied to its head."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **settings,
    )
    return LlamaForCausalLM(config)


class Sentences(Dataset[dict[str, Any]]):
    """``count`` sequences [LENGTH] of token ids, each of which is its own label."""

    def __init__(self, count: int = 64) -> None:
        ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(3))
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self._ids[number], "labels": self._ids[number]}
