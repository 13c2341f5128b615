"""Peer benchmark: one model, data, dtype and optimizer under zerorun, DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed.

    python tests/perf/compare_peers.py --params 25M --dtype fp32 --accumulation 1 --rounds 3

Every contender runs in processes of its own, 2 gloo ranks with 1 thread each. Rounds are interleaved: all contenders
once, then all again, starting with another one. A contender's figure is the median over rounds of its median step, and
a step takes as long as its slowest rank: of contenders that exchange something in it, that is every rank.
Prints a Markdown table; ``--json FILE`` keeps all figures with versions and the command.

``zerorun-2-offload`` and ``deepspeed-2-offload`` have the optimizer in host memory; ``zerorun-3-offload-all``
and ``deepspeed-3-offload-all`` the parameters, too:

    python tests/perf/compare_peers.py --only zerorun-2,zerorun-2-offload,deepspeed-2-offload

``before-0`` to ``before-3`` are those of another version of zerorun, in an environment of its own:

    python tests/perf/compare_peers.py --before ../before/bin/python --only before-3,zerorun-3 --rounds 5

``floor`` is what no runtime can be faster than: the whole forward and backward, a rank's share of the update, and not one
byte between ranks. ZERORUN_PEER_MEMORY=0 lets zerorun send what ranks of one host else read, as between hosts:

    ZERORUN_PEER_MEMORY=0 python tests/perf/compare_peers.py --only ddp,zerorun-3 --rounds 5

bf16: zerorun, FSDP2 and DeepSpeed compute in bf16 with fp32 masters; DDP and ZeroRedundancyOptimizer use
torch.autocast on fp32 weights, which is their way to the same semantics.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CONTENDERS = (
    "ddp",
    "ddp-zero1",
    "fsdp2",
    "fsdp2-no-reshard",
    "deepspeed-1",
    "deepspeed-2",
    "deepspeed-3",
    "zerorun-0",
    "zerorun-1",
    "zerorun-2",
    "zerorun-3",
)
# name -> (width, layers, heads); 12 * width^2 * layers parameters in blocks.
SIZES = {"1M": (128, 5, 4), "25M": (512, 8, 8), "107M": (896, 11, 14)}
VOCABULARY = 256


def build_model(size: str, context: int) -> Any:
    """A decoder-only GPT, the same weights for every contender."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, layers, heads = SIZES[size]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, width // heads)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x)).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    return GPT()


# -- one contender, on one rank ----------------------------------------------------------------------------------


def make_step(name: str, args: argparse.Namespace) -> tuple[Callable[[list[Any]], float], float]:
    """(function that takes the micro-batches of one optimizer step and returns the last loss, seconds to set up)."""
    import torch

    model = build_model(args.params, args.context)
    begun = time.perf_counter()
    family, _, variant = name.partition("-")
    if family in ("zerorun", "before", "deepspeed"):
        step = _engine_step(family, model, variant, args)
    elif family == "floor":
        step = _floor_step(model, args)
    elif family == "ddp":
        step = _ddp_step(model, zero1=bool(variant), args=args)
    elif family == "fsdp2":
        step = _fsdp_step(model, reshard=not variant, args=args)
    else:
        step = _plain_step(model, args)
    torch.distributed.barrier()
    return step, time.perf_counter() - begun


def _engine_step(family: str, model: Any, variant: str, args: argparse.Namespace) -> Callable[[list[Any]], float]:
    stage, _, offload = variant.partition("-")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": int(stage),
            **({"offload_optimizer": {"device": "cpu"}} if offload else {}),
            **({"offload_param": {"device": "cpu"}} if offload == "offload-all" else {}),
        },
        "bf16": {"enabled": args.dtype == "bf16"},
    }
    if family != "deepspeed":
        import zerorun

        engine = zerorun.initialize(model, config)
    else:
        import deepspeed
        import torch

        adamw = None
        if not offload:  # with offload it builds its own, DeepSpeedCPUAdam
            del config["optimizer"]
            config["zero_allow_untested_optimizer"] = True
            adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        engine = deepspeed.initialize(model=model, optimizer=adamw, model_parameters=model.parameters(), config=config)[0]

    def step(batches: list[Any]) -> float:
        for ids, targets in batches:
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    return step


def _loop(
    model: Any,
    optimizer: Any,
    args: argparse.Namespace,
    sync: Callable[[bool], Any],
    updated: Callable[[], Iterable[Any]] | None = None,
) -> Any:
    """The usual loop; ``sync(last)`` is entered around each micro-batch. ``updated``: gives the parameters that are."""
    import torch

    autocast = args.dtype == "bf16" and not hasattr(model, "unshard")

    def step(batches: list[Any]) -> float:
        for index, (ids, targets) in enumerate(batches):
            with sync(index == len(batches) - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(ids, targets)
                (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(updated() if updated else model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _plain_step(model: Any, args: argparse.Namespace) -> Callable[[list[Any]], float]:
    import contextlib

    import torch

    torch.distributed.init_process_group("gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    return _loop(model, optimizer, args, lambda last: contextlib.nullcontext())


def _floor_step(model: Any, args: argparse.Namespace) -> Callable[[list[Any]], float]:
    import contextlib

    import torch

    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shares = {param: torch.nn.Parameter(_share(param, rank, size)) for param in model.parameters()}
    optimizer = torch.optim.AdamW(shares.values(), lr=1e-4, weight_decay=0.01, fused=True)

    def updated() -> Iterable[Any]:
        for param, share in shares.items():
            share.grad, param.grad = _share(param.grad, rank, size), None
        return shares.values()

    return _loop(model, optimizer, args, lambda last: contextlib.nullcontext(), updated)


def _share(tensor: Any, rank: int, size: int) -> Any:
    """What of ``tensor`` is one rank's, flat: a view."""
    return tensor.detach().view(-1).tensor_split(size)[rank]


def _ddp_step(model: Any, *, zero1: bool, args: argparse.Namespace) -> Callable[[list[Any]], float]:
    import contextlib

    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    wrapped = DistributedDataParallel(model)
    options = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
    if zero1:
        optimizer: Any = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), **options)
    return _loop(wrapped, optimizer, args, lambda last: contextlib.nullcontext() if last else wrapped.no_sync())


def _fsdp_step(model: Any, *, reshard: bool, args: argparse.Namespace) -> Callable[[list[Any]], float]:
    import contextlib

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    bf16 = args.dtype == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = policy if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def sync(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return _loop(model, optimizer, args, sync)


def work(args: argparse.Namespace) -> None:
    """One rank of one contender: time the steps; rank 0 writes what it found."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    step, setup_s = make_step(args.worker, args)
    generator = torch.Generator().manual_seed(rank)
    shape = (args.batch, args.context)
    times, losses, shares = [], [], []
    for index in range(args.warmup + args.steps):
        batches = [
            tuple(torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
            for _ in range(args.accumulation)
        ]
        torch.distributed.barrier()
        begun, cpu = time.perf_counter(), time.process_time()
        losses.append(step(batches))
        if index >= args.warmup:
            times.append(time.perf_counter() - begun)
            shares.append(time.process_time() - cpu)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, (times, peak_mb, losses[-1]))
    if rank == 0:
        of_ranks, peaks, last_losses = zip(*told, strict=True)
        result = {
            "step_s": statistics.median(map(max, zip(*of_ranks, strict=True))),
            "cpu_s": statistics.median(shares),
            "peak_mb": max(peaks),
            "loss": sum(last_losses) / len(last_losses),
            "setup_s": setup_s,
        }
        Path(args.result).write_text(json.dumps(result))
    torch.distributed.barrier()
    os._exit(0)  # some peers abort while the interpreter ends


# -- all contenders ----------------------------------------------------------------------------------------------


def result_of(name: str, command: list[str]) -> dict[str, Any] | None:
    """What processes of ``command`` write into the file ``--result``. None, with their last lines printed, if nothing."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [*command, "--worker", name, "--result", result.name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        text = Path(result.name).read_text()
        if not text:
            print(f"{name} failed:", *done.stderr.splitlines()[-15:], sep="\n  ", file=sys.stderr)
            return None
        return dict(json.loads(text))


def run_contender(name: str, args: argparse.Namespace) -> dict[str, float] | None:
    """Run one contender in processes of its own. None, with its last lines printed, if it fails."""
    python = args.before if name.startswith("before-") else sys.executable
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += [__file__, "--params", args.params]
    for option in ("dtype", "accumulation", "batch", "context", "steps", "warmup"):
        command += [f"--{option}", str(getattr(args, option))]
    return result_of(name, command)


def table(found: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> str:
    """Markdown: medians over rounds, ratios to the first contender that ran."""

    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in found[name])

    names = [name for name in found if found[name]]
    base = names[0]
    lines = [
        f"{args.params} parameters, {args.dtype}, accumulation {args.accumulation}, {args.ranks} gloo ranks, 1 thread "
        f"each, {args.batch} x {args.context} tokens per rank and micro-batch, clipping 1.0, fused AdamW; "
        f"median of {args.rounds} rounds",
        "",
        f"| runtime | step, ms | / {base} | peak memory per rank, MB | set-up, s | loss - {base}'s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in names:
        step = median(name, "step_s")
        lines.append(
            f"| {name} | {1000 * step:.1f} | {step / median(base, 'step_s'):.2f} | {median(name, 'peak_mb'):.0f} "
            f"| {median(name, 'setup_s'):.2f} | {median(name, 'loss') - median(base, 'loss'):+.1e} |"
        )
    return "\n".join(lines)


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for package in ("torch", "deepspeed", "zerorun"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "python": platform.python_version(), "machine": platform.machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=list(SIZES), default="25M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and micro-batch")
    parser.add_argument("--context", type=int, default=64, help="tokens per sample")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, comma separated; the first is the base")
    parser.add_argument("--before", help="the Python of an environment with another version of zerorun, for before-N")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    names = args.only.split(",")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for round_ in range(args.rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            result = run_contender(name, args)
            if result is not None:
                found[name].append(result)
    print(table(found, args))
    if args.json:
        record = {"command": " ".join(sys.argv), "versions": versions(), "cpus": os.cpu_count(), "found": found}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
