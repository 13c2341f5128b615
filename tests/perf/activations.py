"""What activation checkpointing costs and saves: a stack of GPT blocks, forward and backward, on this machine.

    python tests/perf/activations.py --rounds 5

Every policy trains the same stack in turn, round after round; a figure is the median over rounds. Times are CPU times of
the process, in one thread, so that other programs on the machine disturb them little. Bytes are those of all tensors that
are alive between forward and backward and were made in the forward, in host memory apart. Prints a Markdown table;
``--json FILE`` keeps the figures with versions and the command.

Recomputing a matrix product costs the same for every byte that it makes, whatever its shape, as long as its input is as
wide as the block; so what selective checkpointing can reach depends on the attention, whose result is small and whose
cost grows with the length.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerorun.activations.blocks import CheckpointedBlocks, Recompute
from zerorun.activations.host_pool import HostPool
from zerorun.plan.units import repeated_blocks

POLICIES = ("plain", "full", "every_n", "selective", "full, host", "selective, host")


class Block(nn.Module):
    """Attention and MLP of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Storages(TorchDispatchMode):
    """Remembers, weakly, every storage that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive_bytes(self, without: set[int]) -> int:
        return sum(size for key, (ref, size) in self.made.items() if key not in without and not ref.expired())


class Contender:
    """One policy over a stack of its own, with the same weights as the others'."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.stack = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.x = torch.randn(args.batch, args.length, args.width, requires_grad=True)
        policy, _, place = name.partition(", ")
        self.pool = HostPool(torch.device("cpu")) if place else None
        if name != "plain":
            settings = Recompute(policy, args.every_n, self.pool)
            CheckpointedBlocks(self.stack, repeated_blocks(self.stack), settings)
        self.seconds: list[float] = []

    def step(self) -> float:
        """CPU seconds of one forward and backward."""
        self.stack.zero_grad()
        begun = time.process_time()
        self.stack(self.x).square().mean().backward()
        return time.process_time() - begun

    def kept(self) -> tuple[int, int]:
        """(bytes on the device, bytes in host memory) between forward and backward."""
        given = {tensor.untyped_storage()._cdata for tensor in (self.x, *self.stack.parameters())}
        buffers = [buffer for spare in self.pool._free.values() for buffer in spare] if self.pool else []
        given |= {buffer.untyped_storage()._cdata for buffer in buffers}  # host memory, though a CPU tensor here
        with Storages() as storages:
            output = self.stack(self.x)
        on_device = storages.alive_bytes(given)
        output.square().mean().backward()
        return on_device, sum(buffer.nbytes for buffer in buffers)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    contenders = {name: Contender(name, args) for name in POLICIES}
    for contender in contenders.values():
        contender.step()
        contender.step()
    for round_ in range(args.rounds):
        order = list(contenders.values())
        for contender in order[round_ % len(order) :] + order[: round_ % len(order)]:
            contender.seconds.append(contender.step())
    medians = {name: statistics.median(contender.seconds) for name, contender in contenders.items()}
    # Differences are taken by round, before the median: neighbours in time share the machine's state.
    plain = contenders["plain"].seconds
    extra = {
        name: statistics.median(mine - theirs for mine, theirs in zip(contender.seconds, plain, strict=True))
        for name, contender in contenders.items()
    }
    kept = {name: contender.kept() for name, contender in contenders.items()}
    freed = kept["plain"][0] - kept["full"][0]
    return [
        {
            "policy": name,
            "ms": medians[name] * 1e3,
            "extra_ms": extra[name] * 1e3,
            "extra_of_full": extra[name] / extra["full"],
            "kept_bytes": kept[name][0],
            "host_bytes": kept[name][1],
            "saved_of_full": (kept["plain"][0] - kept[name][0]) / freed,
        }
        for name in POLICIES
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| policy | step, ms | extra, ms | extra / full's | kept, MB | in host memory, MB | saved / full's |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['policy']} | {row['ms']:.0f} | {row['extra_ms']:.0f} | {row['extra_of_full']:.2f} "
            f"| {row['kept_bytes'] / 1e6:.1f} | {row['host_bytes'] / 1e6:.1f} | {row['saved_of_full']:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 512), ("heads", 8), ("layers", 2), ("batch", 1), ("length", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--every-n", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args)
    print_table(rows)
    if args.json is not None:
        found = {"command": sys.argv, "torch": torch.__version__, "machine": platform.processor(), "rows": rows}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
