"""Optimizers by name, their agreement with torch on 1-D pieces, Lion, and cutting an optimizer's state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from zerorun.errors import ConfigError, ModelError
from zerorun.ops import single_pass
from zerorun.ops.single_pass import Lion, SinglePassOptimizer
from zerorun.optim.adafactor import Adafactor
from zerorun.optim.optimizers import ELEMENTWISE, build_optimizer, keys_in_the_way, refuse_unusable, split_state

SHAPE = (13, 11)
LENGTHS = [17, 3, 0, 1, 100, 22]
ALIGNED = [16, 48, 0, 64, 15]  # fused CPU kernels give the same bits for cuts at multiples of 16 elements
CLASSES = sorted(ELEMENTWISE, key=lambda optimizer_class: optimizer_class.__name__)


def gradients(count: int, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def start(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def run(optimizer: torch.optim.Optimizer, grads: list[Tensor]) -> None:
    """Give consecutive slices of each flat gradient to the optimizer's tensors, and step."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for grad in grads:
        parts = grad.reshape(-1).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.grad = part.reshape(tensor.shape).clone()
        optimizer.step()


def build(name: str, params: dict[str, Any], *tensors: Tensor) -> torch.optim.Optimizer:
    return build_optimizer(name, params, [{"params": list(tensors)}])


def refused(name: str, params: dict[str, Any], *tensors: Tensor) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        build(name, params, *(tensors or (torch.zeros(4),)))
    return {problem.key: str(problem) for problem in caught.value.problems}


SAGE = {"lr": 0.01, "betas": (0.9, 0.999), "beta3": 0.75, "eps": 1e-4, "weight_decay": 0.1}
SOPHIA = {"lr": 0.01, "betas": (0.965, 0.99), "rho": 0.04, "bs": 64, "weight_decay": 0.1}
CONFIGS: list[tuple[str, dict[str, Any], type, dict[str, Any]]] = [
    ("Adam", {"weight_decay": 0.1, "torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.1}),
    ("Adam", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
    ("AdamW", {"torch_adam": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
    (
        "adamw",
        {"betas": [0.8, 0.9], "bias_correction": True},
        torch.optim.AdamW,
        {"betas": (0.8, 0.9), "weight_decay": 0.0},
    ),
    (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    ("Adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2}),
    ("RAdam", {"lr": 0.01}, torch.optim.RAdam, {"lr": 0.01}),
    ("NAdam", {"lr": 0.01}, torch.optim.NAdam, {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5}, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    ("Adamax", {}, torch.optim.Adamax, {}),
    ("Adadelta", {}, torch.optim.Adadelta, {}),
    ("Rprop", {}, torch.optim.Rprop, {}),
    ("ASGD", {}, torch.optim.ASGD, {}),
    ("Lion", {"lr": 0.01, "weight_decay": 0.1}, reference.Lion, {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.1}),
    ("AdamSAGE", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}, reference.AdamSAGE, SAGE),
    ("Sophia", {"lr": 0.01, "bs": 64}, reference.Sophia, SOPHIA),
]


ONCE: dict[type, type] = {
    reference.AdamSAGE: single_pass.AdamSAGE,
    reference.Sophia: single_pass.Sophia,
    torch.optim.Adam: single_pass.Adam,
    torch.optim.AdamW: single_pass.Adam,
    torch.optim.Adagrad: single_pass.Adagrad,
    torch.optim.SGD: single_pass.SGD,
    reference.Lion: Lion,
}


@pytest.mark.parametrize(("name", "params", "oracle", "kwargs"), CONFIGS)
def test_shards_train_like_whole_parameters(name: str, params: Any, oracle: Any, kwargs: Any) -> None:
    whole, flat = start(), start().reshape(-1)
    expected = oracle([whole], **kwargs)
    built = build(name, params, *flat.split(LENGTHS))
    assert type(built) is ONCE.get(oracle, oracle)
    run(expected, gradients(5))
    run(built, gradients(5))
    torch.testing.assert_close(flat.reshape(SHAPE), whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "params"), [(config[0], config[1]) for config in CONFIGS])
def test_results_do_not_depend_on_where_shards_are_cut(name: str, params: Any) -> None:
    once = isinstance(build(name, params, start()), SinglePassOptimizer)
    for lengths, extra in ((ALIGNED, {}), (LENGTHS, {} if once else {"foreach": True})):
        one, many = start().reshape(-1), start().reshape(-1)
        run(build(name, {**params, **extra}, one), gradients(5))
        run(build(name, {**params, **extra}, *many.split(lengths)), gradients(5))
        assert torch.equal(one, many)


def test_adafactor_builds_on_shards_and_other_names_pass_through() -> None:
    optimizer = build("Adafactor", {"lr": 0.01}, start((8,)))
    run(optimizer, gradients(2, (8,)))
    assert type(optimizer) is Adafactor
    assert type(build("Adafactor", {"foreach": True}, start((8,)))) is torch.optim.Adafactor
    assert type(build("RAdam", {"lr": 0.01}, start())) is torch.optim.RAdam


def test_adam_means_adamw() -> None:
    tensor = torch.ones(4)
    run(build("Adam", {"lr": 0.1, "weight_decay": 0.5}, tensor), [torch.zeros(4)])
    assert torch.equal(tensor, torch.ones(4) * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD", "Lion", "AdamSAGE", "Sophia"])
def test_host_tensors_are_updated_in_one_pass_unless_more_is_asked_for(name: str) -> None:
    assert isinstance(build(name, {"bs": 8} if name == "Sophia" else {}, start()), SinglePassOptimizer)
    if name in ("Lion", "AdamSAGE", "Sophia"):
        return
    for asked in ({"fused": False}, {"foreach": True}, {"maximize": True}):
        assert not isinstance(build(name, asked, start()), SinglePassOptimizer)
    assert build(name, {"maximize": True}, start()).param_groups[0].get("fused") is True


NOTHING = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
@pytest.mark.parametrize("fused", [True, None])
def test_keywords_that_ask_for_nothing_change_nothing(name: str, fused: bool | None) -> None:
    known = {key: value for key, value in NOTHING.items() if "Adam" in name or key not in ("amsgrad", "capturable")}
    group = {"params": [start()], "lr_mult": 1.0, "initial_lr": 0.1, "name": "all", **known}
    made = build_optimizer(name, {"lr": 0.1, **known, "fused": fused}, [group])
    assert isinstance(made, SinglePassOptimizer)
    kept = made.param_groups[0]
    assert (kept["lr_mult"], kept["initial_lr"], kept["name"]) == (1.0, 0.1, "all")
    plain = build(name, {"lr": 0.1}, start())
    for optimizer in (made, plain):
        run(optimizer, gradients(3))
    assert torch.equal(made.param_groups[0]["params"][0], plain.param_groups[0]["params"][0])
    assert "amsgrad" not in build(name, {**known}, start()).param_groups[0]


def test_groups_that_ask_for_more_get_it() -> None:
    group = {"params": [start()], "lr_mult": 1.0}
    for asked in ({"maximize": True}, {"amsgrad": True}, {"bias_correction": False}):
        assert type(build_optimizer("AdamW", {}, [{**group}, {**group, "params": [start()], **asked}])) is torch.optim.AdamW
        assert keys_in_the_way("AdamW", {"fused": True}, [group, asked]) == [*asked]
    assert keys_in_the_way("RAdam", {}, [group]) == []
    assert keys_in_the_way("SGD", {"momentum": 0.9, "maximize": True}, [{"foreach": True}]) == ["foreach", "maximize"]


def test_fused_kernels_are_not_used_if_refused() -> None:
    assert build("Adam", {"fused": False}, start()).param_groups[0]["fused"] is False
    assert build("RAdam", {}, start()).param_groups[0].get("fused") is None
    assert not build("Adam", {"foreach": True}, start()).param_groups[0].get("fused")


def test_groups_keep_what_they_set_and_are_not_written_to() -> None:
    groups = [{"params": (torch.zeros(2) for _ in range(2)), "lr": 0.5}, {"params": [], "weight_decay": 0.3}]
    optimizer = build_optimizer("AdamW", {"lr": 0.1, "weight_decay": 0.2}, groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.3]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0]
    assert set(groups[1]) == {"params", "weight_decay"}
    with pytest.raises(ModelError, match="requires_grad=True"):
        build_optimizer("AdamW", {}, [])


def test_bad_params_are_all_named() -> None:
    problems = refused("Adam", {"max_grad_norm": 1.0, "weight_deacy": 0.1})
    assert "gradient_clipping" in problems["optimizer.params.max_grad_norm"]
    assert "no such parameter" in refused("Adam", {"bias_correction": False, "amsgrad": True})["optimizer.params.amsgrad"]
    assert "weight_decay" in problems["optimizer.params.weight_deacy"]
    problems = refused("Adam", {"lr": -1.0, "betas": [0.9, 2.0], "eps": 1e-8})
    assert set(problems) == {"optimizer.params.lr", "optimizer.params.betas"}
    assert "Allowed parameters: lr, betas" in problems["optimizer.params.lr"]
    assert "adjust_lr_fn" in refused("Muon", {"adjust_lr_fn": "none"}, torch.zeros(4))["optimizer.params.adjust_lr_fn"]
    assert set(refused("SGD", {"lr": "fast"})) == {"optimizer.params.lr"}
    assert set(refused("SGD", {"bias_correction": True})) == {"optimizer.params.bias_correction"}
    assert set(refused("SGD", {"nesterov": True})) == {"optimizer.params.nesterov"}
    assert set(refused("Lion", {"eps": 1.0, "betas": [0.9, 0.99]})) == {"optimizer.params.eps"}
    assert set(refused("AdamSAGE", {"beta3": 1.0, "eps": 0.0})) == {"optimizer.params.beta3", "optimizer.params.eps"}
    assert set(refused("SophiaG", {"bs": 8, "rho": -1.0})) == {"optimizer.params.rho"}
    assert set(refused("Sophia", {"bs": 0, "update_interval": 0})) >= {"optimizer.params.bs"}


def test_refuse_unusable() -> None:
    refuse_unusable(torch.optim.AdamW([torch.zeros(2)]))
    with pytest.raises(ModelError, match=r"LBFGS evaluates .* Remedy: Use AdamW"):
        refuse_unusable(torch.optim.LBFGS([torch.zeros(2)]))
    with pytest.raises(ModelError, match="SparseAdam needs sparse"):
        refuse_unusable(torch.optim.SparseAdam([torch.zeros(2)]))


def test_lion_follows_algorithm_2() -> None:
    lr, beta1, beta2, decay = 0.03, 0.9, 0.99, 0.1
    param, momentum = start(), torch.zeros(SHAPE)
    tensor = start()
    optimizer = Lion([tensor], lr=lr, betas=(beta1, beta2), weight_decay=decay)
    for grad in gradients(6):
        update = beta1 * momentum + (1 - beta1) * grad
        param = param - lr * (torch.sign(update) + decay * param)
        momentum = beta2 * momentum + (1 - beta2) * grad
        run(optimizer, [grad])
    torch.testing.assert_close(tensor, param, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(optimizer.state[tensor]["exp_avg"], momentum, rtol=1e-6, atol=1e-7)


def test_lion_closure_missing_gradients_and_state_dict() -> None:
    used, unused = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = Lion([{"params": [used]}, {"params": [unused]}], lr=0.1)

    def closure() -> Tensor:
        loss = (used * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6.0
    assert torch.equal(unused.detach(), torch.ones(3))
    assert unused not in optimizer.state
    other = Lion([{"params": [torch.ones(3)]}, {"params": [torch.ones(3)]}], lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.state[other.param_groups[0]["params"][0]]["exp_avg"], optimizer.state[used]["exp_avg"])


def test_sage_s_first_step_only_decays() -> None:
    """The average is what it averages then, so that the difference is 0, and not some rounding of it."""
    tensor, decayed = start(), start()
    run(build("AdamSAGE", {"lr": 0.1}, tensor), gradients(1))
    run(build("AdamSAGE", {"lr": 0.1, "weight_decay": 0.5}, decayed), gradients(1))
    assert torch.equal(tensor, start())
    torch.testing.assert_close(decayed, start() * (1 - 0.1 * 0.5), rtol=2e-7, atol=0)


def test_sophia_divides_by_the_curvature_that_it_was_given() -> None:
    """Some elements are clipped, and some not; without a curvature all are."""
    tensor, twin = start(), start()
    optimizer, expected = (
        build("Sophia", {"lr": 0.01, "bs": 64}, tensor),
        reference.Sophia([twin], **{**SOPHIA, "lr": 0.01}),
    )
    assert isinstance(optimizer, single_pass.Sophia)
    for number, gradient in enumerate(gradients(6)):
        if number % 2 == 0:
            (settings,) = optimizer.prepare([tensor])
            optimizer.update_curvature(tensor, 4 * gradient.flip(0), settings, 0.25)
            twin.grad = gradient.flip(0)
            expected.take_curvature()
        before = tensor.clone()
        run(optimizer, [gradient])
        run(expected, [gradient])
        clipped = (tensor - before * (1 - 0.01 * 0.1)).abs() > 0.01 * (1 - 1e-5)
        assert clipped.any() and not clipped.all()
    torch.testing.assert_close(tensor, twin, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(optimizer.state[tensor]["hessian"], expected.state[twin]["hessian"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}])
def test_lion_refuses_bad_arguments(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Lion([torch.zeros(2)], **bad)


@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize(("name", "params"), [(config[0], config[1]) for config in CONFIGS])
def test_split_pieces_continue_like_the_whole(name: str, params: Any, warm: int) -> None:
    whole, cut = start().reshape(-1), start().reshape(-1)
    expected, optimizer = build(name, params, whole), build(name, params, cut)
    run(expected, gradients(6))
    run(optimizer, gradients(6)[:warm])
    pieces = split_state(optimizer, cut, ALIGNED)
    assert [piece.numel() for piece in pieces] == ALIGNED
    assert cut not in optimizer.state
    run(optimizer, gradients(6)[warm:])
    assert torch.equal(cut, whole)
    for key, value in expected.state[whole].items():
        entries = [optimizer.state[piece][key] for piece in pieces]
        if isinstance(value, Tensor) and value.dim():
            assert torch.equal(torch.cat(entries), value)
        else:
            assert all(entry == value for entry in entries)


@pytest.mark.parametrize(("name", "params"), [(config[0], config[1]) for config in CONFIGS])
def test_a_piece_without_gradient_is_left_alone(name: str, params: Any) -> None:
    tensor = start((10,))
    optimizer = build(name, params, tensor)
    run(optimizer, gradients(2, (10,)))
    first, second = split_state(optimizer, tensor, [4, 6])
    before, state = second.clone(), copy.deepcopy(optimizer.state[second])
    second.grad = None
    first.grad = torch.ones(4)
    optimizer.step()
    assert not torch.equal(tensor[:4], start((10,))[:4])
    assert torch.equal(tensor[4:], before)
    assert state.keys() == optimizer.state[second].keys()
    for key, value in state.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[second][key]))
    if "step" in state:
        assert optimizer.state[first]["step"] == state["step"] + 1


def test_split_shares_storage_and_keeps_the_place_in_the_group() -> None:
    before, tensor, after = torch.zeros(2), torch.arange(5.0), torch.zeros(2)
    optimizer = torch.optim.AdamW([{"params": [("a", before), ("b", tensor), ("c", after)]}])
    run(optimizer, gradients(1, (9,)))
    average, grad = optimizer.state[tensor]["exp_avg"], tensor.grad
    assert grad is not None
    left, right = split_state(optimizer, tensor, [2, 3])
    params = optimizer.param_groups[0]["params"]
    assert all(ours is theirs for ours, theirs in zip(params, [before, left, right, after], strict=True))
    assert optimizer.param_groups[0]["param_names"] == ["a", "b[0]", "b[1]", "c"]
    assert right.data_ptr() == tensor[2:].data_ptr()
    assert optimizer.state[right]["exp_avg"].data_ptr() == average[2:].data_ptr()
    assert right.grad is not None
    assert right.grad.data_ptr() == grad[2:].data_ptr()
    assert optimizer.state[left]["step"] is not optimizer.state[right]["step"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_split_keeps_requires_grad_and_one_element_tensors() -> None:
    tensor = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([tensor])
    run(optimizer, [torch.ones(1)])
    (piece,) = split_state(optimizer, tensor, [1])
    assert piece.requires_grad
    assert piece.is_leaf
    assert optimizer.state[piece]["exp_avg"].shape == (1,)
    assert optimizer.state[piece]["step"].shape == ()


def test_split_errors() -> None:
    tensor = torch.zeros(4)
    optimizer = torch.optim.AdamW([tensor])
    for lengths in ([1, 2], [5, -1], []):
        with pytest.raises(ValueError, match="cannot cut"):
            split_state(optimizer, tensor, lengths)
    with pytest.raises(ValueError, match="cannot cut"):
        split_state(torch.optim.AdamW([start()]), start(), [143])
    with pytest.raises(ValueError, match="not a parameter"):
        split_state(optimizer, torch.zeros(4), [4])


def adam_as_written(weight: torch.Tensor, gradients: list[torch.Tensor], decoupled: bool) -> torch.Tensor:
    """Adam whose moments are not corrected for their beginning at 0, element by element in float64."""
    w, m, v = weight.double(), torch.zeros(()).double(), torch.zeros(()).double()
    for gradient in gradients:
        g = gradient.double() + (0.0 if decoupled else 0.1 * w)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w * (1 - 0.02 * 0.1 if decoupled else 1.0) - 0.02 * m / (v.sqrt() + 1e-6)
    return w


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_adam_without_bias_correction(decoupled: bool, library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(single_pass.native, "library", lambda: None)
    params: dict[str, Any] = {
        **NOTHING,
        "lr": 0.02,
        "betas": [0.9, 0.99],
        "eps": 1e-6,
        "weight_decay": 0.1,
        "bias_correction": False,
    }
    start, gradients = torch.randn(100), [torch.randn(100) for _ in range(5)]
    weight = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer("Adam", {**params, "adam_w_mode": decoupled}, [{"params": [weight]}])
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    assert torch.allclose(weight.double(), adam_as_written(start, gradients, decoupled), rtol=1e-6, atol=1e-7)
