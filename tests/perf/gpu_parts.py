"""What gpu.py measures: each part is a function that returns figures, and runs in a process of its own."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import torch
from gpu_models import Olmo, Shape, Step, build, config, free

from zerorun.ops import native, on_cuda, single_pass
from zerorun.ops.torch_updates import adam as torch_adam
from zerorun.ops.update_operands import Operands

GIB = 1 << 30
STEP_BYTES = 28  # per element of a mixed-precision AdamW update: bf16 in, three fp32 tensors both ways, bf16 out
# TFLOPS of bf16 matmuls, dense, as the data sheets have it.
PEAKS = {"H100": 989.0, "H200": 989.0, "GH200": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, repeat: int = 1) -> float:
    """Of one of ``repeat`` calls in a row, after one that leaves to them what each leaves to the next: a host's update."""
    work()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeat):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / repeat


def interleaved(
    works: dict[str, Callable[[], object]], device: torch.device, *, rounds: int, repeat: int
) -> dict[str, float]:
    """Median seconds of a call, by name; in every round all take their turn."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(-1, rounds):
        for name, work in works.items():
            spent = seconds(work, device, repeat if number >= 0 else 1)
            if number >= 0:
                found[name].append(spent)
    return {name: statistics.median(times) for name, times in found.items()}


# -- the machine ---------------------------------------------------------------------------------------------------------


def machine(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Bandwidths in GB/s, matmul in TFLOPS: the denominators of everything else."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found["device_gib"] = torch.cuda.mem_get_info(device)[1] / GIB
    found["datasheet_tflops"] = next((peak for key, peak in PEAKS.items() if key in name.split()[-1] or key in name), None)
    found["matmul_tflops"] = max(_matmul_tflops(size, device) for size in ((256, 384) if tiny else (4096, 8192, 16384)))
    numel = 1 << (18 if tiny else 28)
    source, target = (torch.zeros(numel, device=device) for _ in range(2))
    found["copy_gb_s"] = 8 * numel / seconds(lambda: target.copy_(source), device, 5) / 1e9
    found |= _link(device, 1 << (18 if tiny else 28))
    one, other = (torch.ones(1 << (18 if tiny else 26)) for _ in range(2))
    works = {"triad": lambda: one.add_(other, alpha=0.5)}
    found["host_triad_gb_s"] = 12 * one.numel() / interleaved(works, device, rounds=5, repeat=2)["triad"] / 1e9
    return found


def _matmul_tflops(size: int, device: torch.device) -> float:
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    spent = interleaved({"matmul": lambda: one @ other}, device, rounds=5, repeat=5)["matmul"]
    return 2 * size**3 / spent / 1e12


def _link(device: torch.device, numel: int) -> dict[str, float]:
    """Pinned copies one way, and both ways at once (of each way)."""
    on_gpu = device.type == "cuda"
    host, host2 = (torch.ones(numel, dtype=torch.bfloat16, pin_memory=on_gpu) for _ in range(2))
    there, there2 = (torch.ones(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)] if on_gpu else [None, None]

    def down(stream: Any = None) -> None:
        with torch.cuda.stream(stream):
            host.copy_(there, non_blocking=True)

    def up(stream: Any = None) -> None:
        with torch.cuda.stream(stream):
            there2.copy_(host2, non_blocking=True)

    def both() -> None:
        down(streams[0])
        up(streams[1])

    times = interleaved({"down": down, "up": up, "both": both}, device, rounds=3, repeat=3)
    return {f"{name}_gb_s": 2 * numel / spent / 1e9 for name, spent in times.items()}


def optimizer(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """One mixed-precision AdamW update, beside a copy of fp32 on the device; bandwidths at 28 bytes per element."""
    numel = 1 << (18 if tiny else 28)
    weight, first, second, wide = (torch.randn(numel, device=device) * 0.01 for _ in range(4))
    second.square_()
    gradient = wide.bfloat16()
    out, count = torch.empty_like(gradient), torch.ones((), device=device)
    operands = Operands(weight, gradient, (first, second), out, 0.5)
    how: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    scale = torch.full((), 2.0, device=device)

    def once() -> None:
        settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "coefficient": 0.5}
        single_pass.adam(weight, gradient, first, second, out, step=7, **settings)

    def chain() -> None:
        wide.copy_(gradient)
        lists = ([weight], [wide], [first], [second], [], [count])
        torch._fused_adamw_(*lists, **how, amsgrad=False, maximize=False, grad_scale=scale)
        out.copy_(weight)

    works: dict[str, Callable[[], object]] = {
        "single pass": once,
        "torch, in chunks": lambda: torch_adam(operands, step=7, decoupled=True, **how),
        "cast, torch fused AdamW, cast": chain,
        "copy": lambda: wide.copy_(weight),
    }
    times = interleaved(works, device, rounds=7, repeat=3)
    found = {
        name: {"ms": 1e3 * spent, "gb_s": (8 if name == "copy" else STEP_BYTES) * numel / spent / 1e9}
        for name, spent in times.items()
    }
    for row in found.values():
        row["of_copy"] = row["gb_s"] / found["copy"]["gb_s"]
    status = on_cuda.status(device) if device.type == "cuda" else native.status().reason
    return {"numel": numel, "in_force": status, "found": found}


# -- steps of whole models -----------------------------------------------------------------------------------------------


def steps(
    device: torch.device,
    *,
    names: list[str],
    base: str | None,
    shape: Shape,
    batch: int,
    context: int,
    rounds: int,
    repeat: int,
) -> dict[str, Any]:
    """Each of ``names`` beside ``base``, interleaved round by round, one after the other.

    By name: ``step_s``, ``base_s``, ``rho`` = base / own, ``tflops`` (see Shape.flops_per_token), ``peak_gib``,
    ``segments`` made and ``synchronisations`` in three steps, or ``error``.
    """
    ids = torch.randint(0, shape.vocabulary, (batch, context), device=device)
    tflop = shape.flops_per_token(context) * ids.numel() / 1e12
    beside = build(base, shape, device)[0] if base else None
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = _one(name, beside, ids, shape, rounds, repeat)
            found[name]["tflops"] = tflop / found[name]["step_s"]
        except Exception as error:  # the next one may still work
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
            del error
        free()
    return {"numel": shape.numel, "tokens": ids.numel(), "found": found}


def _one(name: str, beside: Step | None, ids: torch.Tensor, shape: Shape, rounds: int, repeat: int) -> dict[str, Any]:
    device = ids.device
    begun, before = time.perf_counter(), _held(device)
    step, close = build(name, shape, device)
    step(ids)
    works: dict[str, Callable[[], object]] = {"own": lambda: step(ids)}
    if beside is not None:
        works = {"base": lambda: beside(ids), **works}
    setup_s = time.perf_counter() - begun
    times = interleaved(works, device, rounds=rounds, repeat=repeat)
    if device.type == "cuda":  # without the base's own peak
        torch.cuda.reset_peak_memory_stats(device)
    found: dict[str, Any] = {"step_s": times["own"], "setup_s": setup_s, **steady_state(step, ids)}
    found["peak_gib"] = (_peak(device) - before) / GIB
    if beside is not None:
        found |= {"base_s": times["base"], "rho": times["base"] / times["own"]}
    close()
    return found


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def steady_state(step: Step, ids: torch.Tensor) -> dict[str, int]:
    """Allocator segments made and host synchronisations (as torch warns of them) in three steps; {} on a CPU."""
    if ids.device.type != "cuda":
        for _ in range(3):
            step(ids)
        return {}
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(ids)
    torch.cuda.set_sync_debug_mode("default")
    synchronisations = sum("synchroniz" in str(entry.message) for entry in caught)
    segments = torch.cuda.memory_stats()["segment.all.allocated"] - before
    return {"segments": int(segments), "synchronisations": synchronisations}


def memory(device: torch.device, *, names: list[str], shape: Shape, batch: int, context: int) -> dict[str, Any]:
    """What estimate_memory() says beside what is taken: between steps, and at the peak of one.

    The estimate of the peak is given what forward and backward of the bare model take at their highest.
    """
    import zerorun

    ids = torch.randint(0, shape.vocabulary, (batch, context), device=device)
    activations = _activations(shape, ids)
    found: dict[str, Any] = {}
    for name in names:
        family, *options = name.split("+")
        settings = config(int(family.partition("-")[2]), options)
        with torch.device("meta"):
            described = Olmo(shape)
        estimate = zerorun.estimate_memory(described, settings, 1, device=device.type, activation_bytes=activations)
        free()
        before = _held(device)
        step, close = build(name, shape, device)
        for _ in range(2):
            step(ids)
        between = _held(device) - before
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step(ids)
        row = {"held_gib": between / GIB, "estimated_held_gib": estimate.device_bytes / GIB}
        row |= {"peak_gib": (_peak(device) - before) / GIB, "estimated_peak_gib": estimate.step_peak_bytes / GIB}
        row |= {"held_of_estimate": row["held_gib"] / row["estimated_held_gib"]}
        found[name] = row | {"peak_of_estimate": row["peak_gib"] / row["estimated_peak_gib"]}
        del step
        close()
    return {"activations_gib": activations / GIB, "found": found}


def _activations(shape: Shape, ids: torch.Tensor) -> int:
    """Bytes that a forward and backward in bf16 take at their highest beside the parameters; gradients go at once."""
    device = ids.device
    with device:
        model = Olmo(shape).bfloat16()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    before = _held(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model(ids).backward()
    return max(0, _peak(device) - before)


def offload_bound(machine: dict[str, Any], resident: dict[str, Any], numel: int) -> dict[str, float]:
    """Seconds that no exact step with the optimizer in host memory can do without; the longest of them is the bound.

    Gradients go down in fp32, as they were reduced, and weights come up in bf16; both at once at the bandwidth of both.
    """
    terms = {
        "compute_s": resident["step_s"] - STEP_BYTES * numel / machine["copy_gb_s"] / 1e9,
        "down_s": 4 * numel / machine["down_gb_s"] / 1e9,
        "up_s": 2 * numel / machine["up_gb_s"] / 1e9,
        "host_update_s": STEP_BYTES * numel / machine["host_triad_gb_s"] / 1e9,
    }
    return {**terms, "bound_s": max(terms.values())}


# -- the largest model ---------------------------------------------------------------------------------------------------


def fits(device: torch.device, *, name: str, shape: Shape, context: int, limit_bytes: int | None) -> dict[str, Any]:
    """Two steps of one sample. ``limit_bytes``: of the device, if not all; without a GPU, of 16 for each parameter."""
    if limit_bytes is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info(device)[1], device)
    elif limit_bytes is not None and 16 * shape.numel > limit_bytes:
        raise torch.OutOfMemoryError(f"16 bytes for each of {shape.numel} parameters are more than {limit_bytes}")
    step, _ = build(name, shape, device)
    ids = torch.randint(0, shape.vocabulary, (1, context), device=device)
    step(ids)
    return {"step_s": seconds(lambda: step(ids), device), "peak_gib": _peak(device) / GIB}


def host_room() -> int:
    """Bytes of host memory that models may take: 0.8 of what is available here."""
    available = psutil.virtual_memory().available
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        folder = "/sys/fs/cgroup" if limit == "memory.max" else "/sys/fs/cgroup/memory"
        try:
            with open(f"{folder}/{limit}") as most, open(f"{folder}/{usage}") as used:
                available = min(available, int(most.read()) - int(used.read()))
        except (OSError, ValueError):  # there is no such file, or no limit
            continue
    return int(0.8 * available)


def host_bytes(name: str) -> int:
    """Of host memory for each parameter, about; pinned memory comes in powers of two."""
    if "offload-all" not in name:
        return 0
    return 26 if name.startswith("zerorun") else 20


def largest(tried: Callable[[Shape], bool], shape: Shape, first: int, most: int) -> int:
    """The largest number of layers that fits, to 6 %, from 0 to ``most``, by bisection from ``first`` on."""
    low, high, middle = 0, most + 1, min(first, most)
    while high - low > max(1, low // 16) and middle > 0:
        low, high = (middle, high) if tried(shape.with_layers(middle)) else (low, middle)
        middle = (low + high) // 2
    return low
