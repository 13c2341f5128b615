"""Hugging Face's mixtures of experts through initialize(): losses, norms and weights as in one process, within 1e-6."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from mixtures import ids_of, make, routers
from races import looking_for_races
from reference import OPTIMIZERS, Result, differences
from simulation import simulated_device
from training import make_config, merged

import zerorun
from zerorun.checkpoint.tensorfile import TensorFile
from zerorun.distributed.transport.statistics import Pending
from zerorun.distributed.transport.transport import Transport
from zerorun.engine.pipeline_engine import PipelineEngine
from zerorun.errors import CheckpointError
from zerorun.expert_parallel.deferred_tensor import Shared, Steps, result_of
from zerorun.expert_parallel.dispatch import Dispatch
from zerorun.expert_parallel.known_experts import find_experts

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test]'")

STEPS = 2


def loss_of(model: Any, rank: int, step: int, micro: int) -> torch.Tensor:
    """Of micro-batches of different lengths."""
    ids = ids_of(rank + 7 * micro + 31 * step, 4 + rank % 3)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@dataclass
class Run(Result):
    """``loads``: of each step, by layer."""

    loads: list[dict[str, list[int]]] = field(default_factory=list)


def counting(model: Any) -> dict[str, list[int]]:
    """What its routers choose from here on, by the names of the layers' experts."""
    found: dict[str, list[int]] = {}

    def count(name: str, module: Any, chosen: torch.Tensor) -> None:
        rows = torch.bincount(chosen.flatten(), minlength=module.num_experts).tolist()
        found[name] = [one + more for one, more in zip(found.get(name, [0] * len(rows)), rows, strict=True)]

    for experts, router in zip(find_experts(model), routers(model), strict=True):
        router.register_forward_hook(lambda module, args, out, name=experts.name: count(name, module, out[2]))
    return found


def reference(family: str, batches: int, config: dict[str, Any], changes: dict[str, Any]) -> Run:
    """One process. ``batches``: of how many ranks."""
    model, found = make(family, **changes), Run()
    loads = counting(model)
    kind, params = OPTIMIZERS[config["optimizer"]["type"]]
    optimizer = kind(model.parameters(), **params)
    accumulation = config["gradient_accumulation_steps"]
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(batches):
                loss = loss_of(model, rank, step, micro) / (batches * accumulation)
                loss.backward()
                total += loss.item()
        found.losses.append(total)
        limit = config["gradient_clipping"] or float("inf")
        found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        found.loads.append(dict(loads))
        loads.clear()
    found.weights = {name: value.detach() for name, value in model.state_dict().items()}
    return found


def _train(family: str, config: dict[str, Any], changes: dict[str, Any]) -> Run:
    model, found = make(family, **changes), Run()
    engine = zerorun.initialize(model, config)
    for step in range(STEPS):
        total = torch.zeros(1)
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, engine.topology.data_parallel_rank, step, micro)
            engine.backward(loss)
            engine.step()
            total += loss.detach().cpu() / engine.gradient_accumulation_steps()
        dist.all_reduce(total)
        found.losses.append(total.item() / dist.get_world_size())
        found.norms.append(engine.get_global_grad_norm() or 0.0)
        found.loads.append(engine.expert_load())
    found.weights = engine.state_dict()
    engine.destroy()
    for name, value in model.state_dict().items():
        assert torch.equal(value, found.weights[name]), name
    return found


def config_of(stage: int, size: int, *, clip: float = 0.3, **changes: Any) -> dict[str, Any]:
    section = {"enabled": True, "autoep_size": size}
    return merged(make_config(stage, clip=clip), {"expert_parallel": section, **changes})


def check(family: str, ranks: int, config: dict[str, Any], **changes: Any) -> None:
    same_data = config.get("tensor_parallel", {}).get("size", 1) * config.get("sequence_parallel_size", 1)
    wanted = reference(family, ranks // same_data, config, changes)
    for found in run_ranks(ranks, _train, family, config, changes):
        assert not differences(found, wanted)
        assert found.loads == wanted.loads


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("family", by_day(["mixtral", "deepseek-v3", "gpt-oss", "olmoe"], "mixtral", "gpt-oss"))
def test_stages(family: str, ranks: int, size: int, stage: int) -> None:
    check(family, ranks, config_of(stage, size))


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("family", by_day(["mixtral", "deepseek-v3", "qwen2-moe"], "mixtral", "deepseek-v3"))
def test_folded_over_tensor_ranks(family: str, ranks: int, size: int, stage: int) -> None:
    """transformers #48205: routers got the gradient of one rank's rows."""
    check(family, ranks, config_of(stage, size, tensor_parallel={"size": 2}))


KEYS: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (3, {"activation_checkpointing": {"policy": "full"}}),
    "every second": (1, {"activation_checkpointing": {"policy": "every_n"}, "gradient_accumulation_steps": 2}),
    "selective": (2, {"activation_checkpointing": {"policy": "selective"}}),
    "recompute, inputs on the host": (3, {"activation_checkpointing": {"policy": "full", "cpu_checkpointing": True}}),
    "offload": (2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "offload all": (
        3,
        {
            "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "gradient_accumulation_steps": 2,
        },
    ),
    "hybrid": (3, {"zero_optimization": {"shard_degree": 2}}),
    "divided sequences": (3, {"sequence_parallel_size": 2}),
    "compiled": (1, {"compile": {"enabled": True, "backend": "eager"}}),
}


@pytest.mark.parametrize("family", by_day(["mixtral", "deepseek-v3"], "deepseek-v3"))
@pytest.mark.parametrize("keys", by_day(KEYS, "selective", "offload all", "hybrid", "divided sequences"))
def test_keys(keys: str, family: str) -> None:
    stage, changes = KEYS[keys]
    check(family, 4 if keys == "hybrid" else 2, config_of(stage, 2, **changes))


# -- beside shared experts ---------------------------------------------------------------------------------------


@contextmanager
def _noting(seen: list[str]) -> Iterator[None]:
    """In the block, exchanges of rows and shared experts write down when they begin and end."""
    exchange, steps = Transport.all_to_all, Shared._steps

    def noted_exchange(self: Transport, sent: Any, received: Any, label: str, **options: bool) -> Pending:
        seen.append(f"begin {label}")
        begun = exchange(self, sent, received, label, **options)
        return Pending(self.statistics, label, [begun], lambda: seen.append(f"end {label}"))

    def noted_steps(self: Shared, args: Any, kwargs: Any) -> Steps:
        own = steps(self, args, kwargs)
        next(own)
        yield
        layers = [layer for layer in self._own.__self__.modules() if isinstance(layer, torch.nn.Linear)]  # type: ignore
        hook = layers[0].register_forward_hook(lambda layer, given, out: note_backward(out, "begins"))
        seen.append("begin shared")
        made = result_of(own)
        seen.append("end shared")
        hook.remove()
        note_backward(made, "ends")
        return made

    def note_backward(made: torch.Tensor, what: str) -> None:
        """Of the shared experts' first layer, and of what they return."""
        if made.requires_grad:
            made.register_hook(lambda grad: seen.append(f"backward of where shared {what}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transport, "all_to_all", noted_exchange)
        patch.setattr(Shared, "_steps", noted_steps)
        yield


def _train_beside(family: str, config: dict[str, Any], way: str) -> tuple[Run, Run, list[str]]:
    """Returns (what training gives, the same if one thing is done after the other, the events of the first)."""
    seen: list[str] = []
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("ZERORUN_PEER_MEMORY", "0" if way == "messages" else "1")
        if way in ("device", "races"):
            stack.enter_context(simulated_device())
        if way == "races":
            stack.enter_context(looking_for_races())
        with _noting(seen):
            found = _train(family, config, {})
        patch.setattr(Dispatch, "_defers", lambda self: False)
        return found, _train(family, config, {}), seen


WAYS = ("memory", "messages", "device", "races")
BESIDE = [(way, family, stage) for way in WAYS for family in ("deepseek-v3", "qwen2-moe", "ernie") for stage in range(4)]


# Blocks of Qwen2-MoE use what shared experts return before the other's, those of DeepSeek-V3 call them last; those of Ernie
# call them first and use both at once.
BESIDE_BY_DAY = (("messages", "qwen2-moe", 2), ("races", "deepseek-v3", 3), ("memory", "ernie", 1))


@pytest.mark.parametrize(("way", "family", "stage"), by_day(BESIDE, *BESIDE_BY_DAY))
def test_rows_travel_beside_shared_experts(way: str, family: str, stage: int) -> None:
    """Exchanges begin before shared experts, or their half, and are waited for after: with the same bits."""
    there, back = "experts: dispatch forward", "experts: combine forward"
    layer = [f"begin {there}", "begin shared", f"end {there}", f"begin {back}", "end shared", f"end {back}"]
    back, there = back.replace("forward", "backward"), there.replace("forward", "backward")
    in_reverse = [f"begin {back}", "backward of where shared ends", f"end {back}"]
    in_reverse += [f"begin {there}", "backward of where shared begins", f"end {there}"]
    config = config_of(stage, 2)
    wanted = reference(family, 2, config, {})
    for found, other, seen in run_ranks(2, _train_beside, family, config, way, timeout_s=120.0):
        assert not differences(found, wanted)
        assert (found.losses, found.norms) == (other.losses, other.norms)
        assert all(torch.equal(value, other.weights[name]) for name, value in found.weights.items())
        forward = [event for event in seen if "counts" not in event and "backward" not in event]
        assert forward == layer * (len(forward) // 6) and len(forward) == 6 * STEPS * len(found.loads[0])
        backward = [event for event in seen if "backward" in event]
        assert backward == in_reverse * (len(backward) // 6) and len(backward) == len(forward)


# -- pipelines ---------------------------------------------------------------------------------------------------


def _train_in_stages(config: dict[str, Any]) -> Run:
    model, found = make("mixtral"), Run()
    engine = zerorun.initialize(model, config)
    assert isinstance(engine, PipelineEngine)
    rank = engine.topology.data_parallel_rank
    for step in range(STEPS):
        batches = [ids_of(rank + 7 * micro + 31 * step, 4 + rank % 3) for micro in range(2)]
        loss = engine.train_batch(iter([{"input_ids": ids, "labels": ids} for ids in batches]))
        found.losses.append(loss.item())
        found.norms.append(engine.get_global_grad_norm() or 0.0)
        found.loads.append(engine.expert_load())
    found.weights = engine.state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day([0, 3], 3))
def test_stages_of_a_pipeline(stage: int) -> None:
    config = config_of(stage, 2, pipeline={"stages": 2}, gradient_accumulation_steps=2)
    wanted = reference("mixtral", 2, config, {})
    for found in run_ranks(4, _train_in_stages, config):
        assert not differences(found, wanted)
        assert found.loads == wanted.loads


# -- files of the hub ----------------------------------------------------------------------------------------------


def _load(family: str, folder: str, how: str) -> tuple[dict[str, torch.Tensor], set[int]]:
    """(weights, the numbers of the experts that this rank has read)."""
    read: set[int] = set()
    plain = TensorFile.read

    def reading(self: TensorFile, name: str, *args: Any) -> None:
        read.update(int(number) for number in re.findall(r"\.experts\.(\d+)\.", name))
        plain(self, name, *args)

    with zerorun.zero.Init() if how == "init" else nullcontext(), torch.device("meta" if how == "meta" else "cpu"):
        model = make(family, numbers=False)
    TensorFile.read = reading  # type: ignore[method-assign]
    try:
        if how == "engine":
            engine = zerorun.initialize(model, config_of(3, 2))
            zerorun.load_pretrained(engine.module, folder)
        else:
            zerorun.load_pretrained(model, folder)
            engine = zerorun.initialize(model, config_of(3, 2))
    finally:
        TensorFile.read = plain  # type: ignore[method-assign]
    weights = engine.state_dict()
    engine.destroy()
    return weights, read


@pytest.mark.parametrize("how", ["engine", "init", "plain"])
@pytest.mark.parametrize("family", by_day(["mixtral", "qwen3-moe", "deepseek-v3"], "mixtral"))
def test_files_with_a_tensor_for_each_expert(family: str, how: str, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)  # under the names of the hub
    names = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    assert not names & {f"{experts.name}.down_proj" for experts in find_experts(model)}
    found = run_ranks(2, _load, family, str(tmp_path), how)
    for weights, _ in found:
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    if how == "engine":
        count = find_experts(model)[0].count
        assert [read for _, read in found] == [set(range(count // 2)), set(range(count // 2, count))]


def _damage(folder: Path, what: str) -> None:
    """Change the files of a model as what is put together by hand is."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    first = next(name for name in tensors if ".experts.1." in name)
    if what == "a hole":
        tensors = {name.replace(".experts.1.", ".experts.9."): value for name, value in tensors.items()}
    elif what == "one less":
        del tensors[first]
    elif what == "one more":
        tensors[first.replace(".experts.1.", ".experts.9.")] = tensors[first].clone()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("what", ["a hole", "one less", "one more"])
def test_files_that_lack_tensors_of_an_expert_are_refused(what: str, tmp_path: Path) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path)
    _damage(tmp_path, what)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"has not \d of the tensors that make '.*' for each expert, as of number"):
        zerorun.load_pretrained(model, tmp_path, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _watched(folder: str) -> dict[str, list[int]]:
    engine = zerorun.initialize(make("mixtral"), config_of(2, 2, csv_monitor={"enabled": True, "output_path": folder}))
    for step in range(STEPS):
        engine.backward(loss_of(engine, dist.get_rank(), step, 0))
        engine.step()
    loads = engine.expert_load()
    engine.destroy()
    return loads


def test_monitors_tell_how_even_loads_are(tmp_path: Path) -> None:
    loads = run_ranks(2, _watched, str(tmp_path))[0]
    for layer, rows in loads.items():
        (file,) = tmp_path.rglob(f"*expert_load_{layer}.csv")
        *_, last = file.read_text().splitlines()
        assert float(last.split(",")[1]) == pytest.approx(4 * max(rows) / sum(rows))
