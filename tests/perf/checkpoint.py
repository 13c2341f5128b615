"""Checkpoint benchmark: saving and loading by zerorun, DCP and DeepSpeed beside dd and a copy in memory.

    python tests/perf/checkpoint.py --params 107M --rounds 3

2 gloo ranks with 1 thread each, fp32 or bf16 with fp32 masters, AdamW, fully sharded (stage 3, FSDP2). Every contender has
processes of its own; rounds are interleaved, and figures are medians over rounds. In a process:

    save    of everything, durable. Peers do not wait for the disk, so `sync` follows and counts
    stall   how long the training loop waits for an asynchronous save; the second of the process
    load    of everything, after the files have left the page cache

What comes before the timed save goes to memory (/dev/shm). The yardsticks, in the same process: ``dd`` writes the bytes of
the contender's own checkpoint from memory into one file (bs=1M conv=fsync), and reads the contender's files (bs=1M);
``direct`` does the same past the page cache (bs=8M oflag=direct, iflag=direct); ``copy`` copies a tensor of the rank's
bytes to another, on both ranks at once. Disks in clouds are fast for some gigabytes, and slow until they have rested:
``--pause`` seconds pass before each use of the disk, and from round to round another one is first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare_peers import SIZES, VOCABULARY, build_model, versions

CONTENDERS = ("zerorun", "dcp", "deepspeed")
CONTEXT = 64


# -- one contender, on one rank ----------------------------------------------------------------------------------


class Zerorun:
    """Stage 3."""

    durable = True  # the files are on the disk when save returns

    def __init__(self, model: Any, dtype: str) -> None:
        import zerorun

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": dtype == "bf16"},
        }
        self.engine = zerorun.initialize(model, config)

    def step(self, ids: Any) -> None:
        self.engine.backward(self.engine(ids, ids))
        self.engine.step()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(folder)

    def save_later(self, folder: Path) -> Callable[[], None]:
        self.engine.save_checkpoint(folder, asynchronous=True)
        return self.engine.wait_for_checkpoint

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(folder)

    def held_bytes(self) -> int:
        inventory = self.engine.checkpointer.inventory
        return sum(part.tensor.nbytes for part in [*inventory.weights(), *inventory.optimizer_state()[0]])


class Dcp:
    """FSDP2 with torch.distributed.checkpoint."""

    durable = False

    def __init__(self, model: Any, dtype: str) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.distributed.init_process_group("cpu:gloo")
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if dtype == "bf16" else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self, ids: Any) -> None:
        self.model(ids, ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=folder)

    def save_later(self, folder: Path) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(self._state(), checkpoint_id=folder)
        return lambda: (future.result(), None)[1]  # type: ignore[union-attr]

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class DeepSpeed:
    """Stage 3."""

    durable = False

    def __init__(self, model: Any, dtype: str) -> None:
        import deepspeed
        import torch

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": dtype == "bf16"},
        }
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.engine = deepspeed.initialize(model=model, optimizer=adamw, config=config)[0]

    def step(self, ids: Any) -> None:
        self.engine.backward(self.engine(ids, ids))
        self.engine.step()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))

    save_later = None

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder))


def work(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    kind: Any = {"zerorun": Zerorun, "dcp": Dcp, "deepspeed": DeepSpeed}[args.worker]
    contender = kind(build_model(args.params, CONTEXT), args.dtype)
    rank, folder = torch.distributed.get_rank(), Path(args.folder)
    ids = torch.randint(VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(rank))
    contender.step(ids)
    figures: dict[str, float] = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        torch.distributed.barrier()
        begun = time.perf_counter()
        result = act()
        figures[name] = time.perf_counter() - begun
        torch.distributed.barrier()
        return result

    memory, content = Path("/dev/shm") / folder.name, folder / "dd.bin"
    contender.save(memory / "first")
    if contender.save_later is not None:
        for attempt in ("second", "third"):
            timed("stall_s", lambda: contender.save_later(memory / attempt))()  # noqa: B023
            contender.step(ids)
    torch.distributed.barrier()
    if rank == 0:
        gather_bytes(memory / "first", memory / "content")
        for name in ("first", "second", "third"):
            shutil.rmtree(memory / name, ignore_errors=True)

    def save() -> None:
        contender.save(folder / "saved")
        if not contender.durable:
            sync(folder / "saved")

    def dd(*options: str, source: Path | None = None) -> Callable[[], None]:
        def act() -> None:
            for path in [source] if source else files_of(folder / "saved"):
                target = content if source else "/dev/null"
                if rank == 0:
                    subprocess.run(["dd", f"if={path}", f"of={target}", *options], check=True, capture_output=True)

        return act

    whole = memory / "content"
    writes = [
        ("save_s", save),
        ("dd_save_s", dd("bs=1M", "conv=fsync", source=whole)),
        ("direct_save_s", dd("bs=8M", "conv=fsync", "oflag=direct", source=whole)),
    ]
    reads = [
        ("load_s", lambda: contender.load(folder / "saved")),
        ("dd_load_s", dd("bs=1M")),
        ("direct_load_s", dd("bs=8M", "iflag=direct")),
    ]
    for acts in (writes, reads):
        for name, act in acts[args.turn :] + acts[: args.turn]:
            if acts is reads:
                forget(files_of(folder / "saved"))
            time.sleep(args.pause)
            timed(name, act)
            if rank == 0:
                content.unlink(missing_ok=True)
    figures["bytes"] = sum(path.stat().st_size for path in files_of(folder / "saved"))
    if args.worker == "zerorun":
        held = contender.held_bytes()
        source, target = torch.ones(held, dtype=torch.uint8), torch.ones(held, dtype=torch.uint8)
        for _ in range(3):
            timed("copy_s", lambda: target.copy_(source))
    if rank == 0:
        Path(args.result).write_text(json.dumps(figures))
    torch.distributed.barrier()
    os._exit(0)  # peers' background threads may abort an ordinary end


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def gather_bytes(folder: Path, target: Path) -> None:
    """All files of ``folder`` in one."""
    with target.open("wb") as whole:
        for path in files_of(folder):
            whole.write(path.read_bytes())


def sync(folder: Path) -> None:
    """Wait for the disk, as far as the save has not."""
    for path in files_of(folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def forget(files: list[Path]) -> None:
    """Let the files leave the page cache."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


# -- all of them -------------------------------------------------------------------------------------------------


def run(name: str, turn: int, args: argparse.Namespace) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder))
    result = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    command += ["--worker", name, "--folder", str(folder), "--result", str(result), "--turn", str(turn)]
    command += ["--params", args.params, "--dtype", args.dtype, "--pause", str(args.pause)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "ZERORUN_DEVICE": "cpu"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        if not result.exists():
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        return json.loads(result.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(Path("/dev/shm") / folder.name, ignore_errors=True)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    def median(results: list[dict[str, float]], key: str) -> float:
        values = [result[key] for result in results if key in result]
        return statistics.median(values) if values else float("nan")

    def speed(results: list[dict[str, float]], key: str) -> str:
        return f"{median(results, 'bytes') / 1e9 / median(results, key):.2f}"

    lines = ["| | save, GB/s | dd | direct | load, GB/s | dd | direct | stall, s |", "|---|" + "---:|" * 7]
    for name, results in found.items():
        keys = ("save_s", "dd_save_s", "direct_save_s", "load_s", "dd_load_s", "direct_load_s")
        speeds = " | ".join(speed(results, key) for key in keys)
        lines.append(f"| {name} | {speeds} | {median(results, 'stall_s'):.3f} |")
    if "zerorun" in found:
        lines.append(f"\none copy in memory of a rank's bytes: {median(found['zerorun'], 'copy_s'):.3f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=list(SIZES), default="107M")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds for the disk to rest")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
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
            found[name].append(run(name, round_ % 3, args))
    print(table(found))
    if args.json:
        record = {"command": " ".join(sys.argv), "versions": versions(), "cpus": os.cpu_count(), "found": found}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
