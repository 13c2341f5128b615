"""The same training as in reference.py, by a zerorun engine on this rank. To be called inside ``run_ranks``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import of_this_job
from models import Case, Place
from reference import OPTIMIZERS, Result
from torch import nn

import zerorun
from zerorun.distributed.device import default_device
from zerorun.distributed.transport.peer_memory import PeerMemory
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.plan.step_collectives import Collective


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` put in; sections are merged, not replaced."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def make_config(
    stage: int = 0,
    *,
    accumulation: int = 1,
    clip: float = 0.0,
    precision: str = "fp32",
    optimizer: str = "AdamW",
    **changes: Any,
) -> dict[str, Any]:
    """A configuration; ``changes`` are further keys, merged into their sections."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer][1]},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8  # does not overflow in these models
    return merged(config, changes)


# Where states are -> (stage, keys of zero_optimization); "?" is a folder.
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    **{f"stage {stage}, offload": (stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2, 3)},
    "stage 3, offload all": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "stage 2, disk": (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "?"}}),
    "stage 3, disk": (3, {"offload_optimizer": {"device": "nvme", "nvme_path": "?"}}),
    "stage 3, hybrid": (3, {"shard_degree": 2}),
}


def placed(place: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The stage, and the keys of zero_optimization, of one of PLACES, with its files in ``folder``."""
    stage, keys = PLACES[place]
    return stage, merged(keys, {"offload_optimizer": {"nvme_path": str(folder)}}) if "disk" in place else keys


def take_steps(engine: zerorun.Engine, loss_of: Callable[[Any, int], torch.Tensor], first: int, count: int) -> list[float]:
    """The losses of ``count`` steps, of which ``loss_of`` gets the numbers from ``first`` on."""
    losses = []
    for step in range(first, first + count):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def shared_topology(shard_degree: int | None = None, *, pipe: int = 1, tensor: int = 1) -> zerorun.Topology:
    """One for all engines of a job with these degrees, so that each of many does not make groups of its own."""
    kind = default_device().type
    key = "topology", kind, shard_degree, pipe, tensor
    if key not in of_this_job:
        of_this_job[key] = zerorun.Topology.create(
            dist.get_world_size(), dist.get_rank(), pipe=pipe, tensor=tensor, shard_degree=shard_degree, device_type=kind
        )
    topology: zerorun.Topology = of_this_job[key]
    return topology


def make_engine(case: Case, config: dict[str, Any], **options: Any) -> zerorun.Engine:
    """An engine over a new module of ``case``. ``options``: further arguments of ``zerorun.initialize``."""
    module = case.build()
    if case.groups:
        options.setdefault("model_parameters", case.groups(module))
    if "topology" not in options:
        options["topology"] = shared_topology(config["zero_optimization"].get("shard_degree"))
    return zerorun.initialize(module, config, **options)


def global_mean(value: float) -> float:
    """The mean over ranks, in fp64 and rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return sum(values) / len(values)


def train(case: Case, config: dict[str, Any], steps: int, **options: Any) -> Result:
    """Train for ``steps`` optimizer steps and take the engine down again."""
    engine = make_engine(case, config, **options)
    result = run_steps(engine, case, steps)
    finish(engine, result)
    return result


def read_slowly(memory: PeerMemory | None, seconds: float) -> None:
    """Let this rank take as long for each tensor that it reads of another rank's memory."""
    assert memory is not None
    read = memory.read_tensor

    def slowly(*arguments: Any) -> None:
        time.sleep(seconds)
        read(*arguments)

    memory.read_tensor = slowly  # type: ignore[method-assign]


def run_steps(engine: zerorun.Engine, case: Case, steps: int, first: int = 0) -> Result:
    result = Result()
    for step in range(first, first + steps):
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = case.loss(engine, Place(dist.get_rank(), step, micro))
            engine.backward(loss)
            engine.step()
            total += loss.item() / engine.gradient_accumulation_steps()
        result.losses.append(total)
        norm = engine.get_global_grad_norm()
        assert norm is not None
        result.norms.append(norm)
    return result


def finish(engine: zerorun.Engine, result: Result) -> None:
    """Average the losses over ranks, take the weights, and destroy the engine, which leaves them in the module."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, result.losses)
    result.losses = [sum(losses) / len(losses) for losses in zip(*values, strict=True)]
    result.weights = engine.state_dict()
    module = engine.module
    engine.destroy()
    assert_plain(module, result.weights)


def assert_plain(module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """The parameters own full values: those of ``weights``."""
    for name, value in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
        assert torch.equal(value.cpu(), weights[name].cpu()), f"destroy() gave {name} other values than engine.state_dict()"


@contextmanager
def counted_collectives() -> Iterator[list[Collective]]:
    """The collectives that are counted inside, in order."""
    calls: list[Collective] = []
    real = CommunicationStatistics.count

    def count(self: CommunicationStatistics, label: str, sent_bytes: int) -> None:
        calls.append(Collective(label, sent_bytes))
        real(self, label, sent_bytes)

    CommunicationStatistics.count = count  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        CommunicationStatistics.count = real  # type: ignore[method-assign]
