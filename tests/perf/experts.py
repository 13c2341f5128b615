"""Experts benchmark: a Mixtral whose experts are spread over ranks, beside stage 3 without, and DeepSpeed's AutoEP.

    python tests/perf/experts.py --json tests/perf/results/experts.json

Each contender trains in processes of its own, in turns. "error" is the largest difference between its losses, the means
over ranks, and those of one process with the whole batch. DeepSpeed is optional. Ranks of a host read each other's memory,
so that stage 3 gathers for nothing; with ZERORUN_PEER_MEMORY=0 they send messages, as between hosts. "busiest" is how many
times the mean the rank has to compute to which most rows go, over layers: all wait for it. With --balanced each expert gets
as many rows, whatever the routers say (without DeepSpeed, whose routers are its own).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare_peers import versions

VOCABULARY = 256
# name: (stage, ranks over which experts are spread)
CONTENDERS = {
    "zerorun-3": (3, 1),
    "zerorun-3-spread": (3, 2),
    "zerorun-2-spread": (2, 2),
    "deepspeed-2-spread": (2, 2),
    "deepspeed-3-spread": (3, 2),
}


def build_model(args: argparse.Namespace) -> Any:
    """A Mixtral, with the same weights for every contender."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.width,
            intermediate_size=2 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=args.experts,
            num_experts_per_tok=2,
            max_position_embeddings=args.context,
        )
    )
    if args.balanced:
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(chosen_evenly)
    return model


def chosen_evenly(router: Any, given: Any, made: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """What a router returns, with rows that go to one expert after the other."""
    import torch

    logits, weights, index = made
    return logits, weights, torch.arange(index.numel(), device=index.device).view(index.shape) % logits.shape[-1]


def batches_of(args: argparse.Namespace) -> Any:
    """[steps, ranks, batch, context] tokens."""
    import torch

    shape = (args.warmup + args.steps, args.ranks, args.batch, args.context)
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def config_of(stage: int, spread: int, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **({"expert_parallel": {"enabled": True, "autoep_size": spread}} if spread > 1 else {}),
    }


def make_step(args: argparse.Namespace) -> tuple[Callable[[Any], Any], Any]:
    """(A function that takes the tokens of one step, and returns the loss; the engine of zerorun, if it is one)."""
    import torch

    model = build_model(args)
    if args.worker == "one process":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

        def plain(ids: Any) -> Any:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return plain, None
    config = config_of(*CONTENDERS[args.worker], args)
    if args.worker.startswith("zerorun"):
        import zerorun

        engine = zerorun.initialize(model, config)
    else:
        import deepspeed

        if "expert_parallel" in config:
            config["expert_parallel"] |= {"preset_model": "mixtral", "use_grouped_mm": False}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step(ids: Any) -> Any:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine if args.worker.startswith("zerorun") else None


def busiest(engine: Any, spread: int) -> float:
    """Of the step that is over: the rows of the rank with most, times the mean, over layers."""
    most = []
    for rows in engine.expert_load().values():
        local = len(rows) // spread
        most.append(max(sum(rows[at : at + local]) for at in range(0, len(rows), local)) * spread / sum(rows))
    return statistics.mean(most)


def work(args: argparse.Namespace) -> None:
    """One rank of one contender. Rank 0 writes what it found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    (step, engine), alone = make_step(args), args.worker == "one process"
    spread = 1 if engine is None else CONTENDERS[args.worker][1]
    times, losses, busy = [], [], []
    for index, batch in enumerate(batches_of(args)):
        ids = batch.flatten(0, 1) if alone else batch[dist.get_rank()]
        if not alone:
            dist.barrier()
        begun = time.perf_counter()
        loss = step(ids)
        if index >= args.warmup:
            times.append(time.perf_counter() - begun)
            busy.append(busiest(engine, spread) if spread > 1 else 1.0)
        if not alone:
            dist.all_reduce(loss)
        losses.append(float(loss) / (1 if alone else args.ranks))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if alone or dist.get_rank() == 0:
        found = {"step_s": statistics.median(times), "busiest": statistics.mean(busy), "peak_mb": peak_mb}
        Path(args.result).write_text(json.dumps({**found, "losses": losses}))
    if not alone:
        dist.barrier()
    os._exit(0)  # some peers abort while the interpreter ends


OPTIONS = ("ranks", "width", "layers", "experts", "batch", "context", "steps", "warmup")


def run(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """One contender in processes of its own. None, with its last lines printed, if it fails."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command = [sys.executable, *([] if name == "one process" else start), __file__, "--worker", name]
        command += ["--result", result.name, *(word for key in OPTIONS for word in (f"--{key}", str(getattr(args, key))))]
        command += ["--balanced"] if args.balanced else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        text = Path(result.name).read_text()
        if not text:
            print(f"{name} failed:", *done.stderr.splitlines()[-15:], sep="\n  ", file=sys.stderr)
            return None
        return dict(json.loads(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"ranks": 2, "width": 256, "layers": 4, "experts": 8, "batch": 2, "context": 128, "steps": 8, "warmup": 3}
    for key in OPTIONS:
        parser.add_argument(f"--{key}", type=int, default=defaults[key])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--balanced", action="store_true", help="each expert gets as many rows")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    true = run("one process", args)
    names = [name for name in CONTENDERS if not (args.balanced and "deepspeed" in name)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in found:
            result = run(name, args)
            if result is not None:
                found[name].append(result)
    rows = {}
    for name, results in found.items():
        if results and true is not None:
            row = {key: statistics.median(result[key] for result in results) for key in ("step_s", "busiest", "peak_mb")}
            error = max(abs(a - b) for result in results for a, b in zip(result["losses"], true["losses"], strict=True))
            rows[name] = {**row, "error": error}
    base, load = rows["zerorun-3"]["step_s"], os.getloadavg()[0]
    print("| contender | step, s | against zerorun-3 | busiest | peak, MB | error of losses |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        times = f"{row['step_s']:.3f} | {row['step_s'] / base:.2f} | {row['busiest']:.2f}"
        print(f"| {name} | {times} | {row['peak_mb']:.0f} | {row['error']:.1e} |")
    print(f"load of the machine at the end: {load:.1f} on {os.cpu_count()} cores")
    if args.json is not None:
        told = {"command": " ".join(["python", *sys.argv]), "load": load, "versions": versions(), **rows}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
