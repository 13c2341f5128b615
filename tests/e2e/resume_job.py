"""A job for test_resume.py: trains in many configurations, whole or in two halves, and writes down all that happens."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import zerorun
from zerorun.data import RepeatingLoader

CELLS = {
    "by day": ((0, "fp16"), (2, "fp32"), (3, "bf16")),
    "at night": tuple(product(range(4), ("fp32", "bf16", "fp16"))),
}
SAVED_AT, STEPS = 5, 12
WIDTH, VOCAB = 16, 24


class Samples(torch.utils.data.Dataset[Any]):
    """Sample i: its number, and tokens that depend on it."""

    def __len__(self) -> int:
        return 97

    def __getitem__(self, index: int) -> Any:
        return index, torch.randint(VOCAB, (5,), generator=torch.Generator().manual_seed(index))


class Block(nn.Module):
    """With dropout, so that the random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    """Embedding, tied with the head; a running mean as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(WIDTH, 3)  # gets its first gradient in step 3
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor, late: bool) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits + (self.unused(x).sum() if late else 0)


def make(stage: int, precision: str) -> zerorun.Engine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}},
        "seed": 3,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":  # overflows at first, grows again later
        config["fp16"] |= {"initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}
    return zerorun.initialize(Model(), config, training_data=Samples())


def train(engine: zerorun.Engine, batches: Any, begin: int, end: int) -> list[Any]:
    record = []
    for step in range(begin, end):
        losses, ids = [], []
        for _ in range(2):
            numbers, tokens = next(batches)
            logits = engine(tokens[:, :-1], late=step >= 3)
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            ids.append(numbers.tolist())
        draws = torch.rand(1).item(), random.random(), float(numpy.random.rand())
        counts = engine.global_steps, engine.micro_steps, engine.skipped_steps
        record.append((losses, ids, engine.get_lr(), engine.loss_scale, engine.get_global_grad_norm(), draws, counts))
    return record


def held(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    """All that this rank holds, bit by bit."""
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    assert engine.sharded is not None
    for piece in engine.sharded.pieces:
        for run in piece.runs:
            name = f"{piece.flat_group.names[run.entry]}@{run.start}"
            found[f"{name} master"] = piece.tensor[run.offset : run.offset + run.numel].clone()
            for key, value in engine.sharded.optimizer.state.get(piece.tensor, {}).items():
                part = value if value.dim() == 0 else value[run.offset : run.offset + run.numel]
                found[f"{name} {key}"] = part.clone()
    return found


def main(mode: str, folder: Path, cells: Iterable[tuple[int, str]]) -> None:
    rank = os.environ["RANK"]
    results = {}
    for stage, precision in cells:
        torch.manual_seed(7 if mode != "second" else 1234)
        random.seed(7)
        numpy.random.seed(7)
        engine = make(stage, precision)
        place = folder / f"{stage}-{precision}"
        begin = 0
        if mode == "second":
            path, client = engine.load_checkpoint(place)
            assert path is not None
            assert client == {"note": [1, (2, 3)]}
            begin = SAVED_AT
        batches = iter(RepeatingLoader(engine.dataloader))
        record = train(engine, batches, begin, SAVED_AT if mode == "first" else STEPS)
        if mode == "first":
            engine.save_checkpoint(place, client_state={"note": [1, (2, 3)]})
        results[stage, precision] = record, held(engine)
        engine.destroy()
    if mode == "first":
        torch.distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    torch.save(results, folder / f"{mode}-{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), CELLS[sys.argv[3]])
