"""NVMe benchmark: reads and writes past the page cache by every back end beside dd, and updates of states in a file.

    python tests/perf/nvme.py --folder /mnt/nvme --json tests/perf/results/nvme.json

    GB/s     one large write, and one large read, of memory and of a file that are there already
    busy     the same while another thread of the program runs Python all the time, as a training loop does
    core     processor seconds per GB, of the idle case
    dd       bs=8M with oflag=direct conv=notrunc, and with iflag=direct: one request at a time

The second table is of AdamW over units whose master and moments are in a file (``StateFile``), with 2 to 4 buffers: time of
a step, beside the same in memory, and beside what the disk needs for as many bytes, read by one ticket and then written.

Rounds are interleaved, in another order each time, and figures are medians with the best in brackets: disks in clouds are
fast for some gigabytes, and slow until they have rested, so ``--pause`` seconds pass before each use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from compare_peers import versions

from zerorun.ops import aio
from zerorun.ops.aio import AsyncFile, aligned_empty
from zerorun.ops.single_pass import Adam
from zerorun.zero.offload.nvme import StateFile

Figures = dict[str, list[float]]


@contextlib.contextmanager
def busy_python() -> Iterator[None]:
    """A thread that never lets go of the interpreter by itself."""
    stop = False

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    yield
    stop = True
    thread.join()


# -- reads and writes --------------------------------------------------------------------------------------------------


def measure_backend(path: Path, memory: torch.Tensor, figures: Figures, pause: float) -> None:
    """Append GB/s and seconds of processor per GB."""
    file = AsyncFile(path)
    gigabytes = memory.nbytes / 1e9
    for label, surroundings in (("", contextlib.nullcontext), (" busy", busy_python)):
        for what, begin in (("write", file.write), ("read", file.read)):
            time.sleep(pause)
            with surroundings():
                used, began = time.process_time(), time.perf_counter()
                begin(memory, 0).wait()
                seconds = time.perf_counter() - began
            figures[what + label].append(gigabytes / seconds)
            if not label:
                figures[f"{what} core"].append((time.process_time() - used) / gigabytes)
    file.close()


def measure_dd(path: Path, nbytes: int, figures: Figures, pause: float) -> None:
    size = ["bs=8M", f"count={nbytes // (8 << 20)}"]
    for what, arguments in (
        ("write", ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]),
        ("read", [f"if={path}", "of=/dev/null", "iflag=direct"]),
    ):
        time.sleep(pause)
        done = subprocess.run(["dd", *arguments, *size], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
        found = re.search(r"(\d+) bytes.* ([\d.]+) s,", done.stderr)
        assert found, done.stderr
        figures[what].append(int(found[1]) / 1e9 / float(found[2]))


def usable_backends() -> list[str]:
    found = []
    for name in aio.BACKENDS:
        os.environ["ZERORUN_AIO"] = name
        if aio.status().backend == name:
            found.append(name)
    return found


def transfers(folder: Path, nbytes: int, rounds: int, pause: float) -> dict[str, Figures]:
    path, memory = folder / "zerorun-nvme-benchmark", aligned_empty(nbytes).fill_(1)
    contenders = [*usable_backends(), "dd"]
    found: dict[str, Figures] = {name: defaultdict(list) for name in contenders}
    try:
        path.write_bytes(b"")
        os.truncate(path, 0)
        measure_dd(path, nbytes, defaultdict(list), pause)  # the file is there from now on
        for turn in range(rounds):
            for name in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
                if name == "dd":
                    measure_dd(path, nbytes, found[name], pause)
                else:
                    os.environ["ZERORUN_AIO"] = name
                    measure_backend(path, memory, found[name], pause)
    finally:
        os.environ.pop("ZERORUN_AIO", None)
        path.unlink(missing_ok=True)
    return found


# -- steps -------------------------------------------------------------------------------------------------------------


class Training:
    """AdamW over ``units`` tensors [numel] fp32, in memory or, with ``buffer_count``, in a file."""

    def __init__(self, folder: Path, units: int, numel: int, buffer_count: int) -> None:
        self.store = None
        if buffer_count:
            self.store = StateFile(folder, {key: [numel] for key in range(units)}, 2, buffer_count=buffer_count)
            self.masters = [self.store.master(key, 0) for key in range(units)]
        else:
            self.masters = [torch.zeros(numel) for _ in range(units)]
        self.gradient = torch.ones(numel, dtype=torch.bfloat16)
        self.out = torch.empty(numel, dtype=torch.bfloat16)
        self.optimizer = Adam(self.masters, lr=1e-3)
        if self.store:
            self.optimizer.state_home = self.store.home
        self.step()

    def step(self) -> float:
        """Seconds, the writing of the last unit included."""
        began = time.perf_counter()
        settings = self.optimizer.prepare(self.masters)
        if self.store:
            self.store.begin()
        for key, (master, taken) in enumerate(zip(self.masters, settings, strict=True)):
            where = self.store.open(key) if self.store else None
            if self.store and key + 1 < len(self.masters):
                self.store.prefetch(key + 1)
            self.optimizer.update(master, self.gradient, self.out, taken, 1.0, where)
            if self.store:
                self.store.release(key)
        if self.store:
            self.store.flush()
        return time.perf_counter() - began


def disk_seconds(folder: Path, nbytes: int) -> float:
    """To read ``nbytes`` and to write them, by one request each."""
    store = StateFile(folder, {0: [nbytes // 4]}, 0, buffer_count=2)
    for _ in range(2):  # the first makes the file
        began = time.perf_counter()
        store.open(0)
        store.release(0)
        store.flush()
        total = time.perf_counter() - began
    store.close()
    return total


def steps(folder: Path, units: int, numel: int, rounds: int, pause: float) -> dict[str, list[float]]:
    trainings = {f"{n} buffers" if n else "memory": Training(folder, units, numel, n) for n in (0, 2, 3, 4)}
    found: dict[str, list[float]] = defaultdict(list)
    names = [*trainings, "disk alone"]
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            time.sleep(pause)
            if name == "disk alone":
                found[name].append(disk_seconds(folder, 12 * numel * units))
            else:
                found[name].append(trainings[name].step())
    for training in trainings.values():
        if training.store:
            training.store.close()
    return found


# -- figures -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--mebibytes", type=int, default=256, help="of one transfer")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--numel", type=int, default=4 << 20, help="of one unit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.2)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    moved = transfers(args.folder, args.mebibytes << 20, args.rounds, args.pause)
    columns = ("write", "read", "write busy", "read busy", "write core", "read core")
    print(" " * 9 + "".join(f"{column:>14}" for column in columns))
    for name, figures in moved.items():
        shown = [figures.get(column) for column in columns]
        cells = [f"{statistics.median(v):6.2f} ({max(v):5.2f})" if v else "" for v in shown]
        print(f"{name:9}" + "".join(f"{cell:>14}" for cell in cells))
    stepped = steps(args.folder, args.units, args.numel, args.rounds, args.pause)
    print(f"\n{args.units} units of {args.numel} elements, ms per step")
    for name, seconds in stepped.items():
        print(f"{name:12} {1000 * statistics.median(seconds):8.1f} ({1000 * min(seconds):8.1f})")
    if args.json:
        record = {"command": " ".join(sys.argv), "versions": versions(), "cpus": os.cpu_count()}
        record |= {"transfers": moved, "step_seconds": stepped}
        Path(args.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
