"""Published runs: rows of a table of training runs, as candidates on clusters."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, ConfigProblem
from ..log import info_once
from .calibration import Calibration
from .candidate import GATHERS, REDUCTIONS, TENSOR, KernelGeneration, RunCandidate
from .hardware import GB, Cluster, gpu_of, is_known
from .model_shape import ModelShape
from .step_time import StepTime, step_time

_MODERN = ("dgxc", "megatron-bridge", "moe", "deepspeed")  # groups of rows whose kernels are one for each part
_MEGATRON = ("megatron-a100", "bloom", "large-runs")  # which had no fused attention on A100, and has it on later GPUs
_CHUNKS = 6  # at most, if a row with stages does not say how many


@dataclass(frozen=True)
class PublishedRun:
    """One row. ``fields``: its columns. ``tokens_per_s_gpu``: what was measured; None if it is not known."""

    id: str
    shape: ModelShape
    candidate: RunCandidate
    cluster: Cluster
    fields: dict[str, str]
    tokens_per_s_gpu: float | None

    def step_time(self, calibration: Calibration) -> StepTime:
        """Return the predicted time of a step."""
        return step_time(self.shape, self.candidate, self.cluster, calibration)

    def predicted(self, calibration: Calibration) -> float:
        """Return the predicted tokens per second and GPU."""
        tokens = self.candidate.batch * self.candidate.sequence
        return tokens / self.step_time(calibration).seconds / self.cluster.gpus


def published_runs(path: str | Path) -> Iterator[PublishedRun]:
    """Read a CSV file; lines that begin with "#" are comments. Rows of accelerators that are not known are left out.

    Raises ConfigError if a row has no number where it needs one.
    """
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if row.get("gpu") and not is_known(row["gpu"]):
                info_once(f"{path}: runs on {row['gpu']} are left out, as it is not in the table of GPUs.")
                continue
            try:
                yield _run(row)
            except (KeyError, ValueError) as error:
                problem = ConfigProblem(f"row {row.get('id')}", str(error), "is no run.", "give the columns of the format.")
                raise ConfigError([problem], str(path)) from error


def _run(row: dict[str, str]) -> PublishedRun:
    def number(key: str, default: int = 1, least: int = 1) -> int:
        return max(int(float(row[key])), least) if row[key] else default

    gpu = gpu_of(row["gpu"])
    nics = float(row["nic_gbps_per_node"]) * GB / 8 if row["nic_gbps_per_node"] else gpu.nics
    cluster = Cluster(gpu, number("gpus"), number("gpus_per_node", 8), nics)
    used, experts = _experts(row["moe"])
    shape = ModelShape(
        layers=number("layers"),
        hidden=number("hidden"),
        heads=number("heads"),
        kv_heads=number("kv_heads"),
        head_dim=number("head_dim"),
        ffn=number("ffn"),
        matrices=number("ffn_mats"),
        vocab=number("vocab"),
        tied=row["tied"] == "1",
        experts=experts,
        used_experts=used,
    )
    tensor, pipe, context = number("tp", 8), number("pp"), number("cp")
    data = number("dp", max(cluster.gpus // (tensor * pipe * context), 1))
    stage, micro, kernels = number("zero", least=0), number("micro_batch"), _kernels_of(row)
    candidate = RunCandidate(
        data=data,
        tensor=tensor,
        pipe=pipe,
        chunks=number("vpp", max(1, min(shape.layers // pipe, _CHUNKS)) if pipe > 1 else 1),
        context=context,
        stage=stage,
        shard=number("shard_degree", data * context if stage else 1),
        sequence=number("seq"),
        micro_batch=micro,
        accumulation=number("accum", max(1, number("global_batch", data) // (data * micro))),
        checkpointing=row["recompute"] if row["recompute"] in ("full", "selective") else "none",
        offload_optimizer=row["offload"].startswith("optimizer"),
        precision=row["precision"],
        sequence_parallel=row["sp"] == "1",
        kernels=kernels,
        wire_bytes=4 if "fp32" in row.get("note", "") else 2,
        reduces_once=pipe > 1,
        hides=_hidden(kernels, sequence_parallel=row["sp"] == "1"),
    )
    speed = float(row["tokens_per_s_gpu"]) if row.get("tokens_per_s_gpu") else None
    return PublishedRun(row["id"], shape, candidate, cluster, row, speed)


def _experts(text: str) -> tuple[int, int]:
    """Read "128 experts, top 8". Return the number that a token uses, and their number."""
    numbers = [int(word) for word in text.replace(",", " ").split() if word.isdigit()]
    return (numbers[1], numbers[0]) if len(numbers) > 1 else (1, 1)


def _kernels_of(row: dict[str, str]) -> KernelGeneration:
    if row["compile"] in ("yes", "xla") or row["group"] in _MODERN:
        return KernelGeneration.FUSED
    if row["group"] in _MEGATRON:
        return KernelGeneration.UNFUSED if row["gpu"].startswith("A100") else KernelGeneration.FUSED
    return KernelGeneration.FLASH


def _hidden(kernels: KernelGeneration, *, sequence_parallel: bool) -> frozenset[str]:
    """Return what runtimes of the time of these kernels send behind the computation."""
    if kernels is KernelGeneration.FUSED:
        return frozenset((REDUCTIONS, GATHERS, TENSOR))
    if kernels is KernelGeneration.FLASH:
        return frozenset((REDUCTIONS, TENSOR) if sequence_parallel else (REDUCTIONS,))
    return frozenset()
