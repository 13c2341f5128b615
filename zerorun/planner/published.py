"""Published runs: rows of a table of training runs, as candidates on clusters."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem
from ..log import info_once
from .calibration import Calibration
from .candidate import GATHERS, REDUCTIONS, TENSOR, KernelGeneration, RunCandidate
from .hardware import GB, Cluster, gpu_of, is_known
from .model_shape import LatentAttention, ModelShape
from .step_time import StepTime, step_time

_MODERN = ("dgxc", "megatron-bridge", "moe", "deepspeed")  # groups of rows whose kernels are one for each part
_MEGATRON = ("megatron-a100", "bloom", "large-runs")  # which had no fused attention on A100, and has it on later GPUs
_CHUNKS = 6  # at most, if a row with stages does not say how many
# How a row says what a mixture has.
_FORMS = {
    "experts": r"(\d+) experts",
    "used": r"top[- ]?(\d+)",
    "shared": r"(\d+) shared",
    "dense_layers": r"first (\d+) layers? dense",
    "dense_ffn": r"layers? dense (\d+)",
}
_DEEPSEEK = LatentAttention(1536, 512, 128, 64, 128)


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
        return max(int(float(row[key])), least) if row.get(key) else default

    gpu = gpu_of(row["gpu"])
    nics = float(row["nic_gbps_per_node"]) * GB / 8 if row["nic_gbps_per_node"] else gpu.nics
    cluster = Cluster(gpu, number("gpus"), number("gpus_per_node", 8), nics)
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
        **_mixture(row["moe"], number("ffn")),
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
        expert=max(number("ep"), tensor) if shape.experts > 1 and number("ep") > 1 else 1,
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
        narrow_experts=True,
    )
    speed = float(row["tokens_per_s_gpu"]) if row.get("tokens_per_s_gpu") else None
    return PublishedRun(row["id"], shape, candidate, cluster, row, speed)


def _mixture(text: str, ffn: int) -> dict[str, Any]:
    """Read "256 experts, top 8, 1 shared; first 3 layers dense 18432; MLA". Return the fields of a shape.

    ``ffn``: the width of an expert. Widths of narrow attention are not in the table: they are those of DeepSeek-V2 and V3.
    """
    said = {key: re.search(form, text) for key, form in _FORMS.items()}
    numbers = {key: int(match[1]) for key, match in said.items() if match}
    if numbers.get("experts", 1) == 1:
        return {}
    found: dict[str, Any] = {"experts": numbers["experts"], "used_experts": numbers.get("used", 1)}
    found["shared_ffn"] = numbers.get("shared", 0) * ffn
    found |= {"dense_layers": numbers.get("dense_layers", 0), "dense_ffn": numbers.get("dense_ffn", 0)}
    return {**found, "latent": _DEEPSEEK if "MLA" in text else None}


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
