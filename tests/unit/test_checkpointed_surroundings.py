"""What lies around a checkpointed call: containers of its inputs, buffers of its modules, and what is changed in place."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from covering import by_day
from races import looking_for_races
from simulation import simulated_device
from torch import nn

from zerorun.activations import blocks, buffers, host_pool
from zerorun.activations.blocks import CheckpointedBlocks, Recompute
from zerorun.activations.checkpointed_call import Selection, run
from zerorun.activations.checkpointing import checkpoint, kept_bytes
from zerorun.activations.host_pool import HostPool
from zerorun.distributed.device import default_device
from zerorun.errors import ModelError

ROWS, WIDTH = 128, 64
CPU = torch.device("cpu")
POLICIES = ("full", "selective", "full in host memory", "selective in host memory")


def caller_of(policy: str) -> Callable[..., Any]:
    """A function that calls a block under ``policy``: ``call(block, *args, **kwargs)``."""
    if policy == "none":
        return lambda block, *args, **kwargs: block(*args, **kwargs)
    pool, selection = HostPool(CPU) if "host" in policy else None, Selection() if "selective" in policy else None
    return lambda block, *args, **kwargs: run(block, args, kwargs, pool, selection)


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "SMALL_BYTES", 1)


# -- what the caller changes -------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Gives its scores beside its output, and does not need them for its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.a(x)
        return x + torch.sigmoid(self.norm(self.b(torch.relu(scores)))).sin().cos().tanh().sin(), scores


def gradients_with_changed_scores(policy: str, by_view: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    block, call = Scores(), caller_of(policy)
    x = torch.randn(ROWS, WIDTH)
    for _ in range(2):  # the first one chooses
        given = x.clone().requires_grad_()
        y, scores = call(block, given)
        changed = scores[:, : WIDTH // 2] if by_view else scores
        changed -= changed.detach().amax(-1, keepdim=True)
        found = torch.autograd.grad(y.square().sum() + scores.exp().sum(), [given, *block.parameters()])
    return list(found)


@pytest.mark.parametrize("by_view", (False, True))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_result_that_the_caller_changes_in_place_is_computed_again(policy: str, by_view: bool) -> None:
    wanted, found = (gradients_with_changed_scores(name, by_view) for name in ("none", policy))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_input_that_the_caller_changes_in_place_is_named(policy: str) -> None:
    """In host memory, too: on a GPU the copy may come after the change."""
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    output = caller_of(policy)(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), hidden)
    hidden.mul_(3)
    with pytest.raises(ModelError, match=r"an input of a checkpointed call, of shape \(128, 64\), was changed in place"):
        output.sum().backward()


def test_a_change_of_a_stored_result_races_with_nothing_that_is_used() -> None:
    """On a GPU the copy to the host may come after the change; then the result is not taken from there."""
    found = []
    for policy in ("none", "selective"):
        with simulated_device(), looking_for_races():
            device = default_device()
            torch.manual_seed(0)
            block, selection = Scores().to(device), Selection()
            pool = HostPool(device)
            for _ in range(2):
                x = torch.ones(ROWS, WIDTH, device=device, requires_grad=True)
                y, scores = block(x) if policy == "none" else run(block, (x,), {}, pool, selection)
                scores.mul_(0.5)
                loss = y.square().sum() + scores.sum()
                gradient = torch.autograd.grad(loss, x)[0]
            found.append(gradient.sum().item())
    assert found[0] == found[1]


def test_tensors_of_inference_mode_may_be_inputs() -> None:
    """Nobody counts their changes. torch's own checkpoint refuses them."""
    with torch.inference_mode():
        bias = torch.randn(WIDTH)
    block, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    wanted = torch.autograd.grad(torch.tanh(block(x) + bias).sum(), x)[0]
    for policy in POLICIES:
        for _ in range(2):
            output = caller_of(policy)(lambda x, bias: torch.tanh(block(x) + bias), x, bias)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], wanted)


# -- containers --------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "hidden mask")


@dataclass
class State:
    hidden: torch.Tensor
    mask: Any = None


class Output(OrderedDict):  # type: ignore[type-arg]
    """As those of Hugging Face: its items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "named tuple": lambda hidden: Pair(hidden, None),
    "dataclass": State,
    "dict of its own class": lambda hidden: Output(hidden=hidden, mask=None),
    "one in another": lambda hidden: State(hidden.detach(), [Pair(hidden, {"none": None})]),
}


def hidden_in(state: Any) -> torch.Tensor:
    found: torch.Tensor = state.mask[0].hidden if isinstance(state.mask, list) else state.hidden
    return found


@pytest.mark.parametrize("kind", CONTAINERS)
def test_inputs_in_containers_are_kept_as_others(kind: str) -> None:
    """They are copied to the host, counted, and looked at for changes."""
    layer = nn.Linear(WIDTH, WIDTH)
    function = lambda state: layer(torch.tanh(hidden_in(state)))  # noqa: E731
    source = torch.randn(ROWS, WIDTH, requires_grad=True)
    wanted = torch.autograd.grad(function(CONTAINERS[kind](source * 1)).square().sum(), source)[0]
    pool = HostPool(CPU)
    for _ in range(2):
        output = run(function, (CONTAINERS[kind](source * 1),), {}, pool)
        assert torch.equal(torch.autograd.grad(output.square().sum(), source)[0], wanted)
    assert (pool.counts.out_copies, pool.counts.in_copies) == (2, 2)
    assert kept_bytes(function, CONTAINERS[kind](source)) == source.nbytes
    hidden = source * 1
    output = run(function, (CONTAINERS[kind](hidden),), {})
    hidden.mul_(2)
    with pytest.raises(ModelError, match="changed in place"):
        output.sum().backward()
    with pytest.raises(ModelError, match="changed in place"):
        checkpoint(lambda state: hidden_in(state).mul_(2).exp(), CONTAINERS[kind](source * 1))


def test_a_second_run_writes_to_no_container_of_the_caller() -> None:
    layer, seen, named = nn.Linear(WIDTH, WIDTH), [], {}

    def function(state: State, seen: list[Any], named: dict[str, Any]) -> torch.Tensor:
        state.hidden = torch.tanh(layer(state.hidden))
        seen.append(len(seen))
        named[f"call {len(named)}"] = state.hidden
        return state.hidden * 2

    source = torch.randn(ROWS, WIDTH, requires_grad=True)
    state = State(source * 1)
    output = checkpoint(function, state, seen, named)
    after = state.hidden
    (found,) = torch.autograd.grad(output.square().sum(), source)
    assert torch.equal(found, torch.autograd.grad((2 * torch.tanh(layer(source))).square().sum(), source)[0])
    assert (seen, list(named)) == ([0], ["call 0"])
    assert state.hidden is after


def test_a_container_may_hold_itself_and_a_tensor_twice() -> None:
    layer, source = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    hidden = source * 1
    loop: list[Any] = [hidden, hidden]
    loop.append(loop)
    pool, same = HostPool(CPU), []

    def function(loop: list[Any]) -> torch.Tensor:
        same.append(loop[0] is loop[1])
        return torch.tanh(layer(loop[0]))

    output = run(function, (loop,), {}, pool)
    torch.autograd.grad(output.sum(), source)
    assert same == [True, True]
    assert pool.counts.out_copies == 1


# -- buffers -----------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Puts another tensor in the place of its buffer, and its output depends on how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x * self.count


KINDS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "instance norm": lambda: nn.InstanceNorm1d(ROWS, affine=True, track_running_stats=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "a tensor in its place": Counting,
}


class Normed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), KINDS[kind](), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.norm(self.a(x))))


def train(model: nn.Sequential, run_twice: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, states) of four steps, with a block that runs twice in each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model[0](model(x)).square().mean()
        loss.backward(retain_graph=run_twice)
        if run_twice:  # and each backward runs the blocks again
            model.zero_grad()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("run_twice", (False, True))
@pytest.mark.parametrize(
    ("kind", "policy"),
    by_day(itertools.product(KINDS, ("full", "selective")), *((kind, "full") for kind in KINDS)),
)
def test_buffers_change_once(kind: str, policy: str, run_twice: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Normed(kind) for _ in range(2)))
    losses, states = train(copy.deepcopy(model))
    handle = CheckpointedBlocks(model, list(model.named_children()), Recompute(policy))
    assert isinstance(model[0].forward, blocks.BlockForward)
    found, found_states = train(model, run_twice)
    handle.remove()
    assert found == losses
    assert [name for name in states if not torch.equal(found_states[name], states[name])] == []


def in_a_variable(block: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        return unset(x) if x is None else block(x)

    if block is None:
        unset = block
    return function


@pytest.mark.parametrize(
    "way", (lambda block: block, lambda block: block.forward, lambda block: functools.partial(block), in_a_variable)
)
def test_buffers_of_what_a_script_checkpoints_change_once(way: Callable[[nn.Module], Any]) -> None:
    block = Normed("batch norm")
    for _ in range(3):
        checkpoint(way(block), torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert block.norm.num_batches_tracked == 3


class Late(nn.Module):
    """Begins to change its buffer, on which its output depends, where ``on`` is set; in place, or by another tensor."""

    def __init__(self, size: int, in_place: bool) -> None:
        super().__init__()
        self.linear, self.on, self._in_place = nn.Linear(WIDTH, WIDTH), False, in_place
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) + self.scale[0])
        if self.on and self._in_place:
            self.scale.mul_(1.5)
        elif self.on:
            self.scale = self.scale * 1.5
        return y


@pytest.mark.parametrize(
    ("size", "in_place", "exact"), [(3, True, True), (3, False, True), (20000, False, True), (20000, True, False)]
)
def test_a_module_that_begins_late_to_change_its_buffers(
    size: int, in_place: bool, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So far large ones were not copied: if they change in place, the gradients of that call are told to be others."""
    said: list[str] = []
    monkeypatch.setattr(buffers, "warn_once", said.append)
    block = Late(size, in_place)
    plain = copy.deepcopy(block)
    for step in range(5):
        x, equal = torch.randn(ROWS, WIDTH), []
        block.on = plain.on = step >= 2
        for module, y in ((block, checkpoint(block, x)), (plain, plain(x))):
            equal.append(torch.autograd.grad(y.square().sum(), module.linear.weight)[0])
        assert torch.equal(*equal) == (exact or step != 2), step
        assert torch.equal(block.scale, plain.scale)
    assert len(said) == (not exact) and all("'scale'" in text for text in said)


class Lazy(nn.Module):
    """Has a running statistic, on which its output depends, from call number ``begins`` on; ``inner``: in a new part."""

    def __init__(self, begins: int, inner: bool) -> None:
        super().__init__()
        self.linear, self._left, self._inner = nn.Linear(WIDTH, WIDTH), begins, inner

    def begin(self) -> None:
        """What a script may do between calls: a part is added, or the buffer, in the call."""
        self._left -= 1
        if self._inner and self._left == 0:
            self.part = nn.Module()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        owner = self.part if self._inner and self._left <= 0 else self
        if self._left <= 0 and "scale" not in owner._buffers:
            owner.register_buffer("scale", torch.ones(WIDTH))
        if self._left <= 0:
            owner.scale.mul_(0.5).add_(y.detach().std(0))
        return torch.tanh(y / owner.scale) if self._left <= 0 else y


@pytest.mark.parametrize("policy", ("full", "selective"))
@pytest.mark.parametrize(("begins", "inner"), ((1, False), (2, False), (2, True)))
def test_buffers_that_a_module_gets_in_a_call_or_after_the_first_change_once(begins: int, inner: bool, policy: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Lazy(begins, inner), nn.Linear(WIDTH, WIDTH))
    model = copy.deepcopy(plain)
    handle = CheckpointedBlocks(model, [("0", model[0])], Recompute(policy))
    for step in range(4):
        x, found = torch.randn(ROWS, WIDTH), []
        for tried in (model, plain):
            tried[0].begin()
            loss = tried(x).square().sum()
            found.append(torch.autograd.grad(loss, list(tried.parameters())))
        assert all(map(torch.equal, *found)), step
        states = model.state_dict()
        assert [name for name, value in plain.state_dict().items() if not torch.equal(states[name], value)] == []
    handle.remove()


# -- host memory -------------------------------------------------------------------------------------------------


def test_buffers_serve_other_lengths() -> None:
    """Longer ones take the place of shorter ones, and what is not used in every step stays for the steps that use it."""
    pool, layer = HostPool(CPU), nn.Linear(WIDTH, WIDTH)
    held = []
    for length in (*range(100, 400, 10), *range(400, 100, -10)):
        for calls in (1, 3):
            x = torch.randn(length, WIDTH, requires_grad=True)
            wanted, found = x, x
            for _ in range(calls):
                wanted = layer(torch.tanh(wanted))
                found = run(lambda x: layer(torch.tanh(x)), (found,), {}, pool)
            gradients = (torch.autograd.grad(output.square().sum(), x)[0] for output in (found, wanted))
            assert torch.equal(*gradients)
            del found
        held.append(pool.counts.buffer_bytes)
    assert max(held) == 3 * 400 * WIDTH * 4
    assert pool.counts.buffers == 3 * 31


def test_the_smallest_free_buffer_that_is_large_enough_is_taken() -> None:
    pool = HostPool(CPU)
    large, small = pool.take(400), pool.take(10)
    for buffer in (large, small):
        pool.give_back(buffer)
    assert pool.take(8) is small
    assert pool.take(11) is large
