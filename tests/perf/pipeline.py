"""What pipelines lose: measured bubbles beside the formulas, with layers of known times, and steps beside those of peers.

    python tests/perf/pipeline.py bubbles [--stages 4] [--micro-batches 8] [--json FILE]
    python tests/perf/pipeline.py peers [--rounds 5] [--json FILE]

``bubbles``: layers that sleep for exact times take the place of computation, so that the bubble alone is measured, on any
number of cores. ``peers``: the same GPT on 2 stages under zerorun, DeepSpeed's PipelineModule and
torch.distributed.pipelining (1F1B), interleaved in one run, over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from compare_peers import versions
from torch import nn

HERE = Path(__file__).resolve()
FORWARD_S, INPUT_S, WEIGHT_S = 0.4, 0.4, 0.4


# -- layers that sleep -------------------------------------------------------------------------------------------


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Sleeper) -> torch.Tensor:
        ctx.layer = layer
        time.sleep(layer.times[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        layer = ctx.layer
        time.sleep(layer.times[1])
        if layer.weight_gradients is not None:
            layer.weight_gradients.put(layer.work_off)
            return grad, None, None
        time.sleep(layer.times[2])
        return grad, torch.zeros_like(layer.weight), None


class Sleeper(nn.Module):
    """``times``: seconds of forward, input gradient, weight gradient."""

    weight_gradients: Any = None

    def __init__(self, times: tuple[float, float, float]) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Sleep.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return found

    def work_off(self) -> None:
        time.sleep(self.times[2])
        self.weight.grad = torch.zeros_like(self.weight)


def run_bubbles(kind: str, stages: int, micro_batches: int, chunks: int, out: str) -> None:
    """On one rank: train some batches and write what rank 0's pipeline did."""
    import zerorun
    from zerorun.pipeline.module import PipelineModule

    torch.set_num_threads(1)
    times = (FORWARD_S / chunks, INPUT_S / chunks, WEIGHT_S / chunks)
    module = PipelineModule(
        [Sleeper(times) for _ in range(stages * chunks)],
        num_stages=stages,
        chunks=chunks,
        partition_method="uniform",
        loss_fn=lambda value, labels: value.mean(),
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 0},
        "pipeline": {"schedule": kind, "chunks": chunks},
    }
    engine = zerorun.initialize(module, config)
    batch = (torch.ones(1, 8, requires_grad=True), None)
    for _ in range(3):
        engine.train_batch(iter([batch] * micro_batches))
    engine.record(out, iter([batch] * micro_batches))
    engine.destroy()


def bubbles(stages: int, micro_batches: int) -> dict[str, Any]:
    """Measured makespans and bubbles of every schedule."""
    from zerorun.pipeline.schedule.simulate import simulate
    from zerorun.pipeline.schedule.times import Times
    from zerorun.pipeline.schedule.trace import read_trace

    rows: dict[str, Any] = {}
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "trace.json")
            launch(stages, ["--worker", "bubbles", kind, str(stages), str(micro_batches), str(chunks), out])
            report = read_trace(out).report()
            from zerorun.pipeline.schedule.schedules import make_schedule

            times = Times.make(stages, FORWARD_S, INPUT_S, WEIGHT_S)
            ideal = simulate(make_schedule(kind, stages, micro_batches, chunks=chunks, times=times), times)
            rows[kind] = {
                "makespan_s": report.makespan,
                "bubble": report.bubble,
                "simulated_s": ideal.makespan,
                "simulated_bubble": ideal.bubble,
                "kept": max(ideal.peak_kept),
            }
    return rows


# -- peers -------------------------------------------------------------------------------------------------------

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH, MICRO_BATCHES = 256, 4, 8, 512, 128, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.one(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(nn.functional.gelu(self.up(self.two(x))))


def model_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCABULARY)]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    return found


def config_of(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_batch_size": BATCH * MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 0},
        **more,
    }


def make_zerorun(schedule: str) -> Any:
    import zerorun

    module = zerorun.PipelineModule(model_layers(), num_stages=2, loss_fn=loss_of)
    engine = zerorun.initialize(module, config_of(pipeline={"schedule": schedule}))
    return lambda step: float(engine.train_batch(iter(micro_batches(step))))


def make_deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    module = PipelineModule(model_layers(), num_stages=2, loss_fn=loss_of, partition_method="parameters")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    config = {key: value for key, value in config_of().items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    return lambda step: float(engine.train_batch(iter(micro_batches(step))))


def make_torch() -> Any:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    layers, rank = model_layers(), dist.get_rank()
    half = LAYERS // 2 + 1
    stage_module = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-3, fused=True)

    def step(number: int) -> float:
        batch = micro_batches(number)
        inputs, labels = (torch.cat(parts) for parts in zip(*batch, strict=True))
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        squares = torch.stack([p.grad.square().sum() for p in stage_module.parameters() if p.grad is not None]).sum()
        dist.all_reduce(squares)
        scale = min(1.0, 1.0 / (float(squares.sqrt()) + 1e-6))
        for param in stage_module.parameters():
            if param.grad is not None:
                param.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step


def run_peers(rounds: int, out: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    import zerorun

    zerorun.init_distributed()
    makers = {
        "zerorun 1f1b": lambda: make_zerorun("1f1b"),
        "zerorun zero_bubble": lambda: make_zerorun("zero_bubble"),
        "torch 1F1B": make_torch,
        "DeepSpeed": make_deepspeed,
    }
    steps = {name: make() for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        for number in range(4):
            losses[name].append(step(number))
    for number in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            for more in range(3):
                losses[name].append(step(100 + 3 * number + more))
            dist.barrier()
            times[name].append((time.perf_counter() - begun) / 3)
    if dist.get_rank() == 1:
        Path(out).write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()


def peers(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "times.json")
        launch(2, ["--worker", "peers", str(rounds), out])
        found: dict[str, Any] = json.loads(Path(out).read_text())
        return found


def launch(ranks: int, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", str(ranks), str(HERE), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        kind, *rest = sys.argv[2:]
        if kind == "bubbles":
            run_bubbles(rest[0], int(rest[1]), int(rest[2]), int(rest[3]), rest[4])
        else:
            run_peers(int(rest[0]), rest[1])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bubbles", "peers"))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write all figures to this file")
    options = parser.parse_args()
    if options.what == "bubbles":
        found = bubbles(options.stages, options.micro_batches)
        show_bubbles(found)
    else:
        found = peers(options.rounds)
        show_peers(found)
    if options.json:
        record = {"command": " ".join(sys.argv), "versions": versions(), "cpus": os.cpu_count(), "found": found}
        Path(options.json).write_text(json.dumps(record, indent=1))


def show_bubbles(rows: dict[str, Any]) -> None:
    print("| schedule | step s | formula s | idle s of a rank | formula s | ratio | kept | of 1F1B's step |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind, row in rows.items():
        print(
            f"| {kind} | {row['makespan_s']:.3f} | {row['simulated_s']:.3f} | {row['bubble']:.3f} "
            f"| {row['simulated_bubble']:.3f} | {row['bubble'] / row['simulated_bubble']:.3f} | {row['kept']:g} "
            f"| {row['makespan_s'] / rows['1f1b']['makespan_s']:.3f} |"
        )


def show_peers(found: dict[str, Any]) -> None:
    base = statistics.median(found["times"]["zerorun 1f1b"])
    print("| runtime | step s | of zerorun's | last loss |")
    print("|---|---:|---:|---:|")
    for name, times in found["times"].items():
        median = statistics.median(times)
        print(f"| {name} | {median:.3f} | {median / base:.2f} | {found['losses'][name][-1]:.5f} |")


if __name__ == "__main__":
    main()
