"""hpZ: a second copy of the weights within each node. It changes what is sent, and not one bit of the training."""

from __future__ import annotations

from typing import Any

import pytest
import test_parallel_matrix
import test_quantised_sums
import test_simulated_device
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES
from reference import Result
from simulation import simulated_device
from torch import nn
from training import counted_collectives, make_config, make_engine, run_steps, train

from zerorun import zero
from zerorun.config.parse import load_config
from zerorun.distributed.quantised_blocks import coded_bytes
from zerorun.distributed.secondary_partition import Secondary
from zerorun.errors import TopologyError
from zerorun.memory.estimate import estimate_memory
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.step_collectives import step_collectives

STEPS = 2


def hpz(size: int = 2, accumulation: int = 1, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    settings = {"zero_hpz_partition_size": size, **zero}
    return make_config(3, accumulation=accumulation, precision=precision, zero_optimization=settings)


def without(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "zero_optimization": {**config["zero_optimization"], "zero_hpz_partition_size": 1}}


# -- as pure data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shard", "size"), [(4, 2), (6, 2), (6, 3), (64, 8)])
def test_every_node_has_each_shard_once(shard: int, size: int) -> None:
    secondary = Secondary(shard, size)
    for rank in range(shard):
        assert [keeper // size for keeper in secondary.keepers(rank)] == [*range(secondary.groups)]
        assert all(rank in secondary.kept(keeper) for keeper in secondary.keepers(rank))
    for first in range(0, shard, size):
        assert [owner for rank in range(first, first + size) for owner in secondary.kept(rank)] == [*range(shard)]


def planned(config: dict[str, Any]) -> tuple[float, int]:
    """Of rank 9 of 64, on hosts of 8: (bytes of weights sent to other hosts in a step, bytes of the second copy)."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512, bias=False)) for _ in range(4)))
    wanted, raw = take_in(model, config, None, None, None, 64)
    plan = make_plan(model, wanted, raw, planned_topology(wanted, 64, 8, 9), "nccl", "cuda")
    calls = [call for call in step_collectives(plan) if "all-gather for" in call.label or "second copy" in call.label]
    near = any("second copy" in call.label for call in calls)
    sent = sum(call.bytes * (0 if near else 56 / 63) for call in calls if "all-gather" in call.label)
    held = sum(group.own_bytes("second") for group in plan.flat_groups)
    return sent + sum(call.bytes for call in calls if "second copy" in call.label), held


@pytest.mark.parametrize("accumulation", (1, 4))
def test_bytes_between_hosts_are_those_of_the_formula(accumulation: int) -> None:
    """M bytes of weights. Without hpZ a rank sends M/64 to 56 ranks of other hosts, for forward and backward of each
    micro-batch, except for units that are still in their slots. With it, M/64 to 7 ranks, once; in codes, half of that."""
    numel = 4 * 512 * 512
    plain, nothing = planned(make_config(3, accumulation=accumulation, precision="bf16"))
    copied, held = planned(hpz(8, accumulation, "bf16"))
    coded, held_coded = planned(hpz(8, accumulation, "bf16", zero_quantized_weights=True))
    visits = 6 + 4 * (accumulation - 1)  # of the 4 units: two slots
    assert plain == visits * 2 * 512 * 512 // 64 * 56
    assert nothing == 0
    assert copied == 2 * numel // 64 * 7
    assert coded == coded_bytes(numel // 64) * 7
    assert held == 2 * numel // 8  # beside 2 * numel / 64
    assert held_coded == coded_bytes(numel // 8)


def test_the_estimate_has_the_second_copy() -> None:
    model = CASES["plain"].build()
    sizes = [estimate_memory(model, config, 8, device="cuda").kinds for config in (hpz(2), without(hpz(2)))]
    weights = sum(param.numel() for name, param in model.named_parameters() if name.startswith("blocks."))
    more = sizes[0]["parameters"] - sizes[1]["parameters"]
    assert 4 * weights / 2 <= more <= 4 * weights / 2 * 1.1  # and padding
    assert {kind: size for kind, size in sizes[0].items() if kind != "parameters"}.items() <= sizes[1].items()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"zero_hpz_partition_size is 4, .* the 6 ranks .* one of \[1, 2, 3, 6\]"):
        planned_topology(load_config(hpz(4)), 6, 6)
    assert load_config(hpz(4)).zero_optimization.shard_degree is None


# -- training ----------------------------------------------------------------------------------------------------


def train_both(rows: list[tuple[str, dict[str, Any]]]) -> list[list[Result]]:
    """For each row: with the second copy and without it on the CPU, then both on the simulated device."""
    found = []
    for name, config in rows:
        results = [train(CASES[name], each, STEPS) for each in (config, without(config))]
        with simulated_device():
            results += [train(CASES[name], each, STEPS) for each in (config, without(config))]
        found.append(results)
    return found


def same_bits(one: Result, other: Result) -> bool:
    weights = all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
    return one.losses == other.losses and one.norms == other.norms and weights


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
ROWS = [
    ("plain", hpz(precision="bf16", stage3_prefetch_bucket_size=5000, offload_optimizer={"device": "cpu"})),
    ("branch", hpz(accumulation=2, zero_quantized_weights=True)),
]
MORE = [
    ("plain", hpz(accumulation=2, precision="bf16", **OFFLOADED)),
    ("plain", hpz(accumulation=2)),
    ("lora", hpz(zero_quantized_weights=True)),
    ("tied", hpz(precision="fp16", overlap_comm=True)),
    ("branch", hpz(zero_quantized_weights=True, **OFFLOADED)),
    ("frozen", hpz(zero_quantized_weights=True, zero_quantized_gradients=True)),
]


@pytest.mark.parametrize("rows", [ROWS, pytest.param(MORE, marks=pytest.mark.nightly)])
def test_deepspeed_4851_5059_6926_training_has_the_bits_of_plain_stage_3(rows: list[tuple[str, dict[str, Any]]]) -> None:
    """DeepSpeed#4851, #7164: with hpZ training converges slowly, or not at all; #5059: its loss is 0 from a step on; #6926:
    with offload_param neither the loss nor a gradient ever changes.

    There are ranks that skip a unit, and replicas are none: units come from a node, and gradients go to all ranks."""
    for results in run_ranks(4, train_both, rows):
        for row, (found, plain, simulated, simulated_plain) in zip(rows, results, strict=True):
            assert same_bits(found, plain), row
            assert same_bits(simulated, simulated_plain), row


@pytest.mark.parametrize(
    "config",
    [
        hpz(accumulation=2, zero_quantized_weights=True, zero_quantized_gradients=True),
        pytest.param(hpz(accumulation=2, precision="bf16"), marks=pytest.mark.nightly),
        pytest.param(hpz(accumulation=2, precision="bf16", **OFFLOADED), marks=pytest.mark.nightly),
    ],
)
def test_what_is_sent_and_held_is_planned(config: dict[str, Any]) -> None:
    for calls, expected, as_held in run_ranks(4, test_quantised_sums.observed, config, None):
        assert calls == expected
        assert as_held


PLACES: dict[str, dict[str, Any]] = {"codes": {"zero_quantized_weights": True}, "weights": {}, "in host memory": OFFLOADED}


@pytest.mark.parametrize("place", by_day(PLACES, "codes", "in host memory"))
def test_it_has_no_races(place: str) -> None:
    config = hpz(accumulation=2, precision="bf16", overlap_comm=True, **PLACES[place])
    for races in run_ranks(4, test_simulated_device.look, config):
        assert not races, "\n".join(races)


def test_an_edit_behind_an_evaluation_has_no_races() -> None:
    """Shards in host memory go up to make the second copy, and are written to when that has been done."""
    for races in run_ranks(4, test_simulated_device.look_at_an_edit, hpz(precision="bf16", overlap_comm=True, **OFFLOADED)):
        assert not races, "\n".join(races)


def writes(folder: str) -> list[tuple[bool, int, int]]:
    """After each kind of write: (whether evaluation sees what ``state_dict`` has, how many second copies are made then, and
    in an evaluation after that)."""
    case, ids = CASES["frozen"], torch.arange(12).view(2, 6)
    engine = make_engine(case, hpz())
    frozen = next(name for name, param in engine.module.named_parameters() if not param.requires_grad and "blocks" in name)
    trained = next(name for name, param in engine.module.named_parameters() if param.requires_grad and "blocks" in name)
    found = []

    def look() -> None:
        whole = case.build()
        whole.load_state_dict(engine.state_dict())
        with torch.no_grad():
            with counted_collectives() as first:
                same = torch.equal(engine(ids), whole(ids))
            with counted_collectives() as second:
                engine(ids)
        found.append((same, *(sum("second copy" in call.label for call in calls) for calls in (first, second))))

    look()
    run_steps(engine, case, 1)
    look()
    engine.save_checkpoint(folder)
    for name in (frozen, trained):
        param = engine.module.get_parameter(name)
        with zero.GatheredParameters([param], modifier_rank=1):
            if dist.get_rank() == 1:
                param.data.fill_(0.25)
        look()
    zero.safe_set_full_fp32_param(engine.module.get_parameter(trained), torch.full_like(whole_of(engine, trained), 0.5))
    look()
    engine.load_checkpoint(folder)
    look()
    engine.destroy()
    return found


def whole_of(engine: Any, name: str) -> torch.Tensor:
    found: torch.Tensor = engine.state_dict()[name]
    return found


def test_deepspeed_7606_what_is_written_or_loaded_is_seen(tmp_path: Any) -> None:
    """DeepSpeed#7606: the first loss after a start or a load is that of a second copy that nobody has filled."""
    for found in run_ranks(4, writes, str(tmp_path)):
        assert all(same and first and not second for same, first, second in found)


def frozen_copies() -> list[int]:
    """How many second copies each step makes."""
    engine, found = make_engine(CASES["frozen"], hpz()), []
    for _ in range(2):
        with counted_collectives() as calls:
            run_steps(engine, CASES["frozen"], 1)
        found.append(sum("second copy" in call.label for call in calls))
    engine.destroy()
    return found


def test_frozen_weights_are_copied_once() -> None:
    for first, later in run_ranks(4, frozen_copies):
        assert 0 < later < first


@pytest.mark.nightly  # with 8 ranks
@pytest.mark.parametrize(("tensor", "pipe"), [(2, 1), (1, 2)])
def test_layers_and_stages_may_be_divided(tensor: int, pipe: int) -> None:
    config = make_config(3, accumulation=2, clip=0.5, zero_optimization={"zero_hpz_partition_size": 2})
    found = run_ranks(8, test_parallel_matrix.train, "llama", tensor, pipe, config)
    test_parallel_matrix.compare(found, test_parallel_matrix.reference("llama", 4, 2))
