"""What estimate_memory says of tensor ranks and pipeline stages is what their engines hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from harness import run_ranks
from test_parallel_matrix import build, data_of, one_step
from test_pipeline import build as build_layers
from training import make_config, merged

import zerorun
from zerorun.errors import ModelError

# model, stage, precision, tensor, pipe, data, further keys
CELLS: dict[str, tuple[str, int, str, int, int, int, dict[str, Any]]] = {
    "tensor": ("llama", 3, "fp32", 2, 1, 2, {}),
    "fused": ("gpt2", 1, "bf16", 2, 1, 1, {}),
    "stages": ("llama", 2, "bf16", 1, 3, 1, {}),
    "tied stages": ("gpt2", 3, "fp32", 1, 2, 2, {}),
    "both": ("gpt2", 1, "fp32", 2, 2, 2, {}),
    "interleaved": ("llama", 3, "bf16", 2, 2, 1, {"pipeline": {"schedule": "interleaved", "chunks": 2}}),
    "offload": ("llama", 3, "bf16", 2, 2, 1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "divided": ("llama", 0, "fp32", 2, 1, 1, {"tensor_parallel": {"vocab_parallel_loss": True}}),
}
COVERED = ("tensor", "stages", "tied stages", "offload", "fused")  # what they have comes in the others, too
at_night = partial(pytest.param, marks=pytest.mark.nightly)


def config_of(which: str) -> dict[str, Any]:
    _, stage, precision, tensor, pipe, _, changes = CELLS[which]
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    accumulation = 4 if pipe > 1 else 1
    return merged(merged(make_config(stage, accumulation=accumulation, precision=precision), degrees), changes)


def observe(which: str) -> tuple[int, dict[str, int], str]:
    name, _, _, _, pipe, *_ = CELLS[which]
    engine = zerorun.initialize(build(name), config_of(which))
    accumulation = engine.gradient_accumulation_steps()
    data = data_of(engine.topology.data_parallel_rank, accumulation)
    for _ in range(2):
        one_step(engine, data, accumulation, pipe)
    found = engine.topology.pipe_rank, engine.memory_report(), engine.comm.transport
    engine.destroy()
    return found


@pytest.mark.parametrize("which", [at_night(which) if which in COVERED else which for which in CELLS])
def test_it_is_what_the_heaviest_rank_holds(which: str) -> None:
    name, _, _, tensor, pipe, data, _ = CELLS[which]
    world = tensor * pipe * data
    reports = run_ranks(world, observe, which)
    with torch.device("meta"):
        model = build(name)
    estimate = zerorun.estimate_memory(
        model, config_of(which), world, ranks_per_node=world, device="cpu", transport=reports[0][2]
    )
    assert (estimate.pipe, estimate.tensor, estimate.world_size) == (pipe, tensor, world)
    assert all(param.is_meta for param in model.parameters())
    assert len(list(model.parameters())) == len(list(build(name).parameters()))
    there = [kinds for stage, kinds, _ in reports if stage == estimate.pipe_rank]
    held = {kind: max(kinds.get(kind, 0) for kinds in there) for kind in estimate.kinds}
    assert {kind: size for kind, size in estimate.kinds.items() if size} == {k: size for k, size in held.items() if size}
    assert estimate.device_bytes == max(sum(kinds.values()) for _, kinds, _ in reports)


def test_start_ups_of_a_part() -> None:
    """Built as usual, every rank has the whole first; inside of Init, its part and one parameter."""
    whole = 4 * sum(param.numel() for param in build("llama").parameters())
    config = merged(make_config(3), {"tensor_parallel": {"size": 2}, "pipeline": {"stages": 2}})
    estimate = zerorun.estimate_memory(build("llama"), config, 64, device="cuda")
    assert estimate.start_up.host == whole
    assert estimate.start_up_with_init.host < whole
    text = str(estimate)
    assert "2 pipeline stages x 2 tensor x 16 data-parallel = 64 ranks" in text
    assert "is in pipeline stage" in text


def test_a_pipeline_module_is_the_stage_that_it_is() -> None:
    module = build_layers(4, num_stages=2, stage=1)
    estimate = zerorun.estimate_memory(module, make_config(1), 4, device="cpu")
    assert (estimate.pipe, estimate.pipe_rank) == (2, 1)
    assert estimate.parameters == sum(param.numel() for param in module.parameters())
    with pytest.raises(ModelError, match=r"tensor_parallel\.plan"):
        zerorun.estimate_memory(module, {**make_config(1), "tensor_parallel": {"size": 2}}, 4)
