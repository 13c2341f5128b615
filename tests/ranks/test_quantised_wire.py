"""What ZeRO++ sends: codes instead of weights where ranks gather them.

The reference is plain PyTorch in one process, whose forwards and backwards see the weights as their codes have them, while
the optimizer updates exact ones.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from covering import by_day
from harness import run_ranks
from models import CASES, Case, Gpt, Lora, Mlp, Place
from reference import Result, differences, make_optimizer, weights_of
from simulation import simulated_device
from torch import nn
from training import make_config, make_engine, run_steps, train

from zerorun import zero
from zerorun.distributed.quantised_blocks import BLOCK, coded_bytes
from zerorun.errors import ConfigError
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.step_collectives import step_collectives

STEPS = 3


def rounded(values: torch.Tensor) -> torch.Tensor:
    """``values`` as their codes have them, with blocks counted from the first."""
    flat = torch.zeros(-(-values.numel() // BLOCK) * BLOCK, dtype=values.dtype)
    flat[: values.numel()] = values.reshape(-1)
    rows = flat.view(-1, BLOCK).float()
    scale = rows.abs().amax(1, keepdim=True) / 127
    codes = torch.where(scale > 0, rows / scale, 0.0).round()
    return (codes * scale).to(values.dtype).view(-1)[: values.numel()].view_as(values)


def is_coded(name: str, param: nn.Parameter) -> bool:
    """Whether the parameter is sent as codes: a matrix of a block."""
    return name.startswith("blocks.") and param.dim() >= 2 and param.numel() >= BLOCK


def train_rounded(case: Case, ranks: int, steps: int, accumulation: int = 1, *, coded: bool = True) -> Result:
    """In one process. Without ``coded``, weights are exact."""
    module = case.build()
    optimizer = make_optimizer(module, "AdamW", case.groups)
    result = Result()
    for step in range(steps):
        exact = {
            name: param.detach().clone() for name, param in module.named_parameters() if coded and is_coded(name, param)
        }
        with torch.no_grad():
            for name, value in exact.items():
                module.get_parameter(name).copy_(rounded(value))
        total = 0.0
        for micro in range(accumulation):
            for rank in range(ranks):
                loss = case.loss(module, Place(rank, step, micro)) / (ranks * accumulation)
                loss.backward()
                total += loss.item()
        with torch.no_grad():
            for name, value in exact.items():
                module.get_parameter(name).copy_(value)
        params = [param for param in module.parameters() if param.grad is not None]
        norm = nn.utils.clip_grad_norm_(params, float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        result.losses.append(total)
        result.norms.append(norm.item())
    result.weights = weights_of(module)
    return result


def quantised(accumulation: int = 1, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    return make_config(
        3, accumulation=accumulation, precision=precision, zero_optimization={"zero_quantized_weights": True, **zero}
    )


@pytest.mark.parametrize("ranks", by_day((2, 3, 4), 2, 3))
def test_training_is_that_of_one_process_with_rounded_weights(ranks: int) -> None:
    """Wherever shards end. Two ranks read each other's memory here, and three send messages."""
    case = CASES["plain"]
    expected = train_rounded(case, ranks, STEPS, 2)
    for found in run_ranks(ranks, train, case, quantised(2), STEPS):
        assert differences(found, expected, 1e-4) == []  # the rounding of sums may make another code of some weight
        assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
        assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-6)
    assert differences(expected, train_rounded(case, ranks, STEPS, 2, coded=False), 1e-4)  # it can be seen


ON_DISK = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
PLACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"stage3_prefetch_bucket_size": 5000},
    "states in host memory": {"offload_optimizer": {"device": "cpu"}},
    "all in host memory": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "parameters in files": {"offload_param": ON_DISK},
}


def on_both_devices(rows: list[tuple[dict[str, Any], str]]) -> list[tuple[Result, Result]]:
    """(on the simulated device, which stands for a GPU with NCCL; on the CPU), for each row."""
    found = []
    for settings, policy in rows:
        config = quantised(2, "bf16", **settings) | {"activation_checkpointing": {"policy": policy}}
        with simulated_device():
            there = train(CASES["plain"], config, 2)
        found.append((there, train(CASES["plain"], config, 2)))
    return found


@pytest.mark.parametrize(
    ("ranks", "degree", "places"),
    [
        (4, 2, ["ahead", "all in host memory"]),
        pytest.param(2, None, ["plain", "all in host memory"], marks=pytest.mark.nightly),
        pytest.param(3, None, [*PLACES], marks=pytest.mark.nightly),
    ],
)
def test_it_is_the_same_wherever_shards_are_and_however_they_travel(
    ranks: int, degree: int | None, places: list[str]
) -> None:
    """Weights that are gathered anew for backward, with activations recomputed, have the values that forward saw."""
    policies = ["none", "full", "selective"]
    degrees = {} if degree is None else {"shard_degree": degree}
    rows = [(PLACES[place] | degrees, policies[number % 3]) for number, place in enumerate(places)]
    for results in run_ranks(ranks, on_both_devices, rows):
        for simulated, on_cpu in results:
            assert differences(simulated, on_cpu, 1e-6) == []
            assert differences(on_cpu, results[0][1], 1e-6) == []


def exact_values(config: dict[str, Any]) -> list[bool]:
    engine = make_engine(CASES["plain"], config)
    run_steps(engine, CASES["plain"], 2)
    name, param = "blocks.1.up.weight", engine.module.blocks[1].up.weight
    master = zero.safe_get_full_fp32_param(param)
    assert master is not None
    kept = master.to(engine.compute_dtype or torch.float32)
    with zero.GatheredParameters([param]):
        seen = param.detach().clone()
    engine.eval()
    with torch.no_grad():
        before = engine(torch.arange(6).view(1, 6))
        again = engine(torch.arange(6).view(1, 6))
    with pytest.raises(ConfigError, match="zero_quantized_weights"):
        engine.verify(torch.arange(6).view(1, 6))
    whole = engine.state_dict()
    exact = Gpt().to(kept.dtype)
    exact.load_state_dict(whole)
    plain = exact(torch.arange(6).view(1, 6))
    with torch.no_grad():
        for its, value in exact.named_parameters():
            if is_coded(its, value):
                value.copy_(rounded(value))
    found = [
        torch.equal(whole[name], kept),
        torch.equal(seen, kept),
        not torch.equal(rounded(kept), kept),
        torch.equal(before, again),
        torch.equal(before, exact(torch.arange(6).view(1, 6))),
        not torch.equal(before, plain),
    ]
    engine.destroy()
    return [*found, torch.equal(engine.module.blocks[1].up.weight, kept)]


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_masters_and_what_is_saved_are_exact_and_evaluation_sees_codes(precision: str) -> None:
    for found in run_ranks(2, exact_values, quantised(precision=precision)):
        assert all(found), found


class Sayable(Lora):
    """Frozen weights are what codes can say."""

    def make_sayable(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for block in self.blocks:
            for param in block.parameters():
                if not param.requires_grad and param.dim() == 2:
                    codes = torch.randint(-127, 128, (param.numel(),), generator=generator)
                    codes[::BLOCK] = 127
                    param.data.copy_((codes * 2.0**-9).view_as(param))


def train_sayable(settings: list[dict[str, Any]]) -> list[Result]:
    def build() -> nn.Module:
        return Sayable()

    class WithCodes(Case):
        def build(self, seed: int = 0) -> nn.Module:
            module = super().build(seed)
            assert isinstance(module, Sayable)
            module.make_sayable()
            return module

    case = WithCodes("sayable", build)
    return [train(case, make_config(3, zero_optimization=settings), STEPS) for settings in settings]


def test_frozen_weights_that_codes_can_say_give_the_same_bits() -> None:
    """The frozen ones only: LoRA's own matrices are trained, and any value is as good as another for them."""
    settings = [{}, {"zero_quantized_nontrainable_weights": True}]
    for plain, coded in run_ranks(2, train_sayable, settings):
        assert coded.losses == plain.losses
        assert coded.norms == plain.norms
        assert all(torch.equal(value, plain.weights[name]) for name, value in coded.weights.items())


def odd_blocks() -> nn.Module:
    return Gpt(3, make=Mlp)


def test_deepspeed_4852_and_3864_bf16_and_any_number_of_weights() -> None:
    """DeepSpeed#4852: bf16 weights crash its quantiser; #3864, #4309: so does a number that is no multiple of 8."""
    case = Case("odd", odd_blocks, classes=("Mlp",))
    plain = make_config(3, precision="bf16")
    for found in run_ranks(2, train_each, case, [quantised(precision="bf16"), plain]):
        coded, exact = found
        assert differences(coded, exact, 2e-2) == []
        assert coded.losses != exact.losses


def train_each(case: Case, configs: list[dict[str, Any]], steps: int = STEPS) -> list[Result]:
    return [train(case, config, steps) for config in configs]


@pytest.mark.parametrize("precision", ("bf16", "fp32"))
def test_bytes_are_those_of_the_formula(precision: str) -> None:
    """On 64 GPUs, without any: of each unit, for forward and backward, a byte and a 64th for a weight of a matrix."""

    def planned(settings: dict[str, Any]) -> tuple[int, int, int]:
        config = make_config(3, precision=precision, zero_optimization={**settings, "overlap_comm": True})
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(4)))
        wanted, raw = take_in(model, config, None, None, None, 64)
        plan = make_plan(model, wanted, raw, planned_topology(wanted, 64, 8), "nccl", "cuda")
        sent = [call.bytes for call in step_collectives(plan) if "all-gather for" in call.label]
        held = sum(buffer.bytes for group in plan.flat_groups for buffer in group.buffers if buffer.tensor == "coded")
        return sum(sent), held, plan.param_slots.nbytes

    size = 2 if precision == "bf16" else 4
    sent, held, slot = planned({"zero_quantized_weights": True})
    plain, _, plain_slot = planned({})
    matrix, vectors = 512 * 512, 64 * 32  # of 3 * 512, with shards of whole cache lines
    visits = 4 + 2  # two slots still have their units when backward begins
    assert sent == visits * 63 * (coded_bytes(matrix // 64) + size * vectors // 64)
    assert plain == visits * 63 * size * (matrix + vectors) // 64
    assert held == 4 * coded_bytes(matrix // 64)
    assert slot - plain_slot == coded_bytes(matrix)


@pytest.mark.nightly  # by day: that training is that of one process whose weights are rounded
@pytest.mark.parametrize("steps", [30, 200])
def test_the_loss_is_that_of_exact_weights_within_a_hundredth(steps: int) -> None:
    case = CASES["plain"]
    for coded, exact in run_ranks(2, train_each, case, [quantised(), make_config(3)], steps, timeout_s=300):
        late = slice(-10, None)
        assert abs(sum(coded.losses[late]) - sum(exact.losses[late])) / 10 <= 0.01
