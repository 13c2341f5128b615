"""Plans for the layers of a PipelineModule, of which each rank has a stage: asked for without processes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from training import make_config, merged
from transformers import LlamaConfig, LlamaForCausalLM

from zerorun import LayerSpec, PipelineModule, Topology
from zerorun.config.parse import load_config
from zerorun.errors import ModelError
from zerorun.model_setup.checked_arguments import take_in
from zerorun.model_setup.parallelize import plan_layers
from zerorun.model_setup.planned_stages import planned_parts


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


def names_on_stage(stage: int, plan: dict[str, Any], **keys: bool) -> list[str]:
    """What the plan divides on one of two stages: an embedding and a block, and two blocks."""
    topology = Topology.plan(4, rank=2 * stage, pipe=2, tensor=2)
    layers = [LayerSpec(nn.Embedding, 10, 4), *(LayerSpec(Block) for _ in range(3))]
    model = PipelineModule(layers, topology=topology, partition_method=[2, 2])
    found = plan_layers(model, load_config({"tensor_parallel": {"size": 2, "plan": plan, **keys}}), topology)
    assert found is not None
    return [entry.name for entry in found.entries]


MLP = {"*.up": "colwise", "*.down": "rowwise"}


def test_each_stage_divides_what_it_has() -> None:
    plan = {"0": "embedding_rowwise", **MLP}
    assert names_on_stage(0, plan) == ["0", "1.up", "1.down"]
    assert names_on_stage(1, plan) == ["2.up", "2.down", "3.up", "3.down"]


def test_a_style_with_arguments_and_layers_of_another_stage_only() -> None:
    plan = {"1.up": {"style": "fused_colwise", "lengths": [4, 4]}, "1.down": "rowwise"}
    assert names_on_stage(1, plan) == []


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("pattern", ["*.upp", "4.up", "up", "*.*.up"])
def test_a_pattern_that_matches_nothing_on_any_stage_is_refused(stage: int, pattern: str) -> None:
    with pytest.raises(ModelError, match=r"no layer of any stage.*Remedy: .*'0\.weight'"):
        names_on_stage(stage, {**MLP, pattern: "colwise"})


def test_without_a_plan_nothing_is_guessed() -> None:
    with pytest.raises(ModelError, match=r"Remedy: set tensor_parallel\.plan"):
        names_on_stage(0, {})


@pytest.mark.parametrize("key", ["sequence_parallel", "vocab_parallel_loss"])
def test_keys_for_whole_models_are_refused(key: str) -> None:
    with pytest.raises(ModelError, match=rf"tensor_parallel\.{key} cannot .* Remedy: set it to false"):
        names_on_stage(0, MLP, **{key: True})


def test_sequence_parallelism_that_cannot_be_is_refused_before_anything_is_divided() -> None:
    model = nn.ModuleDict({"first": Block(), "second": Block()})  # no list of blocks
    config = load_config({"tensor_parallel": {"size": 2, "plan": MLP, "sequence_parallel": True}})
    with pytest.raises(ModelError, match="needs one ModuleList of blocks"):
        plan_layers(model, config, Topology.plan(2, tensor=2))


def flat_groups_of(model: nn.Module, config: dict[str, Any], tensor_rank: int) -> list[tuple[Any, ...]]:
    """Return the unit of each flat group, whether its states are on the host, what of it is coded, and its parameters."""
    wanted, raw = take_in(model, merged(make_config(3), {"tensor_parallel": {"size": 2}, **config}), None, None, None, 4)
    (part,) = planned_parts(model, wanted, raw, Topology.plan(4, rank=tensor_rank, tensor=2))
    return [
        (unit.name, unit.placement.optimizer, group.coded, group.codes_gradients, *(e.name for e in group.layout.entries))
        for unit in part.plan(wanted, "gloo", "cpu").units
        for group in unit.flat_groups
    ]


@pytest.mark.parametrize(
    "settings",
    (
        {},
        {"zero_quantized_gradients": True},
        {"zero_quantized_weights": True},
        {"unit_policy": "size_based", "unit_numel": 1225},
        {"unit_policy": "by_block_and_size", "unit_numel": 245},
        {"unit_policy": "size_based", "unit_numel": 100, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    ),
)
def test_tensor_ranks_have_the_same_flat_groups_where_parts_differ_in_size(settings: dict[str, Any]) -> None:
    """Parts of the embedding have 256 and 224 elements, a block of codes or less; those of an MLP have 1248 and 1152."""
    sizes = {"hidden_size": 32, "intermediate_size": 25, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=15, num_key_value_heads=2, **sizes))
    for param in list(model.parameters())[1::3]:
        param.requires_grad_(False)
    config = {"zero_optimization": {"stage": 3, **settings}}
    assert flat_groups_of(model, config, 0) == flat_groups_of(model, config, 1)
