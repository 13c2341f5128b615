"""Single-pass updates to test: the rules, what float64 makes of them, and tensors of numbers that are common and uncommon.

Errors are measured in units of fp32's epsilon, relative to the sum of the sizes of the terms that are added: where terms
cancel, no fp32 arithmetic does better. Each output is checked given those before it: the weight, given the stored states.
Every fp32 operation rounds by up to half a unit, and every fp32 constant, too. Adam's and Adagrad's weight has four of them
in a row (root, sum, quotient or inverse, result; the rest is in double), so UNITS bounds it. torch's have more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from zerorun.ops import native, single_pass
from zerorun.ops.rounding import NEAREST, Rounding

EPSILON = 2.0**-23
TINIEST = 2.0**-149
HUGE = 2.0**120  # terms beyond it are near enough to fp32's end that one on the way may be infinite
UNITS, TORCH_UNITS = 2.0, 4.0  # the largest errors of our kernels, and of torch's
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Work:
    """The tensors of one update: ``states`` as many as the rule has."""

    weight: Tensor
    gradient: Tensor
    states: tuple[Tensor, ...]
    out: Tensor | None = None
    coefficient: float | Tensor = 1.0
    rounding: Rounding = NEAREST

    def copy(self) -> Work:
        out, rest = (None if tensor is None else tensor.clone() for tensor in (self.out, self.rounding.rest))
        states, rounding = tuple(s.clone() for s in self.states), replace(self.rounding, rest=rest)
        return replace(self, weight=self.weight.clone(), states=states, out=out, rounding=rounding)

    def results(self) -> list[Tensor]:
        beside = [tensor for tensor in (self.out, self.rounding.rest) if tensor is not None]
        return [self.weight, *self.states, *beside]


Expected = tuple[Tensor, Tensor]  # a value, and the size of its terms; float64
# (weight, gradient times coefficient, states, new states, hyperparameters), all float64 -> states, then the weight
Reference = Callable[[Tensor, Tensor, list[Tensor], list[Tensor], dict[str, Any]], Iterator[Expected]]


def beyond(term: Tensor) -> Tensor:
    """As a size: more than HUGE where ``term`` is."""
    return torch.where(term.abs().isfinite() & (term.abs() > HUGE), 2 * HUGE, 0.0)


def adam_reference(w: Tensor, g: Tensor, old: list[Tensor], new: list[Tensor], k: dict[str, Any]) -> Iterator[Expected]:
    (m, v), (beta1, beta2), t, decay = old, k["betas"], k["step"], k["weight_decay"]
    decoupled = k["decoupled"]
    size = g.abs() if decoupled else g.abs() + decay * w.abs()
    g = g if decoupled else g + decay * w
    yield torch.lerp(m, g, 1 - beta1), m.abs() + size
    yield beta2 * v + (1 - beta2) * g * g, beta2 * v.abs() + (1 - beta2) * size**2
    corrections = ((1 - beta1**t), (1 - beta2**t)) if k.get("bias_correction", True) else (1.0, 1.0)
    root = corrections[1] ** 0.5
    quotient = new[0] / (new[1].sqrt() + k["eps"] * root)
    step = k["lr"] / corrections[0] * root * quotient
    kept = w * (1 - k["lr"] * decay) if decoupled else w
    yield kept - step, kept.abs() + step.abs() + beyond(quotient)


def adagrad_reference(w: Tensor, g: Tensor, old: list[Tensor], new: list[Tensor], k: dict[str, Any]) -> Iterator[Expected]:
    size, g = g.abs() + k["weight_decay"] * w.abs(), g + k["weight_decay"] * w if k["weight_decay"] else g
    yield old[0] + g * g, old[0].abs() + size**2
    rate = k["lr"] / (1 + (k["step"] - 1) * k["lr_decay"])
    denominator = new[0].sqrt() + k["eps"]
    yield w - rate * g / denominator, w.abs() + rate * size / denominator


def lion_reference(w: Tensor, g: Tensor, old: list[Tensor], new: list[Tensor], k: dict[str, Any]) -> Iterator[Expected]:
    beta1, beta2 = k["betas"]
    yield beta2 * old[0] + (1 - beta2) * g, old[0].abs() + g.abs()
    direction = beta1 * old[0] + (1 - beta1) * g
    unsure = direction.abs() < 4 * EPSILON * (old[0].abs() + g.abs()) + TINIEST  # its sign is a matter of rounding
    kept = w * (1 - k["lr"] * k["weight_decay"])
    yield kept - k["lr"] * direction.sign(), kept.abs() + k["lr"] + unsure * 2 / EPSILON


def sgd_reference(w: Tensor, g: Tensor, old: list[Tensor], new: list[Tensor], k: dict[str, Any]) -> Iterator[Expected]:
    size, g = g.abs() + k["weight_decay"] * w.abs(), g + k["weight_decay"] * w if k["weight_decay"] else g
    direction = g
    if old:
        blend = 1 - k["dampening"]
        yield k["momentum"] * old[0] + blend * g, old[0].abs() + size
        direction, size = new[0], new[0].abs()
        if k["nesterov"]:
            direction, size = g + k["momentum"] * new[0], g.abs() + k["weight_decay"] * w.abs() + new[0].abs()
    yield w - k["lr"] * direction, w.abs() + k["lr"] * size


def adam_sage_reference(
    w: Tensor, g: Tensor, old: list[Tensor], new: list[Tensor], k: dict[str, Any]
) -> Iterator[Expected]:
    (m, v, average), (beta1, beta2), beta3, t = old, k["betas"], k["beta3"], k["step"]
    yield torch.lerp(m, g, 1 - beta1), m.abs() + g.abs()
    yield beta2 * v + (1 - beta2) * g * g, beta2 * v.abs() + (1 - beta2) * g**2
    sensitivity = (w * g).abs()
    # The average is used before it is rounded for its state.
    following = beta3 * average + (1 - beta3) * sensitivity
    yield following, following.abs()
    unbiased = following / (1 - beta3**t)
    ratio = (sensitivity - unbiased).abs() / (unbiased + k["eps"] ** 2)
    terms = (sensitivity + unbiased).abs() / (unbiased + k["eps"] ** 2)
    root = (1 - beta2**t) ** 0.5
    quotient = new[0] / (new[1].sqrt() + k["eps"] * root)
    step = k["lr"] / (1 - beta1**t) * root * quotient
    kept = w * (1 - k["lr"] * k["weight_decay"])
    yield kept - step * ratio, kept.abs() + (step * ratio).abs() + 1e-7 * (step * terms).abs() + beyond(quotient)


def sophia_reference(w: Tensor, g: Tensor, old: list[Tensor], new: list[Tensor], k: dict[str, Any]) -> Iterator[Expected]:
    (m, h), beta1 = old, k["betas"][0]
    yield torch.lerp(m, g, 1 - beta1), m.abs() + g.abs()
    yield h, torch.zeros_like(h)  # as it was
    ratio = (new[0] / (k["rho"] * k["bs"] * h + k["eps"])).clamp(-1, 1)
    kept = w * (1 - k["lr"] * k["weight_decay"])
    yield kept - k["lr"] * ratio, kept.abs() + k["lr"] * ratio.abs()


@dataclass(frozen=True)
class Rule:
    function: Callable[..., None]
    reference: Reference
    states: int
    hyper: dict[str, Any]

    def run(self, work: Work) -> None:
        how = {**self.hyper, "coefficient": work.coefficient, "rounding": work.rounding}
        self.function(work.weight, work.gradient, *work.states, out=work.out, **how)


ADAMW = {"step": 7, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
SAGE = {"step": 7, "lr": 1e-3, "betas": (0.9, 0.999), "beta3": 0.75, "eps": 1e-6, "weight_decay": 0.1}
SOPHIA = {"lr": 1e-4, "betas": (0.4, 0.99), "rho": 0.04, "bs": 1024, "eps": 1e-15, "weight_decay": 0.1}
PLAIN_SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False}
MOMENTUM = {**PLAIN_SGD, "momentum": 0.9, "dampening": 0.1}
RULES = {
    "adamw": Rule(single_pass.adam, adam_reference, 2, ADAMW),
    "adam": Rule(single_pass.adam, adam_reference, 2, {**ADAMW, "decoupled": False}),
    "adam, small betas": Rule(single_pass.adam, adam_reference, 2, {**ADAMW, "betas": (0.3, 0.4), "weight_decay": 0.0}),
    "adam, no betas": Rule(single_pass.adam, adam_reference, 2, {**ADAMW, "betas": (0.0, 0.0)}),
    # Its steps are longer by a factor of some 10.
    "adam, no bias correction": Rule(single_pass.adam, adam_reference, 2, {**ADAMW, "lr": 1e-4, "bias_correction": False}),
    "adagrad": Rule(
        single_pass.adagrad,
        adagrad_reference,
        1,
        {"step": 3, "lr": 0.01, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.01},
    ),
    "adam-sage": Rule(single_pass.adam_sage, adam_sage_reference, 3, SAGE),
    "sophia": Rule(single_pass.sophia, sophia_reference, 2, SOPHIA),
    "lion": Rule(single_pass.lion, lion_reference, 1, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "sgd": Rule(single_pass.sgd, sgd_reference, 0, PLAIN_SGD),
    "sgd, no decay": Rule(single_pass.sgd, sgd_reference, 0, {**PLAIN_SGD, "weight_decay": 0.0}),
    "sgd, momentum": Rule(single_pass.sgd, sgd_reference, 1, MOMENTUM),
    "sgd, nesterov": Rule(single_pass.sgd, sgd_reference, 1, {**MOMENTUM, "dampening": 0.0, "nesterov": True}),
}


def training(rule: Rule, numel: int, seed: int = 0) -> Work:
    """Sizes as in training: moments like gradients, and their squares."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (0.05, 0.01, 0.01, 0.01, 0.0005)
    weight, gradient, first, second, third = (torch.randn(numel, generator=generator) * size for size in sizes)
    states = (first**2,) if rule.function is single_pass.adagrad else (first, second**2, third.abs())[: rule.states]
    return Work(weight, gradient, states)


def random_bits(rule: Rule, numel: int, seed: int = 1) -> Work:
    """Every fp32 bit pattern is as likely as any other; as far as a rule goes: sums of squares are not below 0.

    ``numel`` is at least 9^4: special values come first, each with each.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32).view(torch.float32)
        for _ in range(5)
    ]
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), TINIEST, -TINIEST, 2.0**-126, 1.0])
    grid = torch.cartesian_prod(special, special, special, special)  # each with each
    for place, tensor in enumerate(tensors[:4]):
        tensor[: len(grid)] = grid[:, place]
    weight, gradient, first, second, third = tensors
    third[: len(grid)] = grid[:, 2]  # the first state has them beside it
    states = (first.abs(),) if rule.function is single_pass.adagrad else (first, second.abs(), third.abs())[: rule.states]
    return Work(weight, gradient, states)


def expect(rule: Rule, before: Work, after: Work) -> Iterator[tuple[Tensor, Expected]]:
    """(result, what it should be) of each state, then of the weight."""
    scaled = before.gradient.float() * before.coefficient  # rounded to fp32 once: that is what the update starts from
    doubles = [[state.double() for state in work.states] for work in (before, after)]
    found = rule.reference(before.weight.double(), scaled.double(), *doubles, rule.hyper)
    return zip((*after.states, after.weight), found, strict=True)


def assert_close_to_float64(rule: Rule, before: Work, after: Work, units: float, absolute: float = 0.0) -> None:
    """NaN and infinities are where float64 has them, unless a term on the way is beyond fp32; the rest is close.

    ``absolute``: an error that may be added to ``units``.
    """
    for result, (value, size) in expect(rule, before, after):
        inside = ~((size > HUGE) & size.isfinite())
        wanted = value.float()
        assert torch.equal(result.isnan() & inside, wanted.isnan() & inside)
        assert same(torch.where(inside & wanted.isinf(), result, 0.0), torch.where(inside & wanted.isinf(), wanted, 0.0))
        finite = inside & size.isfinite() & wanted.isfinite()
        error = (result.double() - value).abs() - absolute
        assert (error / (size * EPSILON + 2 * TINIEST))[finite].max() <= units


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but every NaN is like every other, and 0 like -0 only with the same sign."""
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    equal = one.view(integers) == other.view(integers)
    return bool((equal | (one.isnan() & other.isnan())).all())


def use(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let updates take ``path``; skip the test where this machine has not got it."""
    library = native.library()
    if path == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif library is None or path not in library.isas:
        pytest.skip(f"{path} cannot be used here")
    else:
        monkeypatch.setattr(library, "isa", path)
