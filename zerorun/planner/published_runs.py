"""Published runs: rows of a table of training runs, as candidates on clusters."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem
from ..log import info_once
from .calibration import Calibration
from .candidate import GATHERS, PRECISIONS, REDUCTIONS, TENSOR, KernelGeneration, RunCandidate
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
_FLAG, _OFFLOAD = ("0", "1"), ("none", "optimizer:cpu")
_RECOMPUTE, _COMPILE = ("none", "selective", "full", "unknown"), ("no", "yes", "xla", "unknown")
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

    Raises ConfigError with one problem for each row that is no run.
    """
    found, problems = [], []
    for row in _rows(path):
        if row.get("gpu") and not is_known(row["gpu"]):
            info_once(f"{path}: runs on {row['gpu']} are left out, as it is not in the table of GPUs.")
            continue
        try:
            found.append(_run(_RunRow(row)))
        except ConfigError as error:
            first = error.problems[0]
            name = f"row {row.get('id')}: {first.key}"
            problems.append(ConfigProblem(name, first.value, first.reason, first.remedy))
    if problems:
        raise ConfigError(problems, str(path))
    yield from found


def _rows(path: str | Path) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return [*csv.DictReader(line for line in file if not line.startswith("#"))]
    except (UnicodeDecodeError, csv.Error) as error:
        problem = ConfigProblem("file", str(path), f"is no table: {error}.", "give a CSV file.")
        raise ConfigError([problem], str(path)) from error


@dataclass(frozen=True)
class _RunRow:
    """The columns of a row. What is not as the column should be raises ConfigError, with the column."""

    columns: dict[str, str]

    def text(self, key: str) -> str:
        value = self.columns.get(key)
        if value is None:
            raise ConfigError([ConfigProblem(key, None, "is missing.", "give the columns of the format.")])
        return value

    def number(self, key: str, default: int = 1, least: int = 1) -> int:
        """Return a whole number; ``default`` if the column is empty or not there."""
        value = self.columns.get(key)
        if not value:
            return default
        found = self._float(key, value)
        if found < least or found != int(found):
            raise ConfigError([ConfigProblem(key, value, f"is no whole number from {least} on.", "give one.")])
        return int(found)

    def rate(self, key: str, default: float) -> float:
        """Return a number above 0; ``default`` if the column is empty."""
        found = self._float(key, self.text(key)) if self.text(key) else default
        if found <= 0:
            raise ConfigError([ConfigProblem(key, self.text(key), "is not above 0.", "leave it empty if it is not known.")])
        return found

    def choice(self, key: str, known: Sequence[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise ConfigError([ConfigProblem(key, value, "is not known.", f"use {', '.join(known)}.")])
        return value

    def _float(self, key: str, value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = nan
        if not isfinite(found):
            raise ConfigError([ConfigProblem(key, value, "is no finite number.", "give one.")])
        return found


def _run(row: _RunRow) -> PublishedRun:
    gpu, number = gpu_of(row.text("gpu")), row.number
    nics = row.rate("nic_gbps_per_node", gpu.nics * 8 / GB) * GB / 8
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
        tied=row.choice("tied", _FLAG) == "1",
        **_mixture(row.text("moe"), number("ffn")),
    )
    candidate = _candidate(row, shape, cluster)
    if candidate.world != cluster.gpus:
        degrees = f"{candidate.tensor} x {candidate.context} x {candidate.pipe} x {candidate.data}"
        reason = f"are not the {degrees} tensor ranks, context ranks, stages and replicas."
        raise ConfigError([ConfigProblem("gpus", cluster.gpus, reason, "change one of them.")])
    speed = row.rate("tokens_per_s_gpu", nan) if row.columns.get("tokens_per_s_gpu") else None
    return PublishedRun(row.text("id"), shape, candidate, cluster, row.columns, speed)


def _candidate(row: _RunRow, shape: ModelShape, cluster: Cluster) -> RunCandidate:
    number = row.number
    tensor, pipe, context = number("tp", 8), number("pp"), number("cp")
    data = number("dp", max(cluster.gpus // (tensor * pipe * context), 1))
    stage, micro, kernels = number("zero", least=0), number("micro_batch"), _kernels_of(row)
    if stage > 3:
        raise ConfigError([ConfigProblem("zero", stage, "is no stage.", "use 0, 1, 2 or 3.")])
    recompute, sequence_parallel = row.choice("recompute", _RECOMPUTE), row.choice("sp", _FLAG) == "1"
    return RunCandidate(
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
        checkpointing=recompute if recompute in ("full", "selective") else "none",
        offload_optimizer=row.choice("offload", _OFFLOAD) == "optimizer:cpu",
        precision=row.choice("precision", (*PRECISIONS, "mxfp8")),
        sequence_parallel=sequence_parallel,
        kernels=kernels,
        wire_bytes=4 if "fp32" in (row.columns.get("note") or "") else 2,
        reduces_once=pipe > 1,
        hides=_hidden(kernels, sequence_parallel=sequence_parallel),
        narrow_experts=True,
    )


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


def _kernels_of(row: _RunRow) -> KernelGeneration:
    group = row.text("group")
    if row.choice("compile", _COMPILE) in ("yes", "xla") or group in _MODERN:
        return KernelGeneration.FUSED
    if group in _MEGATRON:
        return KernelGeneration.UNFUSED if row.text("gpu").startswith("A100") else KernelGeneration.FUSED
    return KernelGeneration.FLASH


def _hidden(kernels: KernelGeneration, *, sequence_parallel: bool) -> frozenset[str]:
    """Return what runtimes of the time of these kernels send behind the computation."""
    if kernels is KernelGeneration.FUSED:
        return frozenset((REDUCTIONS, GATHERS, TENSOR))
    if kernels is KernelGeneration.FLASH:
        return frozenset((REDUCTIONS, TENSOR) if sequence_parallel else (REDUCTIONS,))
    return frozenset()
