"""Models and data of the clients' tests: random and tiny, the same in every process, and from no hub."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

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


def mixtral() -> MixtralForCausalLM:
    """A model with four experts in each of two layers."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return MixtralForCausalLM(MixtralConfig(**sizes, **experts, **tokens, max_position_embeddings=64))


def stored(folder: str, **how: Any) -> LlamaForCausalLM:
    """``llama()`` as it comes from files in ``folder``, for trainers that load a model a second time by its name."""
    path = f"{folder}/stored"
    if dist.get_rank() == 0:
        llama().save_pretrained(path)
    dist.barrier()
    return LlamaForCausalLM.from_pretrained(path, **how)


def greedy(wrapped: Any) -> list[list[int]]:
    """Tokens that the model in an engine, or in DDP, writes, one after the other on all ranks."""
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]]).to(wrapped.device)
    wrapped.eval()
    with torch.no_grad():
        written = wrapped.module.generate(input_ids=prompt, max_new_tokens=5, do_sample=False, synced_gpus=True)
    return written.tolist()


class Sentences(Dataset[dict[str, Any]]):
    """``count`` sequences [LENGTH] of token ids, each of which is its own label."""

    def __init__(self, count: int = 64) -> None:
        ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(3))
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self._ids[number], "labels": self._ids[number]}


def tokenizer() -> PreTrainedTokenizerFast:
    """One that knows the words w3 to w63, and nothing of any hub."""
    special = ["<pad>", "<s>", "</s>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{n}" for n in range(3, VOCABULARY))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def words(count: int, length: int = 6, seed: int = 3) -> list[str]:
    """``count`` texts of ``length`` words."""
    numbers = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{int(number)}" for number in row) for row in numbers]
