"""Train a GPT whose states do not fit into a memory cap, by keeping them on a disk (on a GPU: in host memory).

    python examples/offload.py --memory-cap 1450M

Three runs of the same model and data: with everything in memory and no cap; the same under the cap, which zerorun
refuses with a table of bytes and the nearest configuration that fits; and offloaded, under the cap. Prints bytes by kind,
step times and losses, which are equal, and draws memory over one step by kind.

The cap is a memory cgroup where this user may make one, else a limit on the data segment (RLIMIT_DATA), which is checked
when memory is allocated, not when it is used. On a GPU it is the share of the card that the process may take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import psutil
import torch
import torch.nn.functional as F

import zerorun
from zerorun.errors import DoesNotFitError

sys.path.insert(0, str(Path(__file__).parent))
from train_gpt import GPT, load_text, windows

MIB = 1 << 20
BATCH, CONTEXT = 2, 64


def main() -> None:
    args = parse_arguments()
    if args.run:
        Path(args.result).write_text(json.dumps(train(args)))
        return
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, capped in (("resident", False), ("resident", True), ("offloaded", True)):
        title = f"{name}, at most {args.memory_cap}" if capped else f"{name}, no cap"
        print(f"\n== {title}", flush=True)
        found[title] = run_child(args, name, args.memory_cap if capped else None)
        report(found[title])
    resident, _, offloaded = found.values()
    if "refused" in offloaded:
        raise SystemExit("the cap is too small for the offloaded run, too")
    print(f"\nstep time offloaded / resident: {offloaded['step_s'] / resident['step_s']:.2f}")
    print(f"losses are the same: {offloaded['losses'] == resident['losses']}")
    draw({title: result for title, result in found.items() if "samples" in result}, folder / "offload.png")
    print(f"memory over one step: {folder / 'offload.png'}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-cap", type=size, default=size("1450M"), help="bytes; K, M and G are understood")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder for what does not fit; its files vanish")
    parser.add_argument("--out", default="runs/offload")
    parser.add_argument("--run", choices=["resident", "offloaded"], help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


class Size(int):
    """Bytes; printed as MiB."""

    def __str__(self) -> str:
        return f"{self / MIB:.0f} MiB"


def size(text: str) -> Size:
    factors = {"K": 1 << 10, "M": MIB, "G": 1 << 30}
    found = Size(float(text.rstrip("KMGiB")) * factors.get(text.rstrip("iB")[-1:], 1))
    if found < MIB:
        raise argparse.ArgumentTypeError(f"{text} is {int(found)} bytes; write {text}M for MiB")
    return found


# -- one run -------------------------------------------------------------------------------------------------------


def configuration(offloaded: bool, disk: str, cuda: bool) -> dict[str, Any]:
    to_host: dict[str, Any] = {"device": "cpu"}
    placed = {"offload_optimizer": to_host if cuda else {"device": "nvme", "nvme_path": disk}, "offload_param": to_host}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 3, **(placed if offloaded else {})},
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes by kind, seconds of a step, losses, and samples of one step; or why it was refused."""
    cuda = torch.cuda.is_available()
    if cuda and os.environ.get("OFFLOAD_CAP"):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(int(os.environ["OFFLOAD_CAP"]) / total)
    text, _ = load_text(None, CONTEXT)
    torch.manual_seed(0)
    try:
        with zerorun.zero.Init():
            model = GPT(args.layers, args.width, args.width // 64, CONTEXT)
        engine = zerorun.initialize(model, configuration(args.run == "offloaded", args.disk, cuda))
    except (DoesNotFitError, torch.OutOfMemoryError) as error:
        return {"refused": str(error)}
    losses, times = [], []
    for step in range(args.steps):
        inputs, targets = windows(text, CONTEXT, BATCH, seed=step)
        sampler = Sampler(engine) if step == args.steps - 1 else contextlib.nullcontext()
        began = time.perf_counter()
        with sampler:
            logits = engine(inputs.to(engine.device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(engine.device).flatten())
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    kinds = engine.memory_report()
    return {
        "kinds": kinds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_s": median(times[1:-1]),
        "losses": losses,
        "samples": sampler.samples,
        "peak": peak_bytes(),
    }


class Sampler:
    """While it is entered, counts the bytes that autograd keeps, and the process's memory, at every block."""

    def __init__(self, engine: zerorun.Engine) -> None:
        self.samples: list[tuple[float, int, int]] = []  # (seconds, kept by autograd, resident set)
        self._kept: dict[int, list[int]] = {}  # address of storage -> [uses, bytes]
        self._own = {p.untyped_storage().data_ptr() for unit in engine.units for s in unit.flat_groups for p in [s.full]}
        self._blocks, self._handles = engine.module.blocks, []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        for block in self._blocks:
            self._handles += [block.register_forward_hook(self._sample), block.register_full_backward_hook(self._sample)]
        self._hooks.__enter__()
        self._sample()

    def __exit__(self, *unused: object) -> None:
        self._hooks.__exit__(*unused)
        self._sample()
        for handle in self._handles:
            handle.remove()

    def _sample(self, *unused: object) -> None:
        kept = sum(nbytes for _, nbytes in self._kept.values())
        self.samples.append((time.perf_counter() - self._began, kept, psutil.Process().memory_info().rss))

    def _pack(self, tensor: torch.Tensor) -> Kept:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._own or isinstance(tensor, torch.nn.Parameter):
            return Kept(tensor, None)
        entry = self._kept.setdefault(address, [0, storage.nbytes()])
        entry[0] += 1
        return Kept(tensor, lambda: self._free(address))

    def _free(self, address: int) -> None:
        self._kept[address][0] -= 1
        if not self._kept[address][0]:
            del self._kept[address]


class Kept:
    """A tensor that autograd keeps; calls ``free`` when autograd lets go of it."""

    def __init__(self, tensor: torch.Tensor, free: Any) -> None:
        self.tensor, self._free = tensor, free

    def __del__(self) -> None:
        if self._free is not None:
            self._free()


def peak_bytes() -> int:
    """Of this process: on the GPU if there is one, else of its cgroup, or its resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- the cap -------------------------------------------------------------------------------------------------------


def run_child(args: argparse.Namespace, name: str, cap: int | None) -> dict[str, Any]:
    """Run ``name`` in a process of its own, which may take ``cap`` bytes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result, group_of(cap) as enter:
        options = ["--layers", args.layers, "--width", args.width, "--steps", args.steps, "--disk", args.disk]
        command = [sys.executable, __file__, "--run", name, "--result", result.name, *map(str, options)]
        environment = {**os.environ, "OFFLOAD_CAP": str(int(cap or 0) or "")}
        done = subprocess.run(command, env=environment, preexec_fn=enter, check=False)
        if done.returncode:
            raise SystemExit(f"{name} ended with status {done.returncode}; the cap may be too small for the program")
        return dict(json.loads(Path(result.name).read_text()))


@contextlib.contextmanager
def group_of(cap: int | None) -> Iterator[Any]:
    """What a child must call to be under the cap."""
    if cap is None or torch.cuda.is_available():
        yield None
        return
    group = make_group(cap)
    if group is None:
        print(f"(no memory cgroup can be made here: RLIMIT_DATA = {cap})")
        yield lambda: resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
        return
    yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    with contextlib.suppress(OSError):
        group.rmdir()


def make_group(cap: int) -> Path | None:
    """A memory cgroup below this process's own, version 1 or 2; None if that is not allowed."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, limit = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        group = Path("/sys/fs/cgroup", base, path.lstrip("/"), f"zerorun-offload-{os.getpid()}")
        try:
            group.mkdir()
            (group / limit).write_text(str(int(cap)))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        return group
    return None


# -- what is shown -------------------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> None:
    if "refused" in result:
        print(result["refused"])
        return
    for kind, nbytes in result["kinds"].items():
        if nbytes:
            print(f"  {kind:<18}{nbytes / MIB:>9.1f} MiB")
    print(f"  peak of the process {result['peak'] / MIB:.0f} MiB, step {result['step_s']:.3f} s, losses", end=" ")
    print(" ".join(f"{loss:.4f}" for loss in result["losses"]))


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Stacked bytes by kind over one step, one panel for each run, with a legend; a kind has one colour in all of them."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {
        title: {kind: n for kind, n in result["kinds"].items() if n and not kind.startswith("disk")}
        for title, result in found.items()
    }
    every_kind = dict.fromkeys([*(kind for kinds in shown.values() for kind in kinds), "activations"])
    colours = {kind: f"C{number}" for number, kind in enumerate(every_kind)}
    highest = max(held for result in found.values() for _, _, held in result["samples"])
    figure, panels = pyplot.subplots(1, len(found), figsize=(6 * len(found), 4), sharey=True, squeeze=False)
    for panel, (title, result) in zip(panels[0], found.items(), strict=True):
        seconds, kept, held = zip(*result["samples"], strict=True)
        rows = {kind: [n / MIB] * len(seconds) for kind, n in shown[title].items()}
        rows["activations"] = [n / MIB for n in kept]
        panel.stackplot(seconds, *rows.values(), labels=list(rows), colors=[colours[kind] for kind in rows], step="post")
        panel.plot(seconds, [n / MIB for n in held], color="black", linewidth=1, label="resident set of the process")
        panel.set(title=title, xlabel="seconds into the step", ylabel="MiB")
        panel.set_ylim(top=1.45 * highest / MIB)  # room for the legend
        panel.legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
