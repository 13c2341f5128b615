"""Calibration: what published runs say of kernels and links, as data in calibration.json, and how far it may be off."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

from .candidate import KernelGeneration
from .hardware import GPUS, LOCAL, Gpu, local_file, local_measurements, local_values

_OUTSIDE = 0.05  # of the runs, on each side of a range
_ENOUGH = 20  # runs of which a range is said
_UNKNOWN = 0.8  # the efficiency of kernels of which nothing is known
PATH = Path(__file__).with_name("calibration.json")


@dataclass(frozen=True)
class Constants:
    """What is the same for all GPUs: twelve numbers, fitted to published runs by tests/perf/fit_planner.py."""

    depth: float = 150.0  # inner size at which a product runs at half speed
    traffic: float = 340.0  # bytes of device memory per token, block and element of the width, beside products
    scores: float = 6.0  # the same for each score of attention that is not fused, in a forward
    selective: float = 0.5  # of a forward, recomputed by "selective"
    fp8: float = 0.9  # of the best speed-up of products in fp8
    interference: float = 0.3  # of what is sent behind the computation, by which that becomes slower
    exposed: float = 0.4  # of the collectives of tensor ranks, where kernels hide them
    pieces: float = 20.0  # collectives of a block where runtimes send one parameter at a time
    sent: float = 0.7  # of the messages between stages, seen
    host: float = 3e-3  # seconds of the host per block and micro-batch
    contention: float = 3e-3  # the same per tensor rank, where hidden collectives wait for messages of stages
    jitter: float = 0.01  # of the step, for each doubling of the nodes


@dataclass(frozen=True)
class Calibration:
    """``efficiencies``: of the best matrix product, by GPU and generation of kernels, as "H100/flash".

    ``median``, ``p90``: errors of the fit; ``held_out``: the same two with the run's own source left out. ``update``:
    seconds of the optimizer for each parameter, where they were measured. ``ratios``: of each run that was fitted, by the
    name of its efficiency, its nodes and the measured speed in terms of the predicted one. ``mixtures``: the least and the
    most of such numbers of runs of mixtures of experts, which were not fitted.
    """

    constants: Constants = Constants()
    efficiencies: dict[str, float] = field(default_factory=dict)
    median: float = 0.0
    p90: float = 0.0
    held_out: tuple[float, float] = (0.0, 0.0)
    update: float = 0.0
    ratios: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    mixtures: tuple[float, float] = (1.0, 1.0)

    def has(self, gpu: Gpu, kernels: KernelGeneration) -> bool:
        """True if runs with these kernels on this GPU were fitted."""
        return key_of(gpu, kernels) in self.efficiencies

    @property
    def unfitted(self) -> tuple[float, float]:
        """By what factors a speed may differ of which no such run was fitted: as those of sources that were left out."""
        return 1 - self.held_out[1], 1 + self.held_out[1]

    def spread(self, gpu: Gpu, kernels: KernelGeneration, nodes: int) -> tuple[float, float]:
        """Return by what factors a measured speed may differ: 9 of 10 runs of this kind did not by more.

        The kind: kernels of a generation, on one node or several; all nodes, or all kernels, if there are few such runs.
        With more nodes than were measured with such kernels on this GPU, and where there is no run, it is at least what
        sources were off that were left out of the fit.
        """
        unknown = self.unfitted
        measured = self.ratios.get(key_of(gpu, kernels), ())
        if not measured:
            return unknown
        everything = [one for found in self.ratios.values() for one in found]
        alike = [one for key, found in self.ratios.items() if key.endswith(f"/{kernels.value}") for one in found]
        near = [one for one in alike if (one[0] > 1) == (nodes > 1)]
        chosen = next((runs for runs in (near, alike) if len(runs) >= _ENOUGH), everything)
        ratios = sorted(ratio for _, ratio in chosen)
        outside = int(_OUTSIDE * len(ratios))
        low, high = ratios[outside], ratios[-1 - outside]
        if nodes > max(most for most, _ in measured):
            return min(low, unknown[0]), max(high, unknown[1])
        return low, high

    def efficiency(self, gpu: Gpu, kernels: KernelGeneration) -> float:
        """Return the efficiency. Where there is none: that of GPUs with the same cores, of other kernels, of all GPUs."""
        found = self.efficiencies.get(key_of(gpu, kernels))
        if found is not None:
            return found
        table = GPUS.get(gpu.name, gpu)
        alike = {other.family for other in GPUS.values() if other.peak == table.peak and other.matmul == table.matmul}
        for near in (
            [f"{family}/{kernels.value}" for family in sorted(alike)],
            [key_of(gpu, other) for other in KernelGeneration],
            [key for key in self.efficiencies if key.endswith(f"/{kernels.value}")],
        ):
            values = [self.efficiencies[key] for key in near if key in self.efficiencies]
            if values:
                return max(values)
        return _UNKNOWN


def key_of(gpu: Gpu, kernels: KernelGeneration) -> str:
    """Return the name of an efficiency."""
    return f"{gpu.family}/{kernels.value}"


@cache
def fitted() -> Calibration:
    """Return the calibration of this version."""
    data = json.loads(PATH.read_text(encoding="utf-8"))
    return Calibration(
        Constants(**data["constants"]),
        data["efficiencies"],
        data["median"],
        data["p90"],
        tuple(data["held_out"]),
        ratios={key: tuple((nodes, ratio) for nodes, ratio in found) for key, found in data["ratios"].items()},
        mixtures=tuple(data["mixtures"]),
    )


def calibration_of(gpu: Gpu) -> Calibration:
    """Return the calibration of this version, or for the machine's own GPU what was measured of it.

    No step was measured there, so that its range is that of GPUs whose runs were left out of the fit.
    """
    if gpu.name != LOCAL:
        return fitted()
    values, key = local_values(gpu.processes), key_of(gpu, KernelGeneration.FLASH)
    hidden = {"interference": 1.0} if gpu.is_host else {}
    return replace(
        fitted(),
        constants=replace(fitted().constants, host=values["host"], **hidden),
        efficiencies={key: values["efficiency"]},
        p90=fitted().held_out[1],
        update=values["update"],
        ratios={},
    )


def save_local(gpu: Gpu, efficiency: float, host: float, update: float) -> None:
    """Keep what was measured of this machine, beside what was measured with other numbers of ranks."""
    local_file().parent.mkdir(parents=True, exist_ok=True)
    found = local_measurements()
    found[str(gpu.processes)] = {"gpu": asdict(gpu), "efficiency": efficiency, "host": host, "update": update}
    local_file().write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
