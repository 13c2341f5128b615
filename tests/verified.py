"""What test_verify.py and test_verify_planted.py verify: tasks, a job that verifies one, and its configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import VOCAB, Gpt, reset
from torch import Tensor, nn
from torch.utils.data import Dataset
from training import make_config

import zerorun
from zerorun.activations.random_streams import streams
from zerorun.engine.initialize import initialize
from zerorun.verify.verification import Verification

COUNT, LENGTH = 24, 6


class Dropping(nn.Module):
    """A block with dropout, inside what tensor ranks divide and outside."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)), 0.1, self.training)


class Streaming(Dropping):
    """Draws from a stream besides."""

    def forward(self, x: Tensor) -> Tensor:
        with streams.fork():
            return super().forward(F.dropout(x, 0.1, self.training))


def token_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCAB, (2, LENGTH + 1), generator=generator) for _ in range(COUNT)]


def next_token(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class Ids(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2 * COUNT

    def __getitem__(self, index: int) -> Tensor:
        return token_batches()[index // 2][index % 2]


def gpt() -> Any:
    return reset(Gpt(3)), token_batches(), next_token


def tied() -> Any:
    return reset(Gpt(3, tied=True)), token_batches(), next_token


def dropping() -> Any:
    return reset(Gpt(3, Dropping)), token_batches(), next_token


def streaming() -> Any:
    streams.reset()
    streams.add("model-parallel-rng", 7)
    return reset(Gpt(3, Streaming)), token_batches(), next_token


def from_dataset() -> Any:
    return {"model": reset(Gpt(2)), "batches": Ids(), "loss": next_token}


def two_groups() -> Any:
    model = reset(Gpt(2))
    large, small = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": large, "weight_decay": 0.5}, {"params": small, "weight_decay": 0.0}]
    return {"model": model, "batches": token_batches(), "loss": next_token, "model_parameters": groups}


def own_optimizer() -> Any:
    model = reset(Gpt(2))

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    return {"model": model, "batches": token_batches(), "loss": next_token, "optimizer": make, "lr_scheduler": schedule}


def pairs() -> list[tuple[Tensor, Tensor]]:
    return [(ids[:, :-1], ids[:, 1:]) for ids in token_batches()]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Stem(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCAB, 16)


class Top(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, VOCAB, bias=False)


def layers() -> Any:
    """A PipelineModule of two stages. The order of its data is drawn by NumPy."""
    found = [zerorun.LayerSpec(kind) for kind in (Stem, Dropping, Dropping, Dropping, Top)]
    model = zerorun.PipelineModule(found, num_stages=2, loss_fn=cross_entropy, partition_method="uniform")
    given = pairs()
    return model, [given[number] for number in numpy.random.permutation(len(given))]


def _causal(model: nn.Module, vocabulary: int) -> Any:
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(vocabulary, (2, LENGTH), generator=generator) for _ in range(COUNT)]
    return model, [{"input_ids": each, "labels": each} for each in ids]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1, "tie_word_embeddings": True}
    return _causal(LlamaForCausalLM(LlamaConfig(**sizes, **heads)), 61)


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    model, batches = llama()
    return get_peft_model(model, settings), batches


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return _causal(MixtralForCausalLM(MixtralConfig(**sizes, **heads)), 61)


TASKS: dict[str, Callable[[], Any]] = {
    task.__name__: task
    for task in (gpt, tied, dropping, streaming, from_dataset, two_groups, own_optimizer, layers, llama, lora, mixtral)
}
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def config(stage: int = 0, accumulation: int = 1, clip: float = 0.5, **changes: Any) -> dict[str, Any]:
    return make_config(stage, accumulation=accumulation, clip=clip, **changes)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"tensor_parallel": {"size": 2, **changes}}


def verify(task: str, raw: dict[str, Any]) -> tuple[bool, str]:
    numpy.random.seed(dist.get_rank())  # as processes that were started by themselves have other states
    verdict = Verification(TASKS[task], raw, initialize, 3, None, 1234).run()
    return verdict.equal, verdict.text
