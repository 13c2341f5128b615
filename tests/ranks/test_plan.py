"""The plan says beforehand what an engine holds and sends: random models and configurations, exactly.

The plan is made in this process, from shapes and without process groups. The engine runs on its ranks. Its plan, the bytes
of its tensors by kind and every call of a collective in its third step, in their order, are compared.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from covering import by_day
from harness import run_ranks
from torch import nn
from training import counted_collectives, make_config

import zerorun
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.byte_ledger import planned_bytes, with_states
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.optimizer_states import OptimizerStates
from zerorun.plan.sharding_plan import ShardingPlan
from zerorun.plan.step_collectives import Collective, step_collectives
from zerorun.zero.init import part_of

BY_DAY, BY_NIGHT = 8, 75  # cases on each number of ranks
WORLDS = (1, 2, 3, 4)
Observed = tuple[ShardingPlan, dict[str, int], list[Collective]]


# -- random models and configurations ----------------------------------------------------------------------------


class Block(nn.Module):
    """A feed-forward block; some of its parameters may be frozen, or of another dtype than the others."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        inner = rng.choice((3, 16, 37))
        self.norm = nn.LayerNorm(width)  # defined in the order in which they run
        self.up, self.down = nn.Linear(width, inner, bias=rng.random() < 0.7), nn.Linear(inner, width)
        if rng.random() < 0.3:
            self.norm.requires_grad_(False)
        if rng.random() < 0.1:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head, which may be tied."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        width = rng.choice((4, 16, 48))
        self.embedding = nn.Embedding(rng.choice((5, 64)), width)
        self.blocks = nn.ModuleList(Block(width, rng) for _ in range(rng.randint(1, 5)))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, self.embedding.num_embeddings, bias=False)
        if rng.random() < 0.3:
            self.head.weight = self.embedding.weight
        elif rng.random() < 0.3:
            self.embedding.requires_grad_(False)
        self.register_buffer("table", torch.arange(7.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def has_matrices(seed: int) -> bool:
    """True if there are repeated blocks, of which a matrix is trained."""
    with torch.device("meta"):
        blocks = Net(seed).blocks
    return len(blocks) > 1 and any(param.dim() == 2 and param.requires_grad for param in blocks.parameters())


def config_of(seed: int, world: int) -> dict[str, Any]:
    """Everything that plans depend on, at random."""
    rng = random.Random(-seed)
    zero: dict[str, Any] = {}
    if rng.random() < 0.5:
        zero["overlap_comm"] = rng.random() < 0.5
    if rng.random() < 0.2:
        zero["stage3_prefetch_bucket_size"] = rng.choice((100, 5000))
    zero |= rng.choice(
        (
            {},
            {"unit_policy": "by_block_group", "unit_block_count": 2},
            {"unit_policy": "size_based", "unit_numel": rng.choice((20, 300))},
            {"unit_policy": "by_block_and_size", "unit_numel": 100},
            {"unit_policy": ["Block"]},
        )
    )
    stage = rng.randrange(4)
    if stage and rng.random() < 0.4:
        zero["shard_degree"] = rng.choice([degree for degree in (1, 2, 4) if world % degree == 0])
    own = ("Muon",) * has_matrices(seed)
    optimizer = rng.choice(("AdamW", "SGD", "Adagrad", "Lion", "RAdam", "Adafactor", "Lamb", *own))
    if stage and rng.random() < 0.4:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": rng.choice((1.0, 0.5))}
    if stage == 3 and rng.random() < 0.3:
        zero["offload_param"] = {"device": "cpu"}
    more: dict[str, Any] = {"communication_data_type": "bf16"} if rng.random() < 0.2 else {}
    precision, accumulation = rng.choice(("fp32", "bf16")), rng.randint(1, 3)
    if stage == 3 and rng.random() < 0.4:
        zero[rng.choice(("zero_quantized_weights", "zero_quantized_nontrainable_weights"))] = True
    if stage and rng.random() < 0.3:
        zero["zero_quantized_gradients"] = True
    made = make_config(stage, precision=precision, accumulation=accumulation, zero_optimization=zero, **more)
    whole = {"foreach": True} if optimizer == "Adafactor" and rng.random() < 0.5 else {}  # torch's, of whole parameters
    return {**made, "optimizer": {"type": optimizer, "params": {"lr": 1e-3, **whole}}}


# -- both sides --------------------------------------------------------------------------------------------------


def planned(seed: int, world: int, rank: int) -> Observed:
    """As a process says that has neither ranks nor values."""
    with torch.device("meta"):
        model = Net(seed)
    config, raw = take_in(model, config_of(seed, world), None, None, None, world)
    transport = "peer memory" if world in (2, 4) else "gloo"  # as the harness has it
    plan = make_plan(model, config, raw, planned_topology(config, world, world, rank), transport, "cpu")
    complete = with_states(plan, OptimizerStates(raw, torch.device("cpu")))
    return plan, planned_bytes(complete), step_collectives(plan)


def observed(seeds: list[int]) -> list[Observed]:
    """What engines do, on a rank."""
    return [observe(seed) for seed in seeds]


def observe(seed: int) -> Observed:
    world = torch.distributed.get_world_size()
    torch.manual_seed(seed)
    model = Net(seed)
    engine = zerorun.initialize(model, config_of(seed, world))
    tokens = torch.arange(6).view(2, 3) % 5
    with counted_collectives() as calls:
        for _ in range(3):
            calls.clear()
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(tokens).float().square().mean())
                engine.step()
    found = engine.runtime.plan, engine.memory_report(), list(calls)
    engine.destroy()
    return found


@pytest.mark.parametrize("world", by_day(WORLDS, 1, 2, 3))
@pytest.mark.parametrize("cases", [BY_DAY, pytest.param(BY_NIGHT, marks=pytest.mark.nightly)])
def test_the_engine_is_as_planned(world: int, cases: int) -> None:
    seeds = [1000 * world + case for case in range(cases)]
    for rank, results in enumerate(run_ranks(world, observed, seeds, timeout_s=2.0 * cases + 30)):
        for seed, (plan, held, calls) in zip(seeds, results, strict=True):
            expected, ledger, collectives = planned(seed, world, rank)
            assert plan == expected, (seed, rank)
            assert held == ledger, (seed, rank, config_of(seed, world))
            assert calls == collectives, (seed, rank, config_of(seed, world))


def pad(stage: int) -> tuple[int, list[torch.Tensor]]:
    """(elements of this rank's flat buffers that belong to no parameter, those that are not 0). New memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        init = zerorun.zero.Init() if stage == 3 else nullcontext()
        with init:
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        parts = [part for p in model.parameters() if (part := part_of(p)) is not None]
        beyond = [part[part.isnan()] for part in parts]
        engine = zerorun.initialize(model=model, config=make_config(stage, train_micro_batch_size_per_gpu=1))
    finally:
        torch.use_deterministic_algorithms(False)
    numel = 0
    for unit in engine.sharded_model.units:
        for group in unit.flat_groups:
            layout, low = group.plan.layout, 0 if group.plan.resident else group.plan.low
            values = group.full if group.plan.resident else group.shard
            belongs = torch.zeros(layout.numel, dtype=torch.bool)
            for entry in layout.entries:
                belongs[entry.offset : entry.end] = True
            padding = values[~belongs[low : low + values.numel()]]
            numel += padding.numel()
            beyond.append(padding[padding != 0])
    return numel, [found for found in beyond if found.numel()]


@pytest.mark.parametrize("stage", (0, 3))
def test_what_belongs_to_no_parameter_is_zero(stage: int) -> None:
    found = run_ranks(3, pad, stage)
    assert sum(numel for numel, _ in found) > 0
    assert [wrong for _, wrong in found] == [[], [], []]
