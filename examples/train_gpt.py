"""Train a small byte-level GPT with zerorun: on one process or many, on CPUs or GPUs.

    zerorun --nproc-per-node 2 examples/train_gpt.py --config examples/configs/zero3.json

The text is the source code of Python's own standard library, so nothing is downloaded; --data takes a file or a folder.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import zerorun

REPORT_EVERY = 25  # steps
VALIDATION_BATCHES = 8  # of train_batch_size windows
NOT_TEXT = {"site-packages", "dist-packages", "test", "encodings"}  # other people's code, test data, number tables
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250}  # one GPU, dense bf16


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.2)
        nn.init.normal_(self.position.weight, std=0.2)

    def flops_per_token(self) -> int:
        """Of forward and backward, counted as in the paper on PaLM (arXiv:2204.02311, appendix B)."""
        multiplied = sum(p.numel() for p in self.blocks.parameters()) + self.head.weight.numel()
        return 6 * multiplied + 12 * len(self.blocks) * self.position.weight.numel()

    def embed(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def load_text(path: str | None, context: int) -> tuple[Tensor, Tensor]:
    """Bytes to train on and bytes to validate with: every tenth file, or of a few files the last tenth."""
    root = Path(path or sysconfig.get_paths()["stdlib"])
    found = [root, *root.rglob("*")] if path else [*root.glob("*.py"), *root.glob("*/*.py")]
    files = sorted(file for file in found if file.is_file() and (path or file.parent.name not in NOT_TEXT))
    texts = [file.read_bytes() for file in files]
    train, valid = b"".join(text for i, text in enumerate(texts) if i % 10 != 9), b"".join(texts[9::10])
    if not valid:
        train, valid = train[: len(train) * 9 // 10], train[len(train) * 9 // 10 :]
    if min(len(train), len(valid)) <= context:
        raise SystemExit(f"{root}: too little text for windows of {context} bytes")
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(bytearray(valid), dtype=torch.uint8)


def windows(
    text: Tensor, context: int, size: int, seed: int, place: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """``size`` random windows of ``context`` bytes, other ones on each rank, and the byte that follows each byte.

    ``place``: (data-parallel rank, number of them), where not every rank is one.
    """
    rank, ranks = place or (dist.get_rank(), dist.get_world_size())
    everyone = torch.Generator().manual_seed(seed)  # all ranks draw for all, so that the world size changes nothing
    starts = torch.randint(len(text) - context, (ranks, size, 1), generator=everyone)[rank]
    chosen = text[starts + torch.arange(context + 1)].long()
    return chosen[:, :-1], chosen[:, 1:]


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.to(logits.device).flatten())


def mean_over_ranks(losses: list[Tensor]) -> float:
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(engine: zerorun.Engine, text: Tensor, context: int) -> float:
    """Validation loss over all ranks, on the same windows every time."""
    engine.eval()
    losses = []
    for batch in range(VALIDATION_BATCHES):
        inputs, targets = windows(text, context, engine.train_micro_batch_size_per_gpu(), seed=batch)
        losses.append(next_byte_loss(engine(inputs.to(engine.device)), targets))
    engine.train()
    return mean_over_ranks(losses)


def main() -> None:
    args = build_parser().parse_args()
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads, args.context)
    flops_per_token = model.flops_per_token()
    engine = zerorun.initialize(model=model, config=args.config)
    text, held_out = load_text(args.data, args.context)
    terminal = os.environ.get("ZERORUN_TTY") == "1" or sys.stderr.isatty()
    bar = tqdm(total=args.steps, unit="step", disable=not terminal or dist.get_rank() != 0)
    curve: list[tuple[int, float | None, float | None]] = [(0, None, evaluate(engine, held_out, args.context))]
    losses, began = [], time.perf_counter()
    for step in range(engine.global_steps + 1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            seed = args.seed * 1_000_000_007 + engine.micro_steps
            inputs, targets = windows(text, args.context, engine.train_micro_batch_size_per_gpu(), seed)
            loss = next_byte_loss(engine(inputs.to(engine.device)), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        bar.update()
        evaluating = step % args.eval_every == 0 or step == args.steps
        if evaluating or step % REPORT_EVERY == 0:
            train = mean_over_ranks(losses)
            speed = inputs.numel() * len(losses) * dist.get_world_size() / (time.perf_counter() - began)
            valid = evaluate(engine, held_out, args.context) if evaluating else None
            curve.append((step, train, valid))
            shown = "" if valid is None else f"validation {valid:.3f}, "
            line = f"loss {train:.3f}, {shown}{usage(engine.device, speed, flops_per_token)}"
            bar.set_postfix_str(line)
            if not terminal and dist.get_rank() == 0:
                print(f"step {step}/{args.steps}: {line}", flush=True)
            losses, began = [], time.perf_counter()
    bar.close()
    if dist.get_rank() == 0:
        finish(args, curve)
    engine.destroy()


def usage(device: torch.device, speed: float, flops_per_token: int) -> str:
    """Speed of all ranks together (on a GPU that we know, MFU: the share of its peak) and memory of this rank."""
    flops = speed * flops_per_token
    if device.type == "cpu":
        rate, memory = f"{flops / 1e9:.0f} GFLOP/s", psutil.Process().memory_info().rss
    else:
        peak = next((peak for name, peak in PEAK_TFLOPS.items() if name in torch.cuda.get_device_name(device)), None)
        share = flops / dist.get_world_size() / 1e12
        rate = f"{share:.1f} TFLOP/s per GPU" if peak is None else f"MFU {share / peak:.1%}"
        memory = torch.cuda.max_memory_allocated(device)
    return f"{speed:,.0f} tokens/s, {rate}, {memory / 2**20:.0f} MiB per rank"


def finish(args: argparse.Namespace, curve: list[tuple[int, float | None, float | None]]) -> None:
    """Save the curve, and say how far the validation loss has come."""
    save_curve(Path(args.out or Path("runs", Path(args.config).stem)), curve)
    losses = [valid for _, _, valid in curve if valid is not None]
    print(f"validation loss {losses[-1]:.3f} nats/byte (uniform {math.log(256):.3f}, start {losses[0]:.3f})", flush=True)


def save_curve(folder: Path, curve: list[tuple[int, float | None, float | None]]) -> None:
    """Write ``loss.csv`` and ``loss.png``."""
    import matplotlib  # takes a second

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "loss.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "training_loss", "validation_loss"), *curve])
    for column, label in ((1, "training"), (2, "validation")):
        points = [(row[0], row[column]) for row in curve if row[column] is not None]
        pyplot.plot(*zip(*points, strict=True), label=label)
    pyplot.xlabel("optimizer steps")
    pyplot.ylabel("loss in nats per byte")
    pyplot.legend()
    pyplot.savefig(folder / "loss.png", dpi=100)


def build_parser(config: str = "zero3", steps: int = 500) -> argparse.ArgumentParser:
    parser = zerorun.add_config_arguments(argparse.ArgumentParser(description="Train a small byte-level GPT."))
    parser.set_defaults(config=str(Path(__file__).parent / "configs" / f"{config}.json"))
    parser.add_argument("--steps", type=int, default=steps, help="default: %(default)s, as in the configuration's schedule")
    parser.add_argument("--data", help="file or folder (default: the sources of Python's standard library)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=50, help="steps")
    parser.add_argument("--out", help="folder of the loss curve (default: runs/ and the name of the configuration)")
    return parser


if __name__ == "__main__":
    main()
