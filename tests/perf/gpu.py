"""One GPU, calls of under 8 minutes: what the engine costs, how well it uses the GPU, what offload costs, and what fits.

    python tests/perf/gpu.py --parts optimizer runtime memory offload --json tests/perf/results/gpu_benchmark.json
    python tests/perf/gpu.py --parts 7B largest --json tests/perf/results/gpu_large.json
    python tests/perf/gpu.py --device cpu --tiny        # the same code on small models, to see that it works

    machine    bandwidths of the device, the host link and host memory, and the best matmul: what the rest is divided by
    optimizer  one mixed-precision AdamW update at 28 bytes per element, beside a device copy and torch's fused AdamW
    runtime    1B OLMo shape: step of a hand-written loop / step under the engine (rho), for every stage; MFU; and what
               the steady state allocates and waits for; FSDP2 and DeepSpeed, if it is installed, beside the same loop
    memory     1B: what estimate_memory() says, beside what is held between steps and at the peak of one
    7B         the 7B OLMo shape with full activation checkpointing, resident if it fits, else with a part offloaded: MFU
    offload    1B with the optimizer in host memory, beside the resident step, and its lower bound
    largest    most layers of the 7B shape's width that train, by bisection: resident and offloaded

MFU is with causal attention, without the embedding but with the head, without what is computed again: of the data sheet's
peak and of the best matmul measured here. Every part runs in a process of its own, and has a time limit: one that fails or
takes too long leaves its reason in the result, and the others their time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from compare_peers import versions
from gpu_models import SHAPES, Shape
from gpu_parts import GIB, fits, host_bytes, host_room, largest, machine, memory, offload_bound, optimizer, steps

Found = dict[str, Any]
PARTS = ("optimizer", "runtime", "memory", "offload", "7B", "largest")
HELD = ["zerorun-0", "zerorun-1", "zerorun-3", "zerorun-3+offload-all"]


class Runner:
    """Runs parts in processes of their own until the time is up. Fork: torch is imported once, and CUDA not in this one."""

    def __init__(self, device: str, limit_s: float) -> None:
        self.device, self.deadline = torch.device(device), time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def __call__(self, limit_s: float, part: Callable[..., Found], **arguments: Any) -> Found:
        """What ``part`` found, or ``error``; with ``seconds``."""
        begun, limit_s = time.monotonic(), min(limit_s, self.left_s)
        if limit_s < 1:
            return {"error": "no time left"}
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, part, self.device, arguments))
        process.start()
        sender.close()
        found: Found = {"error": f"not done after {limit_s:.0f} s"}
        try:
            if receiver.poll(limit_s):
                found = receiver.recv()
        except EOFError:
            process.join()
            found = {"error": f"the process ended with exit code {process.exitcode}"}
        process.kill()
        process.join()
        return {**found, "seconds": round(time.monotonic() - begun, 1)}


def _child(sender: Connection, part: Callable[..., Found], device: torch.device, arguments: Found) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # DeepSpeed's log
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
            device = torch.device("cuda", torch.cuda.current_device())
        found = part(device, **arguments)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    sender.send(found)
    sender.close()
    os._exit(0)  # some peers abort while the interpreter ends


# -- the parts -----------------------------------------------------------------------------------------------------------


def measure(run: Runner, args: argparse.Namespace) -> Found:
    tiny = args.tiny
    one, seven = (SHAPES[f"tiny {name}" if tiny else name] for name in ("1B", "7B"))
    usual: Found = {"shape": one, "context": 32 if tiny else 2048, "rounds": 1 if tiny else 3, "repeat": 1 if tiny else 6}
    usual["batch"] = 2 if tiny else args.batch
    found: Found = {"machine": run(60, machine, tiny=tiny)}
    works: dict[str, Callable[[], Found]] = {
        "optimizer": lambda: run(60, optimizer, tiny=tiny),
        "runtime": lambda: runtime(run, args, usual),
        "memory": lambda: run(60, memory, names=HELD, shape=one, batch=usual["batch"], context=usual["context"]),
        "offload": lambda: offload(
            run, args, {**usual, "batch": 2 * usual["batch"], "rounds": 1 if tiny else 2, "repeat": 2}
        ),
        "7B": lambda: seven_b(run, args, {**usual, "shape": seven, "base": None, "rounds": 1, "repeat": 1 if tiny else 3}),
        "largest": lambda: largest_models(run, args, seven, found["machine"]),
    }
    return found | {name: works[name]() for name in args.parts}


def runtime(run: Runner, args: argparse.Namespace, usual: Found) -> Found:
    found = run(150, steps, names=[f"zerorun-{stage}" for stage in range(4)], base="bare", **usual)
    for peer in args.peers:
        found[peer] = run(60, steps, names=[_stage(peer, 2)], base="bare", **usual)
    return found


def _stage(peer: str, stage: int) -> str:
    return f"{peer}-{stage}" if peer == "deepspeed" else peer


def offload(run: Runner, args: argparse.Namespace, usual: Found) -> Found:
    names = ["zerorun-3+offload", "zerorun-3+offload-all"]
    found = run(100, steps, names=names, base="zerorun-3", **usual)
    for peer in args.peers:
        found[peer] = run(45, steps, names=[f"{_stage(peer, 2)}+offload"], base=None, **{**usual, "rounds": 1})
    return found


def seven_b(run: Runner, args: argparse.Namespace, usual: Found) -> Found:
    """Resident; where it is too large, with 0.6 of the optimizer in host memory."""
    found: Found = {}
    for name in ("zerorun-3+ckpt", "zerorun-3+ckpt+offload-part"):
        found[name] = run(120, steps, names=[name], **usual)
        if "step_s" in found[name].get("found", {}).get(name, {}):
            break
    for peer in args.peers:
        name = f"{_stage(peer, 3)}+ckpt"
        found[name] = run(45, steps, names=[name], **usual)
    return found


def largest_models(run: Runner, args: argparse.Namespace, shape: Shape, machine: Found) -> Found:
    """Billions of parameters by contender, with what each try said. A size that the host has no room for is not tried."""
    peers = [_stage(peer, 3) for peer in args.peers]
    names = [f"{name}+ckpt{where}" for where in ("", "+offload-all") for name in ("zerorun-3", *peers)]
    limit = 16 * shape.with_layers(2).numel if args.tiny else None  # bytes: more than 2 tiny layers do not fit
    found: Found = {}
    for index, name in enumerate(names):
        tries: list[Found] = []
        until = time.monotonic() + run.left_s / (len(names) - index)

        def tried(candidate: Shape, name: str = name, tries: list[Found] = tries, until: float = until) -> bool:
            answer = _try(run, name, candidate, limit, until, 32 if args.tiny else 1024)
            tries.append({"layers": candidate.layers, **answer})
            return "step_s" in answer

        first, most = (3, 4) if args.tiny else _span(name, shape, machine)
        layers = largest(tried, shape, first, most)
        billions = shape.with_layers(layers).numel / 1e9 if layers else 0.0
        found[name] = {"billions": billions, "layers": layers, "at_most": most, "tries": tries}
    return found


def _span(name: str, shape: Shape, machine: Found) -> tuple[int, int]:
    """Layers to try first, and at most: 20 and 14 bytes per parameter on the device; with offload, what the host allows."""
    if host_bytes(name):
        most = max(1, int(host_room() / host_bytes(name) / shape.block_numel) - 2)
        return most, most
    blocks = machine.get("device_gib", 80) * GIB / shape.block_numel
    return int(blocks / 20), int(blocks / 14)


def _try(run: Runner, name: str, shape: Shape, limit: int | None, until: float, context: int) -> Found:
    needed = host_bytes(name) * shape.numel
    if needed > host_room():
        return {"error": f"needs about {needed / GIB:.0f} GiB of host memory, there are {host_room() / GIB:.0f}"}
    left = min(60.0, until - time.monotonic())
    return run(left, fits, name=name, shape=shape, context=context, limit_bytes=limit)


# -- what it comes to ------------------------------------------------------------------------------------------------------


def rows(found: Any) -> Any:
    """Every measured step in ``found``, at any depth: (name, figures)."""
    for name, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, dict) and "tflops" in value:
            yield name, value
        else:
            yield from rows(value)


def conclude(found: Found) -> None:
    """Add MFU to every step, and the lower bound to the offloaded ones."""
    machine = found["machine"]
    for _, row in rows(found):
        for key, peak in (("mfu_datasheet", "datasheet_tflops"), ("mfu_matmul", "matmul_tflops")):
            if machine.get(peak):
                row[key] = row["tflops"] / machine[peak]
    part = found.get("offload", {})
    for row in part.get("found", {}).values():
        if "base_s" in row and "host_triad_gb_s" in machine:
            row["bound"] = offload_bound(machine, {"step_s": row["base_s"]}, part["numel"])
            row["of_resident"] = 1 / row.pop("rho")
            row["of_bound"] = row["step_s"] / row["bound"]["bound_s"]
            moved_s = sum(spent for term, spent in row["bound"].items() if term not in ("compute_s", "bound_s"))
            row["hidden"] = 1 - (row["step_s"] - row["bound"]["compute_s"]) / moved_s


def table(found: Found) -> str:
    keys = (
        "rho",
        "mfu_datasheet",
        "mfu_matmul",
        "of_resident",
        "of_bound",
        "hidden",
        "peak_gib",
        "segments",
        "synchronisations",
    )
    lines = [f"machine: {found['machine']}"]
    for name, row in found.get("optimizer", {}).get("found", {}).items():
        lines.append(f"optimizer: {name:30} {row['ms']:9.3f} ms {row['gb_s']:8.1f} GB/s {row['of_copy']:6.1%} of the copy")
    for part in found:
        for name, row in rows({part: found[part]}):
            figures = "  ".join(f"{key} {row[key]:.3g}" for key in keys if key in row)
            lines.append(f"{part}: {name:30} {1e3 * row['step_s']:9.1f} ms  {figures}")
    for name, row in found.get("memory", {}).get("found", {}).items():
        lines.append(f"memory: {name:30} " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    for name, row in found.get("largest", {}).items():
        lines.append(f"largest: {name:30} {row['billions']:.3g} billion parameters, {row['layers']} layers")
    lines += [f"without a result: {name}: {reason}" for name, reason in errors(found) if "largest" not in name]
    return "\n".join(lines)


def errors(found: Any, name: str = "") -> Any:
    """(where, reason) of everything that has none."""
    if isinstance(found, dict):
        if "error" in found:
            yield name, found["error"]
        for key, value in found.items():
            yield from errors(value, f"{name}/{key}" if name else key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand parameters")
    parser.add_argument("--batch", type=int, default=4, help="samples of 2048 tokens for the 1B and 7B shapes")
    parser.add_argument("--peers", nargs="*", default=["fsdp2", "deepspeed"], choices=["fsdp2", "deepspeed"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--limit", type=float, default=460.0, help="seconds for everything")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    args.peers = [peer for peer in args.peers if peer == "fsdp2" or importlib.util.find_spec(peer)]
    if args.device == "cpu":
        os.environ.update(ZERORUN_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    begun = time.monotonic()
    found = measure(Runner(args.device, args.limit), args)
    conclude(found)
    print(table(found))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        record = {
            "command": " ".join(sys.argv),
            "commit": commit,
            "versions": {**versions(), "platform": platform.platform()},
            "seconds": round(time.monotonic() - begun),
            "found": found,
        }
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
