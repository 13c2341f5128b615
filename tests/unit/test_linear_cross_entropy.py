"""zerorun.ops.linear_cross_entropy gives what F.cross_entropy of F.linear gives, and never holds all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zerorun
from zerorun.ops import linear_cross_entropy, token_loss

TOKENS, WIDTH, CLASSES = 37, 24, 101


@pytest.fixture(params=["torch's own", "own"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways that the loss can be computed, where this torch has both."""
    if request.param == "own":
        monkeypatch.setattr(token_loss, "_torch_has_it", False)
    elif not token_loss._torch_has_it:
        pytest.skip("torch before 2.13 has no such operation")


def make(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (TOKENS,)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, weight, bias, target): every fifth target is ignored."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).requires_grad_()

    target = torch.randint(CLASSES, shape, generator=generator)
    target.view(-1)[::5] = -100
    return normal(*shape, WIDTH), normal(CLASSES, WIDTH), normal(CLASSES), target


def reference(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    options.pop("chunk", None)
    logits = F.linear(hidden, weight, bias).flatten(0, -2).float()
    loss = F.cross_entropy(logits, target.flatten(), **options)
    return loss if loss.dim() == 0 else loss.view(target.shape)


def gradients(loss_of: Callable[..., Tensor], tensors: list[Tensor], *args: Any, **options: Any) -> list[Tensor | None]:
    """[loss, gradients of ``tensors``]; a loss for every token is weighted by its position."""
    loss = loss_of(*args, **options)
    upstream = torch.linspace(0.5, 2, loss.numel()).view(loss.shape)
    found = torch.autograd.grad((loss * upstream).sum(), tensors, allow_unused=True)
    return [loss.detach(), *found]


def assert_same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    """Within fp32 rounding of the largest element: small ones are differences of large ones."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is not None
        assert theirs is not None
        largest = float(theirs.nan_to_num().abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=2e-6 * largest)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("chunk", (1, 8, TOKENS, 1000, None))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("with_bias", (False, True))
def test_equals_linear_then_cross_entropy(reduction: str, chunk: int | None, with_bias: bool) -> None:
    hidden, weight, bias, target = make()
    given, tensors = (bias, [hidden, weight, bias]) if with_bias else (None, [hidden, weight])
    args = (hidden, weight, target, given)
    wanted = gradients(reference, tensors, *args, reduction=reduction)
    assert_same(gradients(linear_cross_entropy, tensors, *args, reduction=reduction, chunk=chunk), wanted)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("ignored", (-100, 0, 3))
def test_tokens_in_several_dimensions_and_what_is_ignored(ignored: int) -> None:
    hidden, weight, _, target = make(shape=(3, 2, 5))
    target = target.clamp(min=0)
    args, tensors = (hidden, weight, target), [hidden, weight]
    for reduction in ("mean", "none"):
        wanted = gradients(reference, tensors, *args, ignore_index=ignored, reduction=reduction)
        options = {"ignore_index": ignored, "reduction": reduction, "chunk": 4}
        assert_same(gradients(linear_cross_entropy, tensors, *args, **options), wanted)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_low_precision_is_summed_in_fp32(dtype: torch.dtype) -> None:
    """The loss is that of the rounded logits to fp32 precision, and gradients are rounded once."""
    hidden, weight, bias, target = make(dtype)
    tensors = [hidden, weight, bias]
    loss, *found = gradients(linear_cross_entropy, tensors, hidden, weight, target, bias, reduction="sum", chunk=1)
    assert loss is not None
    assert loss.dtype == torch.float32
    assert_same([loss], [reference(hidden, weight, target, bias, reduction="sum").detach()])
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    exact = gradients(reference, wide, wide[0], wide[1], target, wide[2], reduction="sum")[1:]
    for ours, theirs in zip(found, exact, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == dtype
        # logits are rounded to dtype before the softmax: as in F.cross_entropy(F.linear(...).float(), ...)
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 4 * torch.finfo(dtype).eps


def test_autocast_casts_the_layer_alone() -> None:
    hidden, weight, bias, target = make()
    cast = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight, bias)]
    wanted = gradients(linear_cross_entropy, cast, cast[0], cast[1], target, cast[2])
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(linear_cross_entropy, [hidden, weight, bias], hidden, weight, target, bias)
    assert_same(found, [tensor.float() for tensor in wanted if tensor is not None])


def test_a_thousand_small_gradients_are_not_lost_in_bf16() -> None:
    """Every token adds the same to weight; summed in bf16, the sum would stop growing at 256 times the first."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, target, reduction="sum", chunk=1).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [-2048.0, 2048.0]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_empty_and_all_ignored(reduction: str) -> None:
    hidden, weight, _, target = make()
    nothing = torch.full_like(target, -100)
    for rows, ids in ((hidden, nothing), (hidden[:0], target[:0])):
        args, tensors = (rows, weight, ids), [hidden, weight]
        wanted = gradients(reference, tensors, *args, reduction=reduction)
        assert_same(gradients(linear_cross_entropy, tensors, *args, reduction=reduction, chunk=8), wanted)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_frozen_no_grad_and_twice(reduction: str) -> None:
    hidden, weight, _, target = make()
    for tensors, args in (
        ([hidden], (hidden, weight.detach(), target)),
        ([weight], (hidden.detach(), weight, target)),
    ):
        wanted = gradients(reference, tensors, *args, reduction=reduction)
        assert_same(gradients(linear_cross_entropy, tensors, *args, reduction=reduction, chunk=8), wanted)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk=8)
    assert not loss.requires_grad
    assert_same([loss], [reference(hidden, weight, target, reduction=reduction).detach()])
    once = torch.autograd.grad(reference(hidden, weight, target), weight)[0]
    shared = linear_cross_entropy(hidden, weight, target, chunk=8)
    first = torch.autograd.grad(shared + linear_cross_entropy(hidden, weight, target), weight, retain_graph=True)[0]
    assert_same([first], [2 * once])
    assert_same([torch.autograd.grad(shared, weight)[0]], [once])


@pytest.mark.usefixtures("either")
def test_gradients_of_gradients_are_refused() -> None:
    hidden, weight, _, target = make()
    with pytest.raises(RuntimeError):
        (slope,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), weight, create_graph=True)
        slope.sum().backward()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made inside."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.dtype.itemsize)
        return out


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_logits_never_exist_whole(dtype: torch.dtype, reduction: str) -> None:
    hidden, weight = torch.randn(64, 4).to(dtype).requires_grad_(), torch.randn(1000, 4).to(dtype).requires_grad_()
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, torch.arange(64), reduction=reduction, chunk=8).sum().backward()
    assert largest.numel <= 8 * 1000


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden": torch.zeros(5, 3)}, "last dimension"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, "target"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"reduction": "average"}, "reduction"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], what: str) -> None:
    given = {"hidden": torch.zeros(5, 2), "weight": torch.zeros(7, 2), "target": torch.zeros(5, dtype=torch.int64)}
    with pytest.raises(ValueError, match=what):
        linear_cross_entropy(**{**given, **change})


@pytest.mark.usefixtures("either")
def test_a_target_out_of_range_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, 5, 1]))


def test_is_public() -> None:
    assert zerorun.ops.linear_cross_entropy is linear_cross_entropy
