"""One GPU: what the engine costs beside the bare loop, for the 1B OLMo shape in bf16 with fused AdamW.

    python tests/perf/gpu.py --json tests/perf/results/gpu.json

rho = step of a hand-written loop (bf16 weights, fp32 masters, fused AdamW) / step under the engine, medians of interleaved
rounds. Also counts, in the engine's steady state, allocator segments made and host synchronisations.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zerorun

WIDTH, LAYERS, HEADS, VOCABULARY, HIDDEN = 2048, 16, 16, 50304, 8192


class Block(nn.Module):
    """OLMo's: pre-norm without parameters, fused QKV, SwiGLU, no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(F.layer_norm(x, (WIDTH,))).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        gate, up = self.up(F.layer_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Olmo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(F.layer_norm(x, (WIDTH,)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def bare_step() -> Callable[[torch.Tensor], None]:
    model = Olmo().cuda()
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0, fused=True)

    def step(ids: torch.Tensor) -> None:
        model(ids).backward()
        for master, param in zip(masters, params, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        torch._foreach_copy_([param.data for param in params], masters)

    return step


def engine_step(stage: int) -> Callable[[torch.Tensor], None]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    engine = zerorun.initialize(Olmo(), config)

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(ids))
        engine.step()

    return step


def measure(step: Callable[[torch.Tensor], None], ids: torch.Tensor, steps: int) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step(ids)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / steps


def count_steady_state(step: Callable[[torch.Tensor], None], ids: torch.Tensor) -> dict[str, int]:
    """Allocator segments made and host synchronisations (as torch warns of them) in three steps."""
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(ids)
    torch.cuda.set_sync_debug_mode("default")
    synchronisations = sum("synchroniz" in str(entry.message) for entry in caught)
    segments = torch.cuda.memory_stats()["segment.all.allocated"] - before
    return {"segments": int(segments), "synchronisations": synchronisations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    ids = torch.randint(0, VOCABULARY, (args.batch, args.context), device="cuda")
    contenders = {"bare": bare_step(), **{f"zerorun-{stage}": engine_step(stage) for stage in range(4)}}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        measure(step, ids, 3)
    for _ in range(args.rounds):
        for name, step in contenders.items():
            times[name].append(measure(step, ids, args.steps))
    bare = statistics.median(times["bare"])
    found: dict[str, Any] = {}
    for name, step in contenders.items():
        median = statistics.median(times[name])
        found[name] = {"step_s": median, "rho": bare / median, **count_steady_state(step, ids)}
        print(name, found[name])
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "hardware": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "commit": commit,
            "command": " ".join(sys.argv),
            "found": found,
        }
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
