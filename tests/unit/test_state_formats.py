"""States in few bits: maps and codes beside bitsandbytes', the same bits on every path, and training beside its Adam."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from updates import use

from zerorun.checkpoint.cuts import places
from zerorun.checkpoint.quantised_states import keeps_blocks, scale_shape, scale_shard
from zerorun.distributed.tensor_shard import TensorShard
from zerorun.ops import native, single_pass
from zerorun.ops.single_pass import Adam, Adam8bit
from zerorun.ops.state_format import BLOCK, Blocks, StateFormat, codes_map, wide_state

bnb = pytest.importorskip("bitsandbytes")

MANY = 100_001
SIGNS = pytest.mark.parametrize("signed", [True, False])


def blocks(numel: int, signed: bool) -> Blocks:
    return Blocks(torch.zeros(numel, dtype=torch.uint8), torch.zeros(-(-numel // BLOCK)), signed)


def numbers(numel: int, signed: bool) -> Tensor:
    """Of all magnitudes; in some blocks only the largest matters, and some are all zero."""
    generator = torch.Generator().manual_seed(4)
    found = torch.randn(numel, generator=generator) * torch.logspace(-12, 2, numel)
    found[BLOCK : 3 * BLOCK] = 0
    found[5 * BLOCK] = -1e-40
    return found if signed else found.abs()


def kept(values: Tensor, signed: bool) -> Blocks:
    found = blocks(values.numel(), signed)
    found.keep(values)
    return found


def quantised_by_bnb(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, largest magnitudes)"""
    made: tuple[Tensor, Tensor] = torch.ops.bitsandbytes.quantize_blockwise(
        values, bnb.functional.create_dynamic_map(signed), BLOCK
    )
    return made


@SIGNS
def test_the_maps_are_those_of_bitsandbytes(signed: bool) -> None:
    """To a unit of fp32's epsilon: theirs come from torch.linspace, whose last bits depend on the instruction set."""
    theirs = bnb.functional.create_dynamic_map(signed)
    torch.testing.assert_close(codes_map(signed), theirs, rtol=2**-22, atol=0)
    assert codes_map(signed).unique().numel() == 256


@SIGNS
def test_codes_are_the_nearest_numbers(signed: bool) -> None:
    """All of them; those of bitsandbytes, too, where it compares with every number, as it does for fp64."""
    values = numbers(MANY, signed)
    found = kept(values, signed)
    divisor = torch.where(found.scale > 0, found.scale, 1.0).repeat_interleave(BLOCK)[:MANY]
    quotient = (values / divisor).double()
    distance = (quotient[:, None] - codes_map(signed).double()).abs()
    best, ours = distance.amin(1), distance.gather(1, found.codes.long()[:, None])[:, 0]
    assert torch.equal(best, ours)
    theirs, absmax = torch.ops.bitsandbytes.quantize_blockwise(
        values.double(), bnb.functional.create_dynamic_map(signed), BLOCK
    )
    assert torch.equal(absmax, found.scale)
    filled = found.scale.repeat_interleave(BLOCK)[:MANY] > 1e-37
    assert torch.equal(theirs[filled], found.codes[filled])


@SIGNS
def test_codes_beside_bitsandbytes_on_cpus(signed: bool) -> None:
    """Its table has steps of 2^-15: nearer to the middle of two numbers, and below all of them, it may take another."""
    values = numbers(MANY, signed)
    found = kept(values, signed)
    theirs, absmax = quantised_by_bnb(values, signed)
    assert torch.equal(absmax, found.scale)
    other = Blocks(theirs, absmax, signed).wide()
    step = absmax.repeat_interleave(BLOCK)[:MANY] * 2**-15
    assert ((found.wide() - values).abs() <= (other - values).abs() + 1e-6 * step).all()
    assert ((other - values).abs() <= (found.wide() - values).abs() + step).all()


@SIGNS
def test_the_error_of_a_round_trip(signed: bool) -> None:
    """About 1.3 % of numbers like those in training."""
    values = torch.randn(MANY, generator=torch.Generator().manual_seed(1))
    values = values if signed else values.square()
    error = kept(values, signed).wide() - values
    assert 0.002 < float(error.square().mean().sqrt() / values.square().mean().sqrt()) < 0.014


def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for isa in native.library().isas if native.library() else ():
        with monkeypatch.context() as patch:
            use(isa, patch)
            yield isa


def trained(numel: int, format: StateFormat, gradients: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    optimizer = Adam([weight], lr=1e-3, weight_decay=0.1)
    optimizer.formats[weight] = format
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    states = optimizer.state[weight]
    return [weight, *(states[f"{key}{part.key}"] for key in ("exp_avg", "exp_avg_sq") for part in format.parts)]


def same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("format", [StateFormat.BLOCK8, StateFormat.BF16])
def test_paths_give_the_same_bits(format: StateFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instruction set, any number of threads, any length."""
    threads = torch.get_num_threads()
    for numel in (1, 255, 256, 1025, MANY):
        gradients = [numbers(numel, True).roll(step) if numel == MANY else torch.randn(numel) for step in range(3)]
        gradients[2] = gradients[2].clone()
        gradients[2][numel // 2] = float("inf")
        found = []
        for _ in paths(monkeypatch):
            for count in (1, 3):
                torch.set_num_threads(count)
                found.append(trained(numel, format, gradients))
        torch.set_num_threads(threads)
        for other in found[1:]:
            assert all(map(same, found[0], other))


@pytest.mark.parametrize("signed", [True, False])
def test_states_are_rounded_the_same_on_every_path(signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a native library, codes and scales of given values are the same ones."""
    values = numbers(MANY, signed)
    values[7 * BLOCK] = float("nan")
    values[9 * BLOCK] = float("inf")
    name, beta = ("exp_avg", 0.0) if signed else ("exp_avg_sq", 0.0)
    wanted = kept(values if signed else values.square(), signed)
    for _ in paths(monkeypatch):
        states = {"exp_avg": blocks(MANY, True), "exp_avg_sq": blocks(MANY, False)}
        single_pass.adam(torch.zeros(MANY), values, **states, step=1, lr=1e-3, betas=(beta, 0.0))
        assert torch.equal(states[name].codes, wanted.codes)
        assert same(states[name].scale, wanted.scale)
    assert wanted.wide()[7 * BLOCK : 8 * BLOCK].isnan().all() and wanted.wide()[9 * BLOCK : 10 * BLOCK].isnan().all()


@SIGNS
def test_every_number_and_threshold_on_every_path(signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All codes are widened; numbers near each threshold and each power of 2 are rounded, in blocks of several scales."""
    magnitudes = codes_map(signed)[127 if signed else 0 :].double()
    near = ((magnitudes[1:] + magnitudes[:-1]) / 2).float().view(torch.int32)[:, None] + torch.arange(-30, 31)
    upper = torch.arange(0x3200, 0x3F80)[:, None] * 2**16 + torch.arange(-1, 2)
    found = torch.cat([near.view(-1), upper.view(-1)]).int().view(torch.float32).clamp(0, 1)
    rows = torch.nn.functional.pad(found, (0, -found.numel() % (BLOCK - 1))).view(-1, BLOCK - 1)
    rows = torch.cat([torch.nn.functional.pad(rows, (0, 1), value=1.0) * scale for scale in (1.0, 0.7, 3e-20, 1e-34)])
    rows[::3] *= -1
    values, every = rows.view(-1), torch.arange(256).byte().repeat(3)
    wanted, scales = kept(values, signed), torch.tensor([1.0, 0.3, 1e-30])
    for _ in paths(monkeypatch):
        state, weight, none = blocks(values.numel(), signed), torch.zeros(3 * BLOCK), torch.zeros(3 * BLOCK)
        single_pass.sgd(torch.zeros_like(values), values, state, lr=1.0, momentum=0.5)
        assert torch.equal(state.codes, wanted.codes) and torch.equal(state.scale, wanted.scale)
        single_pass.sgd(weight, none, Blocks(every.clone(), scales.clone(), signed), lr=-1.0, momentum=1.0)
        assert torch.equal(weight, Blocks(every, scales, signed).wide())


def test_torch_comes_to_the_same_training(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.randn(MANY, generator=torch.Generator().manual_seed(step)) for step in range(5)]
    native_ones = trained(MANY, StateFormat.BLOCK8, gradients)
    use("torch", monkeypatch)
    by_torch = trained(MANY, StateFormat.BLOCK8, gradients)
    assert float((native_ones[0] - by_torch[0]).abs().max()) < 1e-4
    for one, other in zip(native_ones[1:], by_torch[1:], strict=True):
        if one.dtype == torch.uint8:
            assert int((one != other).sum()) <= 10
        else:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


def test_a_step_that_is_not_finite_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("native", "torch"):
        if way == "torch":
            use("torch", monkeypatch)
        weight, states = torch.ones(3000), [kept(torch.randn(3000), True), kept(torch.rand(3000), False)]
        before = copy.deepcopy([weight, *(part for state in states for part in (state.codes, state.scale))])
        single_pass.adam(weight, torch.ones(3000), *states, step=2, lr=1e-3, coefficient=torch.tensor(float("nan")))
        after = [weight, *(part for state in states for part in (state.codes, state.scale))]
        assert all(map(torch.equal, before, after))


def test_what_does_not_fit_is_refused() -> None:
    weight, gradient = torch.zeros(300), torch.zeros(300)
    good, wide = blocks(300, True), torch.zeros(300)
    with pytest.raises(ValueError, match="the scale has shape"):
        single_pass.adam(weight, gradient, Blocks(good.codes, torch.zeros(1), True), wide, step=1, lr=0.1)
    with pytest.raises(TypeError, match="the state is torch"):
        single_pass.adam(weight, gradient, Blocks(good.codes.to(torch.int8), good.scale, True), wide, step=1, lr=0.1)


# -- the optimizer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_training_beside_bitsandbytes(decay: float) -> None:
    """20 steps. Codes differ where the last bit decides between two; and where its table on CPUs is coarse."""
    numel = 5000
    start = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    one, other = start.clone().requires_grad_(), start.clone().requires_grad_()
    ours, theirs = Adam8bit([one], lr=1e-2, weight_decay=decay), bnb.optim.AdamW8bit([other], lr=1e-2, weight_decay=decay)
    for step in range(20):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(100 + step)) * 0.01
        one.grad, other.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    moved = (one - start).abs().mean()
    assert float((one - other).abs().mean() / moved) < 0.01
    mine, his = ours.state[one], theirs.state[other]
    assert mine["exp_avg"].dtype == his["state1"].dtype == torch.uint8
    torch.testing.assert_close(mine["exp_avg.scale"], his["absmax1"], rtol=0.02, atol=0)
    assert float((mine["exp_avg"] != his["state1"]).float().mean()) < 0.1
    wide = Blocks(his["state1"], his["absmax1"], True).wide()
    assert float((wide_state(mine, "exp_avg") - wide).norm() / wide.norm()) < 0.01


def test_8_bits_train_like_32() -> None:
    """Least squares, 300 steps: the loss is as low."""
    generator = torch.Generator().manual_seed(0)
    inputs, wanted = torch.randn(256, 64, generator=generator), torch.randn(256, 96, generator=generator)
    losses = []
    for kind in (Adam, Adam8bit):
        weight = torch.zeros(64, 96, requires_grad=True)
        optimizer = kind([weight], lr=3e-3)
        for _ in range(300):
            optimizer.zero_grad()
            loss = (inputs @ weight - wanted).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_small_parameters_have_fp32_states_bnb_2080() -> None:
    params = [torch.zeros(4095, requires_grad=True), torch.zeros(64, 64, requires_grad=True)]
    optimizer = Adam8bit(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    small, large = (optimizer.state[param] for param in params)
    assert small.keys() == {"exp_avg", "exp_avg_sq", "step"} and small["exp_avg"].dtype == torch.float32
    assert large["exp_avg"].shape == (64, 64) and large["exp_avg"].dtype == torch.uint8
    assert large["exp_avg_sq.scale"].shape == (16,)
    assert optimizer.default_format(4096) is StateFormat.BLOCK8
    assert optimizer.default_format(10**6, is_embedding=True) is StateFormat.FP32
    assert sum(v.nbytes for v in large.values() if v.dim()) == 2 * StateFormat.BLOCK8.nbytes(4096) == 2 * 4096 * 65 // 64


@pytest.mark.parametrize("format", [StateFormat.BLOCK8, StateFormat.BF16])
def test_state_dicts_bnb_1732(format: StateFormat) -> None:
    """torch casts what it loads to the parameter's dtype; codes stay bytes."""
    made: list[tuple[Tensor, Any]] = []
    for _ in range(2):
        param = torch.ones(5000, requires_grad=True)
        optimizer = Adam([param], lr=0.1)
        optimizer.formats[param] = format
        made.append((param, optimizer))
    (one, first), (other, second) = made
    for step in range(4):
        for param, optimizer in made if step > 1 else made[:1]:
            param.grad = torch.randn(5000, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        if step == 1:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            with torch.no_grad():
                other.copy_(one)
    assert torch.equal(one, other)
    for key, value in first.state[one].items():
        assert value.dtype == second.state[other][key].dtype and torch.equal(value, second.state[other][key])


def test_a_step_in_8_bits_is_taken_back() -> None:
    param = torch.ones(5000, requires_grad=True)
    optimizer = Adam8bit([param])
    param.grad = torch.ones(5000)
    optimizer.coefficient = torch.tensor(float("nan"))
    optimizer.step()
    optimizer.take_back()
    assert not optimizer.state and torch.equal(param, torch.ones(5000))


# -- as checkpoints store them -----------------------------------------------------------------------------------------

SHARDS = [
    TensorShard(shape, dim, ranges)
    for shape in ((6, 512), (6, 96), (1024,), (4, 3, 256), (4, 256, 3), (2, 768))
    for dim in range(len(shape))
    for ranges in (((0, shape[dim] // 2),), ((shape[dim] // 2, shape[dim]),), ((0, 1), (shape[dim] - 1, shape[dim])))
]


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_blocks_of_a_tensor_rank(shard: TensorShard) -> None:
    """They are stored as such only if they are blocks of the whole, and their scales are then where those blocks' are."""
    numel = math.prod(shard.local_shape)
    found, beside = places(shard, 0, numel), scale_shard(shard)
    whole = torch.arange(math.prod(shard.shape)).view(shard.shape)
    assert torch.equal(found, shard.cut(whole).view(-1))
    blocks_there = [set(block.tolist()) for block in found.split(BLOCK)]
    are_blocks = all(len(block) == BLOCK and min(block) % BLOCK == 0 == (max(block) + 1) % BLOCK for block in blocks_there)
    assert keeps_blocks(shard) == (beside is not None)
    if beside is None:
        assert not are_blocks or shard.shape[-1] % BLOCK
        return
    assert are_blocks and beside.shape == scale_shape(shard.shape)
    numbers_there = torch.tensor([min(block) // BLOCK for block in blocks_there])
    assert torch.equal(places(beside, 0, len(blocks_there)), numbers_there)
