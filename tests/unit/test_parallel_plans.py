"""Plans for the layers of a PipelineModule, of which each rank has a stage: asked for without processes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from zerorun import LayerSpec, PipelineModule, Topology
from zerorun.config.parse import load_config
from zerorun.errors import ModelError
from zerorun.startup.parallelize import plan_layers


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
