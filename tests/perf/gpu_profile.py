"""Where the time of a step goes on one GPU: launches, what the host waits for, and when the GPU has nothing to do.

    python tests/perf/gpu_profile.py --names bare zerorun-1 --json tests/perf/results/gpu_profile.json
    python tests/perf/gpu_profile.py --device cpu --tiny --names bare zerorun-1   # the same code, to see that it works

For each contender (see gpu_models.py), of three steps in its steady state, per step: ``launches`` of kernels and copies,
``host_waits`` by the CUDA call that waits, ``busy_ms`` in which at least one kernel or copy runs, ``step_ms`` from the
first to the last of them, ``gaps`` longer than 20 us with what ran before, and the kernels that take longest.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from compare_peers import versions
from gpu_models import SHAPES, Step, build
from torch.profiler import ProfilerActivity, profile

STEPS, GAP_US, SHOWN = 3, 20.0, 12
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")


def traced(step: Step, ids: torch.Tensor) -> list[dict[str, Any]]:
    """The events of ``STEPS`` steps as the profiler has them, times in microseconds."""
    for _ in range(2):
        step(ids)
    on_gpu = ids.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            step(ids)
        if on_gpu:
            torch.cuda.synchronize()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    return [
        {
            "name": event.name(),
            "device": str(event.device_type()).rpartition(".")[2] != "CPU",
            "begin": event.start_ns() / 1e3,
            "end": (event.start_ns() + event.duration_ns()) / 1e3,
        }
        for event in found.profiler.kineto_results.events()
    ]


def figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Per step, of the events of ``STEPS`` steps."""
    calls = Counter(event["name"] for event in events if not event["device"])
    work = sorted((event for event in events if event["device"]), key=lambda event: event["begin"])
    took: Counter[str] = Counter()
    gaps, busy, until, last = [], 0.0, None, ""
    for event in work:
        took[event["name"]] += event["end"] - event["begin"]
        if until is not None and event["begin"] - until > GAP_US:
            gaps.append({"us": event["begin"] - until, "after": last[:80], "before": event["name"][:80]})
        begin = event["begin"] if until is None else max(event["begin"], until)
        busy += max(0.0, event["end"] - begin)
        if until is None or event["end"] > until:
            until, last = event["end"], event["name"]
    whole = until - work[0]["begin"] if work and until is not None else 0.0
    return {
        "step_ms": whole / STEPS / 1e3,
        "busy_ms": busy / STEPS / 1e3,
        "launches": sum(count for name, count in calls.items() if name.startswith(LAUNCHES)) / STEPS,
        "host_waits": {name: count / STEPS for name, count in calls.items() if name.startswith(WAITS)},
        "gaps": sorted(gaps, key=lambda gap: -gap["us"])[:SHOWN],
        "gaps_ms": sum(gap["us"] for gap in gaps) / STEPS / 1e3,
        "kernels_ms": {name[:120]: us / STEPS / 1e3 for name, us in took.most_common(SHOWN)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--shape", default="1B", choices=("1B", "7B"))
    parser.add_argument("--batch", type=int, default=4, help="samples of 2048 tokens")
    parser.add_argument("--names", nargs="+", default=["bare", "zerorun-1"])
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    shape = SHAPES[f"tiny {args.shape}" if args.tiny else args.shape]
    ids = torch.randint(0, shape.vocabulary, (2, 32) if args.tiny else (args.batch, 2048), device=device)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}
    for name in args.names:
        step, close = build(name, shape, device)
        found[name] = figures(traced(step, ids))
        shown = {key: value for key, value in found[name].items() if key not in ("gaps", "kernels_ms")}
        print(name, json.dumps(shown))
        del step
        close()
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
        about = {
            "command": " ".join(sys.argv),
            "commit": commit,
            "versions": {**versions(), "platform": platform.platform()},
        }
        Path(args.json).write_text(json.dumps({**about, "found": found}, indent=1))


if __name__ == "__main__":
    main()
