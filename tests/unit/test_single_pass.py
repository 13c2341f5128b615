"""Single-pass updates: every instruction set and torch's path against float64 and ``torch.optim``, and the optimizers.

updates.py has the rules, and says how errors are measured.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from updates import (
    DTYPES,
    RULES,
    TINIEST,
    TORCH_UNITS,
    UNITS,
    Rule,
    Work,
    assert_close_to_float64,
    random_bits,
    same,
    training,
    use,
)

from zerorun.ops import native, single_pass
from zerorun.ops.rounding import MasterFormat, Origin, Rounding, by_chance, join, split
from zerorun.ops.single_pass import SGD, Adagrad, Adam, Adam8bit, Lion, SinglePassOptimizer
from zerorun.ops.state_format import StateFormat

PATHS = (*native.ISAS, "torch")
MANY = 1_000_000
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.param, monkeypatch)
    return str(request.param)


# -- one update --------------------------------------------------------------------------------------------------------


@pytest.mark.each_pair
@ALL_RULES
@pytest.mark.parametrize("kind", [training, random_bits])
@pytest.mark.parametrize("coefficient", [1.0, 0.37])
def test_close_to_float64(rule: Rule, kind: Callable[..., Work], coefficient: float, path: str) -> None:
    before = replace(kind(rule, MANY // 4), coefficient=coefficient)
    after = before.copy()
    rule.run(after)
    if path == "torch":  # a dividend may be denormal, and so be rounded to a multiple of TINIEST
        assert_close_to_float64(rule, before, after, TORCH_UNITS, TORCH_UNITS * TINIEST / rule.hyper.get("eps", 1.0))
    else:
        assert_close_to_float64(rule, before, after, UNITS)


@pytest.mark.each_pair
@ALL_RULES
@pytest.mark.parametrize("out", [None, torch.bfloat16])
def test_a_coefficient_on_the_device(rule: Rule, out: torch.dtype | None, path: str) -> None:
    """Gives the bits of a number. If it is not finite nothing is written, not even what is infinite already."""
    start = training(rule, 3000)
    start.out = None if out is None else torch.zeros(3000, dtype=out)
    number, tensor = replace(start.copy(), coefficient=0.37), replace(start.copy(), coefficient=torch.tensor(0.37))
    rule.run(number)
    rule.run(tensor)
    assert all(map(same, number.results(), tensor.results()))
    assert not same(start.weight, tensor.weight)
    for useless in (float("nan"), float("inf"), -float("inf")):
        skipped = replace(tensor.copy(), coefficient=torch.tensor(useless))
        rule.run(skipped)
        assert all(map(same, skipped.results(), tensor.results()))


@pytest.mark.parametrize("bad", [torch.ones(()).double(), torch.ones(1)])
def test_other_coefficients_are_refused(bad: Tensor) -> None:
    with pytest.raises(TypeError, match="a number, or an fp32 scalar"):
        single_pass.sgd(torch.ones(3), torch.ones(3), lr=0.1, coefficient=bad)


def test_a_step_is_taken_back() -> None:
    """Counts and new states: what the device has written nothing to is as before."""
    for optimizer_class in (Adam, Adagrad, SGD, Lion):
        settings = {"momentum": 0.9} if optimizer_class is SGD else {}
        tensor = torch.ones(3, requires_grad=True)
        optimizer: SinglePassOptimizer = optimizer_class([tensor], **settings)
        tensor.grad = torch.ones(3)
        optimizer.coefficient = torch.tensor(float("nan"))
        optimizer.step()
        optimizer.take_back()
        assert not optimizer.state and torch.equal(tensor, torch.ones(3))
        optimizer.step()
        before = copy.deepcopy(optimizer.state[tensor])
        optimizer.coefficient = torch.tensor(float("nan"))
        optimizer.step()
        optimizer.take_back()
        optimizer.take_back()  # there is nothing more to take back
        assert all(torch.equal(before[key], value) for key, value in optimizer.state[tensor].items())


@ALL_RULES
def test_instruction_sets_give_the_same_bits(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    for gradient_type, out_type in ((torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16)):
        start = replace(random_bits(rule, MANY), out=torch.zeros(MANY, dtype=out_type), coefficient=0.3)
        start.gradient = start.gradient.to(gradient_type)
        done = []
        for isa in native.library().isas if native.library() else ():
            use(isa, monkeypatch)
            done.append(start.copy())
            rule.run(done[-1])
        for other in done[1:]:
            assert all(map(same, done[0].results(), other.results()))


@pytest.mark.each_pair
@ALL_RULES
@pytest.mark.parametrize("kind", MasterFormat)
@pytest.mark.parametrize("rows", [0, 13])
@pytest.mark.parametrize("chance", [True, False])
def test_what_is_kept_in_bf16_is_the_fp32_result_rounded(
    rule: Rule, kind: MasterFormat, rows: int, chance: bool, path: str
) -> None:
    """Weight and states, on every path: so ranks whose shards begin elsewhere come to the same bits.

    But for Adam's weight in bf16 alone: its update is in fp32 throughout, so that few are rounded otherwise.
    """
    noise = Origin(0, MANY, "name", (1 << 33) - 3000, rows, 29, 5).noise(7) if chance else None
    start = training(rule, 7000)
    weight, rest = kind.parts(start.weight)
    states = tuple(state.bfloat16() for state in start.states)
    narrow = replace(start, weight=weight, states=states, rounding=Rounding(rest, noise)).copy()
    narrow.out = None if kind is MasterFormat.FP32 else torch.zeros(7000).bfloat16()
    wide = replace(start, weight=join(weight, rest), states=tuple(state.float() for state in states)).copy()
    rule.run(wide)
    rule.run(narrow)

    def rounded(values: Tensor, tensor: int) -> Tensor:
        return values.bfloat16() if noise is None else by_chance(values, noise.of(tensor, 0, 7000, values.device))

    if kind is MasterFormat.BF16 and rule.function is single_pass.adam and path != "torch":
        apart = (narrow.weight.view(torch.int16) - rounded(wide.weight, 0).view(torch.int16)).abs()
        assert apart.max() <= 1 and apart.sum() < 10
    elif kind is MasterFormat.BF16 and rule.function is not single_pass.curvature:
        assert same(narrow.weight, rounded(wide.weight, 0))
    else:
        kept, left_out = kind.parts(wide.weight)
        assert same(narrow.weight, kept)
        assert left_out is None or (narrow.rounding.rest is not None and same(narrow.rounding.rest, left_out))
    for number, (state, value) in enumerate(zip(narrow.states, wide.states, strict=True)):
        assert same(state, rounded(value, 1 + number))
    assert narrow.out is None or same(narrow.out, narrow.weight)


ADAMS = {name: rule for name, rule in RULES.items() if rule.function is single_pass.adam}


@pytest.mark.parametrize("rule", ADAMS.values(), ids=ADAMS)
@pytest.mark.parametrize("kind", [training, random_bits])
@pytest.mark.parametrize("rows", [0, 13, 1000])
@pytest.mark.parametrize("chance", [True, False])
@pytest.mark.parametrize("isa", native.ISAS)
def test_tensors_that_all_are_bf16_have_a_loop_of_their_own_and_the_same_bits(
    rule: Rule, kind: Callable[..., Work], rows: int, chance: bool, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the same gradient in fp32, for which each tensor is widened, and of a whole without threads."""
    use(isa, monkeypatch)
    numel = 20_000
    start = kind(rule, numel)
    weight, gradient, *states = (tensor.bfloat16() for tensor in (start.weight, start.gradient, *start.states))
    for begin in range(3):  # the second of a pair, too; in a page of its own, and beyond the lower half of places
        origin = Origin(0, numel, "name", (1 << 33) - 9000 + begin, rows, 1029, 5)
        whole = Work(weight, gradient, tuple(states), coefficient=0.37)
        whole.rounding = Rounding(None, origin.noise(7) if chance else None)
        wide = replace(whole.copy(), gradient=gradient.float())
        rule.run(wide)
        in_pairs = whole.copy()
        rule.run(in_pairs)
        assert all(map(same, in_pairs.results(), wide.results()))
        assert kind is random_bits or not same(in_pairs.weight, weight)
        cut = whole.copy()
        for low, high in ((0, 1), (1, 2), (2, 1001), (1001, 1200), (1200, numel)):
            noise = replace(whole.rounding.noise, start=origin.start + low) if whole.rounding.noise else None
            parts = (cut.weight[low:high], gradient[low:high], tuple(state[low:high] for state in cut.states))
            rule.run(Work(*parts, coefficient=0.37, rounding=Rounding(None, noise)))
        assert all(map(same, cut.results(), wide.results()))


def test_a_small_decay_arrives_in_weights_of_bf16(path: str) -> None:
    """A millionth in each step, where a last bit is a 128th."""
    numel = 1 << 20
    weight = torch.linspace(1.0, 2.0, numel).bfloat16()
    before = float(weight.double().mean())
    for step in range(1, 40):
        states = (torch.zeros(numel).bfloat16(), torch.ones(numel).bfloat16())
        noise = Origin(0, numel, "name").noise(step)
        how = {"lr": 1e-5, "weight_decay": 0.1, "rounding": Rounding(None, noise)}
        single_pass.adam(weight, torch.zeros(numel).bfloat16(), *states, step=step, **how)
    assert abs((1 - float(weight.double().mean()) / before) / 39e-6 - 1) < 0.05


def test_parts_of_a_tensor_are_rounded_as_the_whole(path: str) -> None:
    """Shards begin anywhere, and pieces consist of several parameters."""
    names = (("one", 0, 900), ("two", 912, 2100))  # with a gap, as in flat buffers
    start = torch.randn(3012, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole, gradient = start.clone(), torch.randn(3012, generator=torch.Generator().manual_seed(2))
    optimizer = Adam([whole], lr=0.01)
    optimizer.formats[whole], optimizer.gradients[whole] = StateFormat.BF16, gradient
    optimizer.origins[whole] = tuple(Origin(low, numel, name) for name, low, numel in names)
    cut = [start[:700].clone(), start[700:1000].clone(), start[1000:].clone()]
    other = Adam(cut, lr=0.01)
    for part, low, high in zip(cut, (0, 700, 1000), (700, 1000, 3012), strict=True):
        other.formats[part], other.gradients[part] = StateFormat.BF16, gradient[low:high]
        other.origins[part] = tuple(f for origin in optimizer.origins[whole] if (f := origin.within(low, high)))
    for _ in range(3):
        optimizer.step()
        other.step()
    covered = torch.cat([torch.arange(low, low + numel) for _, low, numel in names])
    assert same(torch.cat(cut)[covered], whole[covered]) and not same(whole[covered], start[covered])
    assert same(whole[900:912], start[900:912])  # what belongs to no parameter stays


def test_noise_is_even_and_of_its_own_for_each_tensor_and_step() -> None:
    values = torch.full((MANY,), 1.0 + 2**-9)  # a quarter of the way to the next bf16
    drawn = []
    for name, step, tensor in (("a", 1, 0), ("b", 1, 0), ("a", 2, 0), ("a", 1, 1)):
        noise = Origin(0, MANY, name).noise(step).of(tensor, 0, MANY, values.device)
        drawn.append(noise.double())
        assert abs(float(by_chance(values, noise).double().mean()) - float(values[0])) < 2e-5
        assert abs(float(drawn[-1].mean()) / 65536 - 0.5) < 2e-3
    pairs = torch.corrcoef(torch.stack([*drawn, drawn[0].roll(1), drawn[0].roll(1024)]))
    assert float((pairs - torch.eye(6).double()).abs().max()) < 5e-3
    assert not torch.equal(drawn[0], Origin(0, MANY, "a", seed=1).noise(1).of(0, 0, MANY, values.device).double())


def test_small_updates_arrive_torchtune_2254(path: str) -> None:
    """Steps of a 64th of the last bit of a weight, and as small a decay: rounded to nearest, it stands still."""
    for kind, chance, moved in (
        (MasterFormat.BF16, False, 0.0),
        (MasterFormat.BF16, True, 1.0),
        (MasterFormat.KAHAN, False, 1.0),
        (MasterFormat.REMAINDER, False, 1.0),
    ):
        weight, rest = kind.parts(torch.full((4096,), 1.5))
        for step in range(64):
            noise = Origin(0, 4096, "name").noise(step) if chance else None
            how = {"lr": 2.0**-14, "weight_decay": 1 / 3}
            single_pass.sgd(weight, torch.full((4096,), 0.5), rounding=Rounding(rest, noise), **how)
        assert abs(float(join(weight, rest).mean() - 1.5) / -(2.0**-8) - moved) < 0.05, kind


def test_remainders_are_exact_and_sums_with_compensation_round_to_the_weight_apex_1842() -> None:
    """Any bits but those of NaN, ties and numbers that round to infinity included."""
    ties = torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16 + 2**15
    drawn = torch.randint(-(2**31), 2**31, (MANY,), dtype=torch.int64, generator=torch.Generator().manual_seed(3))
    values = torch.cat([ties, drawn.int()]).view(torch.float32)
    weight, rest = split(values, torch.int16)
    back = join(weight, rest)
    number = ~values.isnan()
    assert torch.equal(back[number].view(torch.int32), values[number].view(torch.int32)) and back[~number].isnan().all()
    weight, rest = split(values, torch.bfloat16)
    usual = number & weight.isfinite()
    together = join(weight, rest)[usual]
    assert torch.equal(together.bfloat16(), weight[usual])
    assert float(((together - values[usual]).abs() / values[usual].abs().clamp(min=2**-100)).max()) < 2**-16


@pytest.mark.parametrize("gradient_type", DTYPES)
@pytest.mark.parametrize("out_type", [*DTYPES, None])
def test_all_dtypes(gradient_type: torch.dtype, out_type: torch.dtype | None, path: str) -> None:
    """A gradient is what torch converts it to; the output is what torch rounds the weight to."""
    for rule in RULES.values():
        start = training(rule, 5000)
        start.gradient = start.gradient.to(gradient_type)
        wide = replace(start, gradient=start.gradient.float()).copy()
        narrow = replace(start, out=None if out_type is None else torch.zeros(5000, dtype=out_type)).copy()
        rule.run(wide)
        rule.run(narrow)
        assert all(map(same, wide.results(), narrow.results()))
        if narrow.out is not None and out_type is not None:
            assert same(narrow.out, narrow.weight.to(out_type))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_converted_exactly(dtype: torch.dtype, path: str) -> None:
    gradient = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    weight = torch.zeros(2**16)
    single_pass.sgd(weight, gradient, lr=1.0)
    assert same(weight, 0.0 - gradient.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_to_nearest_even(dtype: torch.dtype, path: str) -> None:
    """Random bits, every number of the type, and halfway to the next one, and one fp32 unit to either side of that."""
    integers = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    numbers, following = (integers.add(more).to(torch.int16).view(dtype).float() for more in (0, 1))
    middle = ((numbers.double() + following.double()) / 2).float()
    infinity = torch.tensor(float("inf"))
    edges = [numbers, middle, torch.nextafter(middle, infinity), torch.nextafter(middle, -infinity)]
    weight = torch.cat([*edges, random_bits(RULES["sgd"], MANY).weight])
    out = torch.zeros_like(weight, dtype=dtype)
    single_pass.sgd(weight, torch.zeros_like(weight), out=out, lr=0.0)
    assert same(out, weight.to(dtype))
    assert out.isinf().any() and out.isnan().any()


@ALL_RULES
def test_every_length_and_any_start(rule: Rule, path: str) -> None:
    """Nothing outside is touched, and a place in a tensor makes no difference (but torch's fused kernels have tails)."""
    whole = replace(training(rule, 200), out=torch.zeros(200, dtype=torch.bfloat16))
    whole.gradient = whole.gradient.bfloat16()
    done = whole.copy()
    rule.run(done)
    for numel in range(71):
        for start in (0, 1, 3) if numel else (0,):
            inner = slice(start, start + numel)
            part = whole.copy()
            assert part.out is not None
            view = Work(
                part.weight[inner], part.gradient[inner], tuple(state[inner] for state in part.states), part.out[inner]
            )
            rule.run(view)
            for result, all_done, untouched in zip(part.results(), done.results(), whole.results(), strict=True):
                assert torch.equal(result[:start], untouched[:start])
                assert torch.equal(result[start + numel :], untouched[start + numel :])
                if path == "torch":
                    torch.testing.assert_close(
                        result[inner], all_done[inner], rtol=1e-2 if result is part.out else 1e-6, atol=1e-9
                    )
                else:
                    assert same(result[inner], all_done[inner])


@ALL_RULES
def test_threads_make_no_difference(rule: Rule) -> None:
    threads = torch.get_num_threads()
    for numel in (300_001, 32_769, 49_153):  # the last two: whole blocks for each thread, and one element more
        start, done = training(rule, numel), []
        try:
            for count in (1, 2, 3, 8):
                torch.set_num_threads(count)
                done.append(start.copy())
                rule.run(done[-1])
        finally:
            torch.set_num_threads(threads)
        for work in done[1:]:
            assert all(same(one, other) for one, other in zip(done[0].results(), work.results(), strict=True))


@ALL_RULES
def test_torch_gives_the_same_numbers(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    start = replace(training(rule, MANY), coefficient=0.7)
    start.gradient = start.gradient.bfloat16()
    here, there = start.copy(), start.copy()
    rule.run(here)
    use("torch", monkeypatch)
    rule.run(there)
    for one, other in zip(here.results(), there.results(), strict=True):
        # Where terms cancel, roundings of single terms remain: torch's, and Lion's direction is a matter of rounding there.
        wrong = (one - other).abs() > 1e-6 * other.abs() + 1e-8
        assert wrong.sum() <= 5


def test_what_is_refused() -> None:
    good = torch.zeros(4)
    for error, words, changed in (
        (TypeError, "weight is torch.float64", {"weight": good.double()}),
        (TypeError, "gradient is torch.int32", {"gradient": good.int()}),
        (TypeError, "state is torch.float16", {"momentum_buffer": good.half()}),
        (TypeError, "torch.sparse_coo", {"gradient": good.to_sparse()}),
        (TypeError, "out is torch.float64", {"out": good.double()}),
        (ValueError, "with 4 elements", {"gradient": torch.zeros(5)}),
        (ValueError, "1-D and contiguous", {"gradient": torch.zeros(8)[::2]}),
        (ValueError, "1-D and contiguous", {"weight": torch.zeros(2, 2)}),
        (ValueError, "on meta", {"out": torch.zeros(4, device="meta")}),
    ):
        with pytest.raises(error, match=words):
            single_pass.sgd(**{"weight": good, "gradient": good, "lr": 0.1, **changed})


def test_autograd_notices_an_update(path: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    product = (weight * weight).sum()
    single_pass.sgd(weight, torch.ones(3), lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# -- optimizers --------------------------------------------------------------------------------------------------------

Pair = tuple[type[SinglePassOptimizer], type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]
PAIRS: dict[str, Pair] = {
    "AdamW": (Adam, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, {}),
    "Adam": (
        Adam,
        torch.optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.4, 0.9)},
        {"decoupled_weight_decay": False},
    ),
    "Adagrad": (Adagrad, torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.5}, {}),
    "Adagrad, decay": (Adagrad, torch.optim.Adagrad, {"weight_decay": 0.1}, {}),
    "SGD": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, {}),
    "SGD, momentum": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, {}),
    "SGD, nesterov": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}),
}
ALL_PAIRS = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
SHAPES = ((13, 11), (7,), ())


def params(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def assert_close(one: list[Tensor], other: list[Tensor]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@ALL_PAIRS
def test_steps_are_those_of_torch(pair: Pair, path: str) -> None:
    mine, theirs, common, own = pair
    one, other = params(), params()
    train(mine(one, **common, **own), 8)
    train(theirs(other, **common), 8)
    assert_close(one, other)


@ALL_PAIRS
def test_checkpoints_cross_over(pair: Pair) -> None:
    """After a few steps each goes on from the other's state, which has the same names, shapes and dtypes."""
    mine, theirs, common, own = pair
    one, other = params(), params()
    first, second = mine(one, **common, **own), theirs(other, **common)
    train(first, 3)
    train(second, 3)
    kinds = [
        {key: (value.dtype, value.shape) for key, value in entry.items() if value is not None}
        for optimizer in (first, second)
        for entry in optimizer.state.values()
    ]
    assert kinds[: len(one)] == kinds[len(one) :]
    third, fourth = mine(other, **common, **own), theirs(one, **common)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    fourth.load_state_dict(copy.deepcopy(first.state_dict()))
    train(third, 3, seed=6)
    train(fourth, 3, seed=6)
    assert_close(one, other)


def test_lion_is_the_paper_s(path: str) -> None:
    one, other = params(), params()
    how = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    train(Lion(one, **how), 5)
    train(reference.Lion(other, **how), 5)
    assert_close(one, other)


def test_other_gradients_and_outputs(path: str) -> None:
    """A step with a mapping and a coefficient is one with the scaled gradient, and leaves gradients alone."""
    param, twin = torch.ones(3, 5, requires_grad=True), torch.ones(3, 5, requires_grad=True)
    gradient, out = torch.randn(15).bfloat16(), torch.zeros(15, dtype=torch.float16)
    kept = gradient.clone()
    optimizer, plain = Adam([param], lr=0.1), Adam([twin], lr=0.1)
    optimizer.gradients[param], optimizer.outputs[param], optimizer.coefficient = gradient, out, 0.25
    twin.grad = gradient.float().view(3, 5) * 0.25
    optimizer.step()
    plain.step()
    assert torch.equal(param, twin) and torch.equal(out, param.detach().half().view(-1))
    assert torch.equal(gradient, kept) and optimizer.coefficient == 1.0


def test_unit_by_unit_is_one_step(path: str) -> None:
    """Whenever an update runs, it is with the settings that were taken for it."""
    one, other = params(), params()
    first, second = Adam(one, lr=0.1), Adam(other, lr=0.1)
    first.coefficient = 0.5
    for param, twin in zip(one, other, strict=True):
        param.grad = torch.full_like(param, 0.3)
        twin.grad = torch.full_like(twin, 0.3)
    first.step()
    taken = second.prepare(other)
    second.param_groups[0]["lr"] = 7.0
    for twin, settings in reversed(list(zip(other, taken, strict=True))):
        assert twin.grad is not None
        second.update(twin, twin.grad, None, settings, 0.5)
    assert all(map(torch.equal, one, other))
    with pytest.raises(ValueError, match=r"not a parameter .*\(2,\)"):
        second.prepare([torch.zeros(2)])


def test_parameters_without_a_gradient_stay() -> None:
    one, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = Adam([one, other])
    one.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(one, other) and list(optimizer.state) == [one]


def test_copies_and_schedules() -> None:
    optimizer = SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.coefficient = 0.5
    twin = copy.deepcopy(optimizer)
    train(twin, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.coefficient == 0.5
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_bad_settings() -> None:
    tensor = torch.ones(2, requires_grad=True)
    for build in (
        lambda: Adam([tensor], lr=-1.0),
        lambda: Adam([tensor], betas=(0.9, 1.0)),
        lambda: Adagrad([tensor], eps=-1.0),
        lambda: Lion([tensor], weight_decay=float("nan")),
        lambda: SGD([tensor], nesterov=True),
    ):
        with pytest.raises(ValueError):
            build()
    optimizer = Adam([tensor])
    optimizer.param_groups[0]["amsgrad"] = True
    tensor.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"amsgrad .* torch\.optim\.Adam\."):
        optimizer.step()
    optimizer = Adam8bit([tensor])
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match=r"maximize .* Adam8bit does not have\. Remedy: unset it there\."):
        optimizer.step()  # torch has no class of this name
