"""Train the GPT of train_gpt.py on ranks that divide it three ways: into stages, within layers, and by data.

    zerorun --nproc-per-node 8 examples/train_3d.py --config examples/configs/3d.json

The degrees are in the JSON alone: pipeline.stages, tensor_parallel.size, and what is left of the ranks for data. With
--record FILE, one more step is written down at the end, for zerorun-schedule --measured FILE --svg PICTURE.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from train_gpt import (
    GPT,
    REPORT_EVERY,
    VALIDATION_BATCHES,
    Block,
    build_parser,
    finish,
    load_text,
    next_byte_loss,
    usage,
    windows,
)

import zerorun


class Embedding(GPT):
    """The first layer: what a GPT does before its blocks."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__(0, width, 1, context)
        del self.blocks, self.norm, self.head

    forward = GPT.embed


class Head(GPT):
    """The last layer: what a GPT does after its blocks."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__(0, width, 1, context)
        del self.blocks, self.token, self.position

    forward = GPT.logits


def build_stage(args: argparse.Namespace, config: zerorun.Config) -> zerorun.PipelineModule:
    """The layers of this rank's stage; those of other stages are never built."""
    layers = [
        zerorun.LayerSpec(Embedding, args.width, args.context),
        *(zerorun.LayerSpec(Block, args.width, args.heads) for _ in range(args.layers)),
        zerorun.LayerSpec(Head, args.width, args.context),
    ]
    return zerorun.PipelineModule(
        layers,
        num_stages=config.pipeline.stages,
        loss_fn=next_byte_loss,
        partition_method=config.pipeline.partition,
        chunks=config.pipeline.chunks,
    )


def batches(engine: zerorun.Engine, text: Tensor, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches without end: the same ones on all ranks of one data-parallel rank, whatever part they have."""
    place = (engine.topology.data_parallel_rank, engine.topology.data_parallel_size)
    for number in itertools.count():
        yield windows(text, context, engine.train_micro_batch_size_per_gpu(), seed + number, place)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    zerorun.init_distributed()
    config = zerorun.config.load_config(args.config)
    engine = zerorun.initialize(build_stage(args, config), config)
    with torch.device("meta"):  # the whole model, without memory
        flops_per_token = GPT(args.layers, args.width, args.heads, args.context).flops_per_token()

    say = print if dist.get_rank() == 0 else lambda *unused, **options: None
    say(engine.topology.describe(), flush=True)
    text, held_out = load_text(args.data, args.context)
    data = batches(engine, text, args.context, args.seed * 1_000_000_007 + engine.micro_steps)

    def validation_loss() -> float:
        same = batches(engine, held_out, args.context, seed=0)
        return engine.eval_batch(same, num_micro_batches=VALIDATION_BATCHES).item()

    terminal = os.environ.get("ZERORUN_TTY") == "1" or sys.stderr.isatty()
    bar = tqdm(total=args.steps, unit="step", disable=not terminal or dist.get_rank() != 0)
    curve: list[tuple[int, float | None, float | None]] = [(0, None, validation_loss())]
    losses, began = [], time.perf_counter()
    for step in range(engine.global_steps + 1, args.steps + 1):
        losses.append(engine.train_batch(data).item())  # forward, backward and update; the same number on all ranks
        bar.update()
        evaluating = step % args.eval_every == 0 or step == args.steps
        if evaluating or step % REPORT_EVERY == 0:
            train = sum(losses) / len(losses)
            speed = engine.train_batch_size() * args.context * len(losses) / (time.perf_counter() - began)
            valid = validation_loss() if evaluating else None
            curve.append((step, train, valid))
            shown = "" if valid is None else f"validation {valid:.3f}, "
            line = f"loss {train:.3f}, {shown}{usage(engine.device, speed, flops_per_token)}"
            bar.set_postfix_str(line)
            if not terminal:
                say(f"step {step}/{args.steps}: {line}", flush=True)
            losses, began = [], time.perf_counter()
    bar.close()
    if args.record:
        engine.record(args.record, data)
    if dist.get_rank() == 0:
        finish(args, curve)
    engine.destroy()


def parse_arguments() -> argparse.Namespace:
    parser = build_parser(config="3d", steps=300)
    parser.add_argument("--record", metavar="FILE", help="write a trace of one more step, for zerorun-schedule --measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
