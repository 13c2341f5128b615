"""Gradients that are reduced in codes, in one hop or two: errors, bytes, replicas, convergence, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import test_simulated_device
import torch
import torch.distributed as dist
from covering import by_day
from harness import of_this_job, run_ranks
from models import CASES, Case, Gpt
from reference import Result, differences
from simulation import simulated_device
from torch import nn
from training import counted_collectives, make_config, make_engine, run_steps, train

import zerorun
from zerorun import zero
from zerorun.checkpoint import load
from zerorun.checkpoint.cli.verify import check
from zerorun.config.parse import load_config
from zerorun.distributed.quantised_blocks import BLOCK, coded_bytes
from zerorun.distributed.quantised_hops import QuantisedHop, plan_hops
from zerorun.distributed.topology import Topology
from zerorun.errors import ConfigError
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.byte_ledger import planned_bytes, with_states
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.optimizer_states import OptimizerStates
from zerorun.plan.step_collectives import Collective, step_collectives


def quantised(stage: int = 3, accumulation: int = 1, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    settings = {"zero_quantized_gradients": True, **zero}
    return make_config(stage, accumulation=accumulation, precision=precision, zero_optimization=settings)


def topology_of(ranks_per_host: int | None, shard_degree: int | None = None) -> Topology:
    """One for all engines of a job, whose hosts are said to have ``ranks_per_host`` ranks."""
    key = "hosts", ranks_per_host, shard_degree
    if key not in of_this_job:
        world, rank = dist.get_world_size(), dist.get_rank()
        of_this_job[key] = Topology.create(
            world, rank, shard_degree=shard_degree, ranks_per_host=ranks_per_host, device_type="cpu"
        )
    found: Topology = of_this_job[key]
    return found


# -- hops, as pure data ------------------------------------------------------------------------------------------


def hops_of(shard: int, ranks_per_host: int | None, **degrees: int) -> tuple[QuantisedHop, ...]:
    world = shard * degrees.get("tensor", 1) * degrees.pop("replicate", 1)
    return plan_hops(Topology.plan(world, shard_degree=shard, ranks_per_host=ranks_per_host, **degrees), between=4)


def test_there_are_two_hops_where_a_group_fills_hosts() -> None:
    assert hops_of(8, 8) == hops_of(8, None) == (QuantisedHop(8, 1, 1, 8),)
    assert hops_of(4, 8, replicate=2) == (QuantisedHop(4, 1, 1, 8),)
    assert hops_of(8, 1) == (QuantisedHop(8, 1, 1, 4),)
    assert hops_of(6, 4) == (QuantisedHop(6, 1, 1, 4),)
    within, between = hops_of(64, 8)
    assert (within.size, within.stride, within.parts, within.bits) == (8, 1, 8, 8)
    assert (between.size, between.stride, between.parts, between.bits) == (8, 8, 1, 4)
    assert hops_of(8, 8, tensor=4)[0].size == 2


@pytest.mark.parametrize(("shard", "here"), [(8, 2), (12, 3), (64, 8)])
def test_every_gradient_comes_to_its_owner(shard: int, here: int) -> None:
    """Follows sets of ranks instead of sums: at the end each owner has what every rank had for it, each once."""
    held = {(rank, owner): [rank] for rank in range(shard) for owner in range(shard)}
    for hop in hops_of(shard, here):
        arrived: dict[tuple[int, int], list[int]] = {}
        for rank in range(shard):
            assert rank in hop.peers(rank)
            assert hop.peers(rank)[hop.place(rank)] == rank
            for owner in range(shard):
                to = hop.peers(rank)[owner % hop.size] if hop.parts > 1 else owner  # the first hop: to its place here
                if to in hop.peers(rank):
                    arrived.setdefault((to, owner), []).extend(held.get((rank, owner), []))
        held = arrived
    assert all(sorted(held[owner, owner]) == list(range(shard)) for owner in range(shard))


@pytest.mark.parametrize("bits", (4, 8))
def test_bytes_between_hosts_are_those_of_the_formula(bits: int) -> None:
    """64 GPUs on 8 hosts, N gradients: each rank sends 7/8 N within its host, and between hosts 7 shards of N/64."""
    config = quantised(zero_quantized_gradients_bits=bits)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512, bias=False)) for _ in range(4)))
    wanted, raw = take_in(model, config, None, None, None, 64)
    plan = make_plan(model, wanted, raw, planned_topology(wanted, 64, 8), "nccl", "cuda")
    calls = [call for call in step_collectives(plan) if "reduce-scatter" in call.label]
    between = sum(call.bytes for call in calls if call.label.endswith(" between hosts"))
    within = sum(call.bytes for call in calls) - between
    shard = 512 * 512 // 64
    first, second = "{}: reduce-scatter gradients", "{}: reduce-scatter gradients between hosts"
    labels = [call.label for call in step_collectives(plan)]
    for unit in (3, 2, 1):  # the backward of the unit after the next is still to come, and its gather
        assert labels.index(second.format(unit)) == labels.index(first.format(unit - 1)) + 1
    assert within == 4 * 7 * 8 * coded_bytes(shard)
    assert between == 4 * 7 * coded_bytes(shard, bits)
    assert between / (4 * 56 * shard * 2) < (0.064 if bits == 8 else 0.033)  # of what bf16 would send between hosts


# -- sums --------------------------------------------------------------------------------------------------------

SMALL = Case("small", lambda: Gpt(1))  # errors of sums are those of its block, as often as it comes


def gradients_of(config: dict[str, Any], ranks_per_host: int | None, seeds: int) -> list[dict[str, torch.Tensor]]:
    """The first step's gradients by name, for each seed of the rounding."""
    found = []
    for seed in range(seeds):
        engine = make_engine(SMALL, {**config, "seed": seed}, topology=topology_of(ranks_per_host))
        engine.backward(engine(torch.arange(12).view(2, 6) + dist.get_rank()).float().square().mean())
        found.append({name: value.clone() for name, value in zero.full_gradients(engine.module)})
        engine.zero_grad()
        engine.destroy()
    return found


def both_gradients(ranks_per_host: int | None, bits: int, seeds: int) -> tuple[list[dict[str, torch.Tensor]], ...]:
    return (
        gradients_of(make_config(3), ranks_per_host, 1),
        gradients_of(quantised(zero_quantized_gradients_bits=bits), ranks_per_host, seeds),
    )


@pytest.mark.parametrize(
    ("ranks", "here", "bits"), [(4, 2, 4), (3, None, 8), pytest.param(4, 2, 8, marks=pytest.mark.nightly)]
)
def test_errors_are_small_and_average_out(ranks: int, here: int | None, bits: int) -> None:
    """Gains and biases are exact. Ranks see the same gradients, because each part has one owner."""
    seeds = 4
    results = run_ranks(ranks, both_gradients, here, bits, seeds)
    (exact,), coded = results[0]
    for name, value in exact.items():
        same = [torch.equal(one[name], results[-1][1][number][name]) for number, one in enumerate(coded)]
        assert all(same)
        errors = torch.stack([one[name] - value for one in coded])
        if value.dim() < 2 or value.numel() < BLOCK:
            assert errors.abs().max() <= 1e-6 * value.abs().max()
            continue
        worst = 4 * value.abs().max() / (7 if bits == 4 else 127)  # summands may be larger than their sum
        assert 0 < errors.abs().max() <= worst
        assert not torch.equal(coded[0][name], coded[1][name])
        alone, together = errors.square().mean().sqrt(), errors.mean(0).square().mean().sqrt()
        assert together < 0.65 * alone  # 0.5 for independent errors


def mean_errors(settings: list[dict[str, Any]], sums: int) -> list[float]:
    """The rms error of the mean of ``sums`` sums of the same gradients, of matrices, for each of the settings."""
    (exact,), found = gradients_of(make_config(3), 2, 1), []
    for config in settings:
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
        engine = make_engine(SMALL, config, topology=topology_of(2))
        total: dict[str, torch.Tensor] = {}
        for _ in range(sums):
            engine.backward(engine(torch.arange(12).view(2, 6) + dist.get_rank()).float().square().mean())
            for name, value in zero.full_gradients(engine.module):
                total[name] = total.get(name, 0.0) + value / sums
            engine.step()
        engine.destroy()
        errors = [(total[name] - value).view(-1) for name, value in exact.items() if name.startswith("blocks.")]
        found.append(float(torch.cat(errors).square().mean().sqrt()))
    return found


def test_what_feedback_leaves_out_does_not_grow() -> None:
    """4 bits between two hosts: errors of 16 sums by chance average out as 1 / 4, and with feedback as 1 / 16."""
    settings = [quantised(), quantised(zeropp_loco_param={"err_beta": 0.0}), quantised(zeropp_loco_param={"err_beta": 0.8})]
    by_chance, fed_back, averaged = run_ranks(4, mean_errors, settings, 16)[0]
    assert 0 < fed_back < 0.4 * by_chance
    assert averaged < by_chance


def test_codes_of_replicas_are_the_same_bits() -> None:
    """Two shard groups of two ranks: their sums over replicas are exact, and weights stay equal."""
    for found in run_ranks(4, replicas, quantised(2, shard_degree=2)):
        assert found


def replicas(config: dict[str, Any]) -> bool:
    engine = make_engine(CASES["plain"], config, topology=topology_of(2, 2))
    run_steps(engine, CASES["plain"], 3)
    mine = torch.cat([value.double().view(-1) for value in engine.state_dict().values()])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    engine.destroy()
    return all(torch.equal(mine, other) for other in found)


def on_both_devices(rows: list[tuple[dict[str, Any], int | None]]) -> list[tuple[Result, Result]]:
    """(on the simulated device, which stands for a GPU with NCCL; on the CPU)."""
    found = []
    for config, degree in rows:
        with simulated_device():
            topology = Topology.plan(dist.get_world_size(), dist.get_rank(), shard_degree=degree, ranks_per_host=2)
            there = train(CASES["plain"], config, 2, topology=topology)
        found.append((there, train(CASES["plain"], config, 2, topology=topology_of(2, degree))))
    return found


TRAVELS = {
    "plain": (quantised(2, 2, "bf16"), None),
    "offload": (quantised(3, 2, offload_optimizer={"device": "cpu"}, zero_quantized_weights=True), None),
    "feedback": (quantised(3, zeropp_loco_param={}), None),
}


@pytest.mark.nightly  # by day: test_quantised_wire.py
@pytest.mark.parametrize("what", by_day(TRAVELS, "offload"))
def test_it_is_the_same_however_gradients_travel(what: str) -> None:
    for results in run_ranks(4, on_both_devices, [TRAVELS[what]]):
        for simulated, on_cpu in results:
            assert differences(simulated, on_cpu, 1e-5) == []


ON_HOST = {"device": "cpu"}


BOTH_ON_HOST = {"offload_param": ON_HOST, "offload_optimizer": ON_HOST}


@pytest.mark.parametrize("places", by_day([{}, {"offload_param": ON_HOST}, BOTH_ON_HOST], BOTH_ON_HOST))
def test_codes_have_no_races(places: dict[str, Any]) -> None:
    """Of weights and of gradients, on the simulated device, with units gathered ahead, wherever they are kept."""
    config = quantised(3, 2, "bf16", zero_quantized_weights=True, **places)
    for races in run_ranks(2, test_simulated_device.look, config):
        assert not races, "\n".join(races)


def look_at_two_hops(config: dict[str, Any]) -> list[str]:
    topology = Topology.plan(dist.get_world_size(), dist.get_rank(), ranks_per_host=2)
    return test_simulated_device.look(config, topology=topology)


@pytest.mark.nightly  # by day: test_codes_have_no_races, and test_codes_of_replicas_are_the_same_bits
def test_the_second_hop_has_no_races() -> None:
    """It goes on behind the backward of the unit after the next."""
    for races in run_ranks(4, look_at_two_hops, quantised(2, 2, "bf16", zeropp_loco_param={})):
        assert not races, "\n".join(races)


def observed(config: dict[str, Any], degree: int | None) -> tuple[list[Collective], list[Collective], bool]:
    """(collectives of the third step, those planned, whether the memory is as planned)."""
    engine = make_engine(CASES["plain"], config, topology=topology_of(2, degree))
    run_steps(engine, CASES["plain"], 2)
    with counted_collectives() as calls:
        run_steps(engine, CASES["plain"], 1)
    plan, held = engine.runtime.plan, engine.memory_report()
    complete = with_states(plan, OptimizerStates(raw_of(config), torch.device("cpu")))
    engine.destroy()
    return calls, step_collectives(plan), held == planned_bytes(complete)


def raw_of(config: dict[str, Any]) -> Any:
    return take_in(CASES["plain"].build(), config, None, None, None, dist.get_world_size())[1]


@pytest.mark.parametrize(
    ("stage", "degree", "settings"),
    [(3, None, {"zeropp_loco_param": {"reset_T": 1}}), (3, None, {"overlap_comm": True}), (1, 2, {})],
)
def test_what_is_sent_and_held_is_planned(stage: int, degree: int | None, settings: dict[str, Any]) -> None:
    for calls, planned, as_held in run_ranks(4, observed, quantised(stage, 2, **settings), degree):
        assert calls == planned
        assert as_held


# -- training ----------------------------------------------------------------------------------------------------


def train_each(configs: list[dict[str, Any]], ranks_per_host: int | None, steps: int) -> list[Result]:
    return [train(CASES["plain"], config, steps, topology=topology_of(ranks_per_host)) for config in configs]


@pytest.mark.nightly  # by day: that errors are small, average out, and are fed back
@pytest.mark.parametrize("steps", [12, 200])
def test_the_loss_is_that_of_exact_gradients_within_a_hundredth(steps: int) -> None:
    """4 bits between two hosts of two ranks, with weights in codes as well: all that ZeRO++ rounds."""
    configs = [quantised(zero_quantized_weights=True), quantised(zeropp_loco_param={}), make_config(3)]
    for *rounded, exact in run_ranks(4, train_each, configs, 2, steps, timeout_s=300):
        late = slice(-10, None)
        for coded in rounded:
            assert abs(sum(coded.losses[late]) - sum(exact.losses[late])) / 10 <= 0.01
            assert coded.losses != exact.losses


def interrupted(config: dict[str, Any], folder: str, ranks_per_host: int | None, asynchronous: bool = False) -> bool:
    """A run that goes on from a checkpoint has the bits of one that was never interrupted."""
    case, topology = CASES["plain"], topology_of(ranks_per_host)
    engine = make_engine(case, config, topology=topology)
    run_steps(engine, case, 2)
    engine.save_checkpoint(folder, asynchronous=asynchronous)
    expected = run_steps(engine, case, 2).losses
    engine.destroy()
    engine = make_engine(case, config, topology=topology)
    engine.load_checkpoint(folder)
    found = run_steps(engine, case, 2).losses
    engine.destroy()
    return found == expected


def test_a_checkpoint_continues_with_the_same_rounding(tmp_path: Any) -> None:
    assert all(run_ranks(2, interrupted, quantised(), str(tmp_path), None))


def interrupted_with_other_batches(folder: str) -> tuple[bool, int]:
    """The same where steps have had other numbers of micro-batches than the configuration says, and how many there were."""
    case, config = CASES["plain"], quantised(3, 2)

    def larger() -> zerorun.Engine:
        engine = make_engine(case, config)
        engine.set_train_batch_size(engine.train_batch_size() // 2 * 3)
        return engine

    engine = larger()
    run_steps(engine, case, 1)
    engine.save_checkpoint(folder)
    expected = run_steps(engine, case, 2).losses
    engine.destroy()
    engine = larger()
    engine.load_checkpoint(folder)
    counted, found = engine.micro_steps, run_steps(engine, case, 2).losses
    engine.destroy()
    return found == expected, counted


def test_a_checkpoint_counts_the_micro_batches_that_there_were(tmp_path: Any) -> None:
    """They decide how is rounded. A load made of 3 of them the 2 of the configuration."""
    assert run_ranks(2, interrupted_with_other_batches, str(tmp_path)) == [(True, 3)] * 2


@pytest.mark.each_value
@pytest.mark.parametrize("reset", by_day([1024, 3, 2], 3, 2))
@pytest.mark.parametrize(("stage", "ranks_per_host"), [(3, 2), (2, 1)])
def test_what_was_left_out_is_saved(stage: int, ranks_per_host: int, reset: int, tmp_path: Any) -> None:
    """Within an epoch, and where one ends after the save or with it. The files are as the manifest says."""
    config = quantised(stage, zeropp_loco_param={"reset_T": reset})
    assert all(run_ranks(4, interrupted, config, str(tmp_path), ranks_per_host, reset == 3))
    assert not check(tmp_path / "global_step2").problems


def on_other_ranks(config: dict[str, Any], folder: str, ranks_per_host: int, save: bool) -> list[str]:
    said: list[str] = []
    engine = make_engine(CASES["plain"], config, topology=topology_of(ranks_per_host))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load.logger, "info", lambda text, *given: said.append(text % given))
        if save:
            run_steps(engine, CASES["plain"], 2)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
            run_steps(engine, CASES["plain"], 1)
    engine.destroy()
    return [line for line in said if "coding" in line]


def test_on_other_ranks_what_was_left_out_begins_anew_and_one_line_says_so(tmp_path: Any) -> None:
    config = quantised(zeropp_loco_param={})
    run_ranks(4, on_other_ranks, config, str(tmp_path), 2, True)
    for ranks, ranks_per_host in ((2, 1), (4, 1)):
        first, *others = run_ranks(ranks, on_other_ranks, config, str(tmp_path), ranks_per_host, False)
        assert len(first) == 1
        assert "begins anew" in first[0]
        assert not any(others)
    first, *_ = run_ranks(4, on_other_ranks, config, str(tmp_path), 2, False)
    assert len(first) == 1
    assert "what coding had left out of gradients" in first[0]


def loaded_twice(config: dict[str, Any], folder: str, load_optimizer: bool) -> list[list[float]]:
    """The losses after a load: in the engine that has saved and gone on, and in a new one."""
    case, found = CASES["plain"], []
    engine = make_engine(case, config, topology=topology_of(2))
    run_steps(engine, case, 2)
    engine.save_checkpoint(folder)
    run_steps(engine, case, 2)
    for _ in range(2):
        engine.load_checkpoint(folder, load_optimizer=load_optimizer)
        found.append(run_steps(engine, case, 2).losses)
        engine.destroy()
        engine = make_engine(case, config, topology=topology_of(2))
    engine.destroy()
    return found


@pytest.mark.parametrize("load_optimizer", by_day((True, False), False))
def test_residuals_are_not_those_of_other_weights(load_optimizer: bool, tmp_path: Any) -> None:
    """They are the checkpoint's, or begin anew with a load of the weights alone."""
    config = {**quantised(zeropp_loco_param={}), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    for first, second in run_ranks(4, loaded_twice, config, str(tmp_path), load_optimizer):
        assert first == second


def overflows(config: dict[str, Any]) -> list[bool]:
    engine = make_engine(CASES["plain"], config, topology=topology_of(1))
    found = []
    for wrong in (float("inf"), 1.0):
        loss = engine(torch.arange(12).view(2, 6)).float().square().mean()
        engine.backward(loss * (wrong if dist.get_rank() else 1.0) if wrong != 1.0 else loss)
        engine.step()
        found.append(engine.was_step_applied())
    engine.destroy()
    return found


def test_deepspeed_4886_an_overflow_is_seen_in_codes() -> None:
    """DeepSpeed#4886: with quantised gradients in fp16, the loss became infinite and the scale fell to 1."""
    config = quantised(2, precision="fp16", zeropp_loco_param={}, zero_quantized_gradients_bits=8)
    for found in run_ranks(2, overflows, config):
        assert found == [False, True]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_quantized_gradients_bits"):
        load_config(quantised(zero_quantized_gradients_bits=3))
    with pytest.raises(ConfigError, match="zeropp_loco_param"):
        load_config(quantised(zeropp_loco_param={"err_beta": 1.0}))
    with pytest.raises(ConfigError, match="zeropp_loco_param"):
        load_config(quantised(zeropp_loco_param={}, zero_quantized_gradients=False))
    with pytest.raises(ConfigError, match="zeropp_loco_param"):
        load_config({**quantised(zeropp_loco_param={}), "optimizer": {"type": "Sophia"}})
