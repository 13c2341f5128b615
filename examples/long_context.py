"""Train a Llama on sequences that do not fit one process, by dividing each between ranks: memory against length, drawn.

    python examples/long_context.py

Starts 1, 2 and 4 ranks one after the other, on the CPU or on GPUs. Each trains an unmodified transformers model for a step
at every length, and notes the most bytes of tensors that a rank held at once. Prints a table, the losses, which are equal,
and draws longcontext.png. --policy recomputes blocks (full), and keeps what is needed for it in host memory (host).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerorun

MIB = 1 << 20
POLICIES = {
    "none": {},
    "full": {"activation_checkpointing": {"policy": "full"}},
    "host": {"activation_checkpointing": {"policy": "full", "cpu_checkpointing": True}},
}


def main() -> None:
    args = parse_arguments()
    if args.result:
        train(args)
        return
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    found = {ranks: run(args, ranks, args.lengths) for ranks in args.ranks}
    print("tokens   " + "".join(f"{f'{ranks} ranks':>12}" for ranks in args.ranks) + "   MiB of tensors at most; loss")
    for number, length in enumerate(args.lengths):
        peaks = "".join(f"{found[ranks][number]['peak'] / MIB:12.1f}" for ranks in args.ranks)
        losses = {f"{found[ranks][number]['loss']:.5f}" for ranks in args.ranks}
        print(f"{length:<9}{peaks}   {' '.join(sorted(losses))}")
    draw(found, folder / "longcontext.png")
    print(f"memory against length: {folder / 'longcontext.png'}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="tokens of a sequence")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--policy", choices=POLICIES, default="none")
    parser.add_argument("--method", choices=("auto", "ulysses", "gather"), default="ulysses", help="of attention")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--out", default="runs/long_context")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, ranks: int, lengths: list[int]) -> list[dict[str, float]]:
    """What ``ranks`` ranks found: for each length the peak in bytes, of the rank that has most, and the loss."""
    result = Path(args.out) / f"{ranks}.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--standalone", "--nproc-per-node", str(ranks), __file__]
    command += ["--lengths", *map(str, lengths), "--policy", args.policy, "--method", args.method]
    command += ["--layers", str(args.layers), "--width", str(args.width), "--vocabulary", str(args.vocabulary)]
    command += ["--result", str(result)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: list[dict[str, float]] = json.loads(result.read_text())
    return found


# -- one run -------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Take a step at each length, and write what was found."""
    from transformers import LlamaConfig, LlamaForCausalLM

    zerorun.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.width,
            intermediate_size=args.width * 11 // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=max(args.lengths),
        )
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": dist.get_world_size(),
        "context_parallel": {"method": args.method},
        **POLICIES[args.policy],
    }
    engine = zerorun.initialize(model.train(), config)
    found = []
    for length in args.lengths:
        ids = torch.randint(args.vocabulary, (1, length), generator=torch.Generator().manual_seed(length))
        ids = ids.to(engine.device)
        step(engine, ids[:, :16])  # what stays from step to step is there now
        peak, loss = measured(engine, ids)
        found.append({"length": length, "peak": max(gathered(peak)), "loss": loss})
    if dist.get_rank() == 0:
        Path(args.result).write_text(json.dumps(found))
    engine.destroy()


def step(engine: zerorun.Engine, ids: torch.Tensor) -> float:
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def measured(engine: zerorun.Engine, ids: torch.Tensor) -> tuple[int, float]:
    """Return (the most bytes of tensors at once in one step, its loss)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        loss = step(engine, ids)
        return torch.cuda.max_memory_allocated(), loss
    states = sum(engine.memory_report().values())
    with Alive() as alive:
        loss = step(engine, ids)
    return states + alive.peak, loss


def gathered(peak: int) -> list[int]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, peak)
    return found


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and are still alive. ``peak``: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):  # what was there before
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._made:
                self._known.add(leaf.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


def draw(found: dict[int, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(7, 4))
    for ranks, rows in found.items():
        label = "1 rank" if ranks == 1 else f"{ranks} ranks"
        axes.plot([row["length"] for row in rows], [row["peak"] / MIB for row in rows], marker="o", label=label)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("MiB of tensors on a rank, at most")
    axes.set_ylim(bottom=0)
    axes.legend()
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
