"""Hardware: what the planner knows of GPUs, nodes and links, as data with its sources.

Peaks, memory and NVLink are those of the vendor's data sheets (dense, without sparsity; one way). ``matmul`` is the best
matrix product that has been measured, and ``fp8`` how much faster the best one of fp8 is, from ml-engineering's accelerator
page; where none was published they are 0.78 of the peak and 1.9. ``attention`` is the part of the peak that fused attention
reaches in a training step, from published steps with 64K tokens and more: eager modules' and the newest libraries'.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem
from ..log import counted
from ..memory.limits import node_room
from ..ops.build import cache_folder
from .number_checks import not_finite, not_whole

GB, TB = 1e9, 1e12
_MOST_GPUS = 1 << 20
LOCAL = "local"  # the name of the GPU of this machine, or of its CPU, once it has been measured


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Rates are per second: FLOPs of bf16 products, bytes of its memory, bytes of NVLink one way."""

    name: str
    peak: float
    matmul: float
    fp8: float  # how much faster the best product of fp8 is
    memory: float  # bytes that a process can have
    hbm: float
    nvlink: float
    multiprocessors: int
    attention: tuple[float, float]
    nics: float  # of all network cards of the usual node, one way
    domain: int = 8  # GPUs that NVLink joins
    host_link: float = 55 * GB  # to host memory, each way
    efficiency_of: str = ""  # the GPU whose efficiencies it has, if not its own
    latency: float = 0.0  # seconds of each collective, where it was measured; else NCCL's own table has them
    sum_latency: float = 0.0  # the same of an all-reduce, and
    sum_rate: float = 0.0  # bytes per second and rank of it, counted as a ring sends them; 0: not measured
    processes: int = 1  # that computed at once when it was measured
    cores: int = 0  # of a CPU, which those processes share
    is_host: bool = False  # a CPU: its memory is the host's, and nothing goes on behind what it computes

    @property
    def family(self) -> str:
        """The name under which efficiencies of its kernels are kept."""
        return self.efficiency_of or self.name


def _gpu(
    name: str, peak: float, matmul: float, fp8: float, memory: float, hbm: float, nvlink: float, sms: int, **more: object
) -> Gpu:
    rates = {
        "peak": peak * TB,
        "matmul": matmul * TB,
        "fp8": fp8,
        "memory": memory * 2**30,
        "hbm": hbm * TB,
        "nvlink": nvlink * GB,
    }
    return Gpu(name, **rates, multiprocessors=sms, **more)  # type: ignore[arg-type]


_A100, _HOPPER, _BLACKWELL = (0.37, 0.37), (0.19, 0.6), (0.19, 0.55)
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40", 312, 271, 1.0, 39.4, 1.555, 300, 108, attention=_A100, nics=200 * GB, efficiency_of="A100"),
        _gpu("A100-80", 312, 271, 1.0, 79.1, 2.0, 300, 108, attention=_A100, nics=200 * GB, efficiency_of="A100"),
        _gpu("H100", 989, 794, 1.77, 79.1, 3.35, 450, 132, attention=_HOPPER, nics=400 * GB),
        _gpu("H100-500W", 989, 794, 1.77, 94.5, 2.4, 450, 132, attention=_HOPPER, nics=400 * GB),
        _gpu("H200", 989, 794, 1.83, 139.8, 4.8, 450, 132, attention=_HOPPER, nics=400 * GB),
        _gpu("B200", 2250, 1745, 1.97, 178.4, 8.0, 900, 148, attention=_BLACKWELL, nics=400 * GB),
        _gpu("GB200", 2500, 1822, 1.97, 184.0, 8.0, 900, 152, attention=_BLACKWELL, nics=200 * GB, domain=72),
        _gpu("GB300", 2500, 1822, 1.97, 278.0, 8.0, 900, 152, attention=_BLACKWELL, nics=400 * GB, domain=72),
        _gpu("L40S", 362, 282, 1.9, 44.4, 0.864, 26, 142, attention=(0.4, 0.4), nics=50 * GB),
        _gpu("RTX4090", 165, 129, 1.9, 23.5, 1.008, 13, 128, attention=(0.4, 0.4), nics=12.5 * GB),
    )
}
_SAME = {"A100": "A100-80", "A100-SXM": "A100-80", "H100-80": "H100", "H100-SXM": "H100", "4090": "RTX4090"}


@dataclass(frozen=True)
class Cluster:
    """``gpus`` GPUs of one kind, ``per_node`` of them in a node. ``nics``: bytes per second of a node's cards, one way.

    ``host_memory``: bytes of a node. ``host_bandwidth``: bytes per second at which its processors read and write.
    ``disk``: bytes per second that its disks read and write in all; 0 if there are none to keep states on.
    """

    gpu: Gpu
    gpus: int
    per_node: int = 8
    nics: float = 400 * GB
    host_memory: float = 2e12
    host_bandwidth: float = 145 * GB
    disk: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            *not_whole({"gpus": self.gpus, "per_node": self.per_node}, 1),
            *not_finite({"nics": self.nics, "host_bandwidth": self.host_bandwidth}, may_be_0=False),
            *not_finite({"host_memory": self.host_memory, "disk": self.disk}, may_be_0=True),
        ]
        if problems:
            raise ConfigError(problems, "Cluster")

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)


_KNOWN = {key.upper(): key for key in GPUS} | _SAME


def is_known(name: str) -> bool:
    """True if the table has a GPU of this name."""
    return name.upper() in _KNOWN


def local_file() -> Path:
    """Return the file in which what was measured of this machine is kept."""
    return cache_folder(os.environ) / "planner.json"


def local_measurements() -> dict[str, dict[str, Any]]:
    """Return what was measured of this machine, by numbers of ranks, but for what another version wrote."""
    try:
        found = json.loads(local_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {ranks: values for ranks, values in found.items() if _is_whole(values)} if isinstance(found, dict) else {}


def _is_whole(values: Any) -> bool:
    if not isinstance(values, dict) or values.keys() != {"gpu", "efficiency", "host", "update"}:
        return False
    gpu = values["gpu"]
    return isinstance(gpu, dict) and gpu.keys() == {field.name for field in fields(Gpu)}


def local_values(ranks: int) -> dict[str, Any]:
    """Return what was measured of this machine with ``ranks`` at once; on GPUs, with any number. Raises ConfigError."""
    found = local_measurements()
    for values in (found.get(str(ranks)), *(each for each in found.values() if not each["gpu"]["is_host"])):
        if values is not None:
            return values
    reason = f"this machine has not been measured with {counted(ranks, 'rank')}."
    remedy = f"run zerorun-plan --calibrate --ranks {ranks}."
    raise ConfigError([ConfigProblem("gpu", LOCAL, reason, remedy)])


def gpu_of(name: str, ranks: int = 1) -> Gpu:
    """Return the GPU called ``name``, of whose kind a node has ``ranks``. Raises ConfigError if it is not known."""
    if name.lower() == LOCAL:
        values = local_values(ranks)["gpu"]
        return Gpu(**{**values, "attention": tuple(values["attention"])})
    if not is_known(name):
        raise ConfigError([ConfigProblem("gpu", name, "is not in the table of GPUs.", f"use one of {', '.join(GPUS)}.")])
    return GPUS[_KNOWN[name.upper()]]


def cluster_of(
    text: str, *, nics_gbps: float | None = None, per_node: int = 8, host_gigabytes: float | None = None
) -> Cluster:
    """Read "384xH100". ``nics_gbps``: gigabits per second of all cards of a node, one way. Raises ConfigError.

    ``host_gigabytes``: a node's host memory; default, that of Cluster, and on this machine what is free.
    """
    count, _, name = text.partition("x")
    is_count = count.isascii() and count.isdecimal() and 1 <= int(count[:10]) <= _MOST_GPUS
    if not is_count or not name:
        raise ConfigError(
            [ConfigProblem("gpus", text, f"is no number of GPUs up to {_MOST_GPUS:,}.", "write it as 384xH100.")]
        )
    number = int(count)
    gpu = gpu_of(name, min(number, per_node))
    if number > per_node and number % per_node:
        remedy = "use whole nodes, or say how many are in a node with --gpus-per-node."
        raise ConfigError([ConfigProblem("gpus", text, f"does not fill nodes of {per_node} GPUs.", remedy)])
    nics = gpu.nics if nics_gbps is None else nics_gbps * GB / 8
    room = node_room() if gpu.name == LOCAL else None
    host = host_gigabytes * GB if host_gigabytes is not None else float(room or Cluster.host_memory)
    return Cluster(gpu, number, per_node, nics, host)
