"""Experts on threads that stand for ranks: losses and gradients within 1e-6 of those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from covering import by_day
from mixtures import FAMILIES, choosing, ids_of, make, routers
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerorun.activations.blocks import CheckpointedBlocks, Recompute
from zerorun.errors import ConfigError, ModelError, OrderError
from zerorun.expert_parallel.dispatch import Dispatch, dispatches
from zerorun.expert_parallel.known_experts import check_experts, find_experts
from zerorun.expert_parallel.spread_experts import spread
from zerorun.tensor_parallel.thread_ranks import ThreadAxis, on_threads

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test]'")

Loss = Callable[[Any, int], torch.Tensor]  # of a model and a rank
EXCHANGES = ("dispatch forward", "combine forward", "combine backward", "dispatch backward")


def own_loss(model: Any, rank: int) -> torch.Tensor:
    ids = ids_of(rank)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


class Outcome:
    """The loss and the gradients of one rank. ``sent``: bytes by label."""

    def __init__(self, model: nn.Module, loss: torch.Tensor, sent: dict[str, int]) -> None:
        self.loss, self.sent = loss.detach(), sent
        self.gradients = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
        self.shards = {
            f"{path}.{name}": shard
            for path, module in model.named_modules()
            for name, shard in getattr(module, "tensor_shards", {}).items()
        }
        self.loads = [forward.loads for forward in dispatches(model.modules())]


def on_ranks(model: nn.Module, size: int, loss_of: Loss = own_loss) -> list[Outcome]:
    """What ``size`` ranks make, each with some of the experts of a copy of ``model``."""

    def work(axis: ThreadAxis) -> Outcome:
        own = copy.deepcopy(model)
        spread(find_experts(own), axis)
        loss = loss_of(own, axis.rank)
        if loss.requires_grad:
            loss.backward()
        return Outcome(own, loss, axis.sent)

    return on_threads(size, work)


def compare(model: nn.Module, outcomes: list[Outcome], loss_of: Loss = own_loss) -> None:
    """Losses are those of ``model``, and gradients, summed over ranks or put together, within 1e-6."""
    model.zero_grad()
    losses = [loss_of(model, rank) for rank in range(len(outcomes))]
    torch.stack(losses).sum().backward()
    for loss, outcome in zip(losses, outcomes, strict=True):
        torch.testing.assert_close(outcome.loss, loss.detach(), rtol=1e-6, atol=1e-6)
    for name, param in model.named_parameters():
        parts = [outcome.gradients.get(name) for outcome in outcomes]
        if param.grad is None:
            assert not any(part is not None and part.count_nonzero() for part in parts), name
            continue
        found = [part for part in parts if part is not None]
        assert len(found) == len(parts), f"a rank has no gradient of {name}"
        shards = [outcome.shards.get(name) for outcome in outcomes]
        assert all((shard is not None) == (".mlp.experts." in name) for shard in shards)
        whole = sum(found) if shards[0] is None else torch.cat(found)
        torch.testing.assert_close(whole, param.grad, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.each_value
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", by_day(sorted(FAMILIES), "mixtral", "deepseek-v3", "gpt-oss", "qwen2-moe"))
def test_equals_one_process(family: str, size: int, implementation: str) -> None:
    model = make(family, implementation)
    compare(model, on_ranks(model, size))


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_losses_in_bf16_have_the_same_bits(implementation: str) -> None:
    """Weights come in fp32 from routers, and sums are rounded where the model rounds them."""
    model = make("mixtral", implementation).bfloat16()
    outcomes = on_ranks(model, 2)
    assert [outcome.loss.item() for outcome in outcomes] == [own_loss(model, rank).item() for rank in range(2)]


# -- who gets rows ------------------------------------------------------------------------------------------------

CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # A rank without rows took part in no backward, and the others waited: Megatron #4851.
    "all rows to one rank": lambda numbers: torch.arange(2).expand_as(numbers),
    # Its gradient was None, and it was not decayed: Automodel #2995.
    "an expert without rows": lambda numbers: numbers.where(numbers != 3, (numbers.sum(1, keepdim=True) - numbers + 1) % 3),
    "one expert": torch.zeros_like,
    "twice the same": lambda numbers: numbers[:, :1].expand_as(numbers),
}


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("choice", CHOICES)
def test_all_choices(choice: str, implementation: str) -> None:
    model = make("mixtral", implementation)
    choosing(model, CHOICES[choice])
    outcomes = on_ranks(model, 4)
    compare(model, outcomes)
    assert all(gradient is not None for outcome in outcomes for gradient in outcome.gradients.values())


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """What is made without values is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("implementation", by_day(["grouped_mm", "eager", "batched_mm"], "grouped_mm"))
@pytest.mark.parametrize("choice", CHOICES)
def test_rows_that_nobody_writes_are_not_read(choice: str, implementation: str, nan_in_new_memory: None) -> None:
    """transformers #48687: rows of experts elsewhere were not written, and NaN times 0 went into the router's gradient."""
    model = make("mixtral", implementation)
    choosing(model, CHOICES[choice])
    compare(model, on_ranks(model, 4))


def test_ties() -> None:
    model = make("qwen3-moe")
    for router in routers(model):
        nn.init.zeros_(router.weight)  # type: ignore[arg-type]
    compare(model, on_ranks(model, 2))


def test_a_rank_has_no_rows_of_its_own() -> None:
    def loss_of(model: Any, rank: int) -> torch.Tensor:
        hidden = model.model.embed_tokens(ids_of(rank, 0 if rank else 5))
        loss: torch.Tensor = model.model.layers[0].mlp(hidden).square().sum()
        return loss

    model = make("mixtral")
    compare(model, on_ranks(model, 2, loss_of), loss_of)


@pytest.mark.parametrize("frozen", ["experts.", "gate.weight", "embed_tokens", "gate.weight experts. embed_tokens"])
def test_frozen(frozen: str) -> None:
    model = make("mixtral")
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen.split()))
    compare(model, on_ranks(model, 2))


# -- more than one forward ----------------------------------------------------------------------------------------


def kept(model: nn.Module) -> int:
    """How many routes the layers of a model keep."""
    return sum(len(forward._replay._living()) for forward in dispatches(model.modules()))


@pytest.mark.parametrize("recomputes", [False, True])
def test_several_forwards_before_a_backward(recomputes: bool) -> None:
    """The first backward is not that of the last forward."""

    def loss_of(model: Any, rank: int) -> torch.Tensor:
        with torch.no_grad():
            own_loss(model, rank + 5)
        first, second, third = (own_loss(model, rank + salt) for salt in (0, 7, 3))
        layers = len(dispatches(model.modules()))
        assert kept(model) == 3 * layers
        second.backward()
        assert kept(model) == 3 * layers  # its graph lives as long as the loss
        del second
        assert kept(model) == 2 * layers
        return first + third

    def reference(model: Any, rank: int) -> torch.Tensor:
        return own_loss(model, rank) + own_loss(model, rank + 7) + own_loss(model, rank + 3)

    model = make("deepseek-v3")
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    outcomes = on_ranks(model, 2, loss_of)
    for rank, outcome in enumerate(outcomes):
        outcome.loss += own_loss(model, rank + 7).detach()
    compare(model, outcomes, reference)


def test_evaluation_counts_and_keeps_nothing() -> None:
    model = make("mixtral")

    def loss_of(own: Any, rank: int) -> torch.Tensor:
        with torch.no_grad():
            loss = own_loss(own.eval(), rank)
        assert kept(own) == 0
        return loss

    outcomes = on_ranks(model, 2, loss_of)
    assert not any(loads.any() for outcome in outcomes for loads in outcome.loads)
    assert [outcome.loss.item() for outcome in outcomes] == [loss_of(model, rank).item() for rank in range(2)]


def test_loads() -> None:
    seen: list[torch.Tensor] = []
    model = make("mixtral")
    outcomes = on_ranks(model, 2)
    for router in routers(model):
        router.register_forward_hook(lambda module, args, out: seen.append(out[2]))
    own_loss(model, 1)
    assert [load.tolist() for load in outcomes[1].loads] == [
        torch.bincount(n.flatten(), minlength=4).tolist() for n in seen
    ]


# -- recomputation ------------------------------------------------------------------------------------------------


def flipped_when_recomputed(numbers: torch.Tensor) -> torch.Tensor:
    """What near-ties do that fall otherwise the second time."""
    if torch._C._current_graph_task_id() == -1:
        return numbers
    return (numbers + 1) % 4


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_recomputation_sends_rows_where_they_went(implementation: str) -> None:
    """Automodel #2635, #3325: another choice in the second run gave wrong gradients, or shapes that autograd refuses."""
    model = make("mixtral", implementation)
    choosing(model, flipped_when_recomputed)
    plain = on_ranks(model, 2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = on_ranks(model, 2)
    for one, other in zip(plain, again, strict=True):
        assert one.gradients.keys() == other.gradients.keys()
        for name, gradient in one.gradients.items():
            assert gradient is not None
            assert torch.equal(gradient, other.gradients[name]), name


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])  # without shared experts, and with them
def test_reentrant_recomputation(family: str) -> None:
    model = make(family)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    compare(model, on_ranks(model, 2))


def test_one_region_with_two_calls_of_a_layer() -> None:
    """Which call is repeated cannot be told, so routes are found again."""

    def loss_of(model: Any, rank: int) -> torch.Tensor:
        experts, router = model.model.layers[0].mlp.experts, model.model.layers[0].mlp.gate

        def twice(hidden: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                _, weights, numbers = router(hidden)
                hidden = hidden + experts(hidden, numbers, weights)
            return hidden

        hidden = model.model.embed_tokens(ids_of(rank)).flatten(0, 1)
        return checkpoint(twice, hidden, use_reentrant=False).square().mean()

    model = make("mixtral")
    compare(model, on_ranks(model, 2, loss_of), loss_of)


# -- beside shared experts ----------------------------------------------------------------------------------------

# Shared experts are called after the others, before the router, and before it with the sum in the other order.
SHARED = by_day(["deepseek-v3", "qwen2-moe", "ernie"], "deepseek-v3", "qwen2-moe")
THERE, BACK = "experts: dispatch", "experts: combine"
IN_ORDER = [
    *(f"begin {THERE} forward", "up", f"end {THERE} forward", f"begin {BACK} forward", "down", f"end {BACK} forward"),
    *(f"begin {BACK} backward", "down", f"end {BACK} backward", f"begin {THERE} backward", "up", f"end {THERE} backward"),
]


class _Noting:
    """An axis, and a collective that has begun: they write down when exchanges of rows begin and end."""

    def __init__(self, inner: Any, seen: list[str], label: str = "") -> None:
        self.inner, self.seen, self.label = inner, seen, label
        self.rank, self.size, self.broadcast = inner.rank, inner.size, inner.broadcast

    def all_to_all(self, sent: Any, received: Any, label: str) -> Any:
        self.inner.all_to_all(sent, received, label)
        if "counts" not in label:
            self.seen.append(f"begin {label}")
        return _Noting(self.inner, self.seen, label)

    def wait(self) -> None:
        if "counts" not in self.label and self.seen[-1] != f"end {self.label}":
            self.seen.append(f"end {self.label}")


def shared_of(model: nn.Module) -> list[Any]:
    return [shared for experts in find_experts(model) for shared in experts.shared]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", SHARED)
def test_rows_travel_beside_shared_experts(family: str, recomputes: bool) -> None:
    """There beside their first layers, back beside the last, in forward and in backward."""
    model = make(family, num_hidden_layers=1 if family == "qwen2-moe" else 2)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def work(axis: ThreadAxis) -> list[str]:
        own, seen = copy.deepcopy(model), []
        (shared,) = shared_of(own)
        spread(find_experts(own), _Noting(axis, seen))  # type: ignore[arg-type]
        for word, part in (("up", shared.up_proj), ("down", shared.down_proj)):
            part.register_forward_hook(lambda *unused, word=word: seen.append(word))
            part.weight.register_hook(lambda grad, word=word: seen.append(word))
        own_loss(own, axis.rank).backward()
        return seen

    for seen in on_threads(2, work):
        assert seen == IN_ORDER[:6] * (2 if recomputes else 1) + IN_ORDER[6:]


def test_what_is_begun_is_awaited() -> None:
    """A recomputation ends where it has found what backward needs: here, with the shared experts."""
    block = make("deepseek-v3").model.layers[1].mlp
    for name, param in block.named_parameters():
        param.requires_grad_("shared" in name)

    def work(axis: ThreadAxis) -> list[str]:
        own, seen = copy.deepcopy(block), []
        spread(find_experts(own), _Noting(axis, seen))  # type: ignore[arg-type]
        checkpoint(own, torch.ones(2, 3, 32), use_reentrant=False).square().sum().backward()
        return seen

    for seen in on_threads(2, work):
        assert seen[4:] == seen[:4] and seen[2:4] == [f"begin {BACK} forward", f"end {BACK} forward"]


def one_after_the_other(model: nn.Module, rank: int) -> torch.Tensor:
    """Nothing is put off where a hook looks at what experts return."""
    for experts in find_experts(model):
        experts.module.register_forward_hook(lambda *unused: None)
    return own_loss(model, rank)


def looked_at_in_forward(model: nn.Module, rank: int) -> torch.Tensor:
    """Hooks are there in forward, and gone when it is recomputed."""
    handles = [experts.module.register_forward_hook(lambda *unused: None) for experts in find_experts(model)]
    loss = own_loss(model, rank)
    for handle in handles:
        handle.remove()
    return loss


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("loss_of", [one_after_the_other, looked_at_in_forward])
@pytest.mark.parametrize("family", SHARED)
def test_bits_are_those_of_one_after_the_other(family: str, loss_of: Loss, recomputes: bool) -> None:
    model = make(family)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for one, other in zip(on_ranks(model, 2), on_ranks(model, 2, loss_of), strict=True):
        assert torch.equal(one.loss, other.loss)
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_autograd_that_looks_for_nan_finds_none() -> None:
    model = make("deepseek-v3")
    with torch.autograd.detect_anomaly():  # of the whole process, and not of a thread
        outcomes = on_ranks(model, 2)
    compare(model, outcomes)


class _Block(nn.Module):
    """``changes``: in place, what shared experts were given. ``drops``: what they make is not used."""

    def __init__(self, changes: bool = False, drops: bool = False) -> None:
        super().__init__()
        inner = make("qwen2-moe").model.layers[0].mlp
        self.gate, self.experts, self.shared = inner.gate, inner.experts, inner.shared_expert
        self.changes, self.drops = changes, drops

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.view(-1, hidden.shape[-1]).clone()
        shared = self.shared(rows)
        _, weights, index = self.gate(rows)
        if self.changes:
            rows *= 2
        routed = self.experts(rows, index, weights)
        return routed.reshape(hidden.shape), shared if self.drops else routed.view_as(hidden) + shared.view_as(hidden)


def test_a_block_returns_tensors() -> None:
    def work(axis: ThreadAxis) -> list[torch.Tensor]:
        block = _Block(drops=True)
        spread(find_experts(block), axis)
        return list(block(torch.ones(2, 3, 32)))

    for found in on_threads(2, work):
        wanted = _Block(drops=True)(torch.ones(2, 3, 32))
        assert [type(tensor) for tensor in found] == [torch.Tensor] * 2
        torch.testing.assert_close(found, list(wanted))


def test_what_shared_experts_were_given_must_stay() -> None:
    def work(axis: ThreadAxis) -> None:
        block = _Block(changes=True)
        spread(find_experts(block), axis)
        block(torch.ones(2, 3, 32))

    with pytest.raises(ModelError, match=r"Qwen2MoeMLP, the shared .* changed in place .* Remedy: make a new tensor"):
        on_threads(2, work)


# -- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes(size: int, recomputes: bool) -> None:
    """r rows away and v rows here: r H b to the experts, v H b back, and as much again for gradients."""
    model = make("qwen3-moe")
    seen: list[tuple[int, torch.Tensor]] = []  # rank, the rank of the expert of each row

    for rank in range(size):
        handles = [
            router.register_forward_hook(lambda module, args, out, rank=rank: seen.append((rank, out[2] // (8 // size))))
            for router in routers(model)
        ]
        own_loss(model, rank)
        for handle in handles:
            handle.remove()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for rank, outcome in enumerate(on_ranks(model, size)):
        away = sum(int((theirs != rank).sum()) for source, theirs in seen if source == rank)
        here = sum(int((theirs == rank).sum()) for source, theirs in seen if source != rank)
        row, times = 32 * 4, 2 if recomputes else 1
        expected = dict(zip(EXCHANGES, (times * away, times * here, away, here), strict=True))
        assert {name: outcome.sent[f"experts: {name}"] for name in EXCHANGES} == {
            name: rows * row for name, rows in expected.items()
        }
        assert outcome.sent["experts: counts"] == 2 * (size - 1) * (8 // size + 1) * 8


# -- the loss of routers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_the_auxiliary_loss_is_that_of_the_ranks_rows(family: str) -> None:
    """It changed with the number of ranks: Megatron #5047, #3768, #5996."""
    model = make(family, output_router_logits=True, router_aux_loss_coef=0.5)
    compare(model, on_ranks(model, 2))
    plain = make(family)
    assert own_loss(model, 0).item() != own_loss(plain, 0).item()


# -- spreading ----------------------------------------------------------------------------------------------------


def test_undone() -> None:
    model = make("gpt-oss")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def work(axis: ThreadAxis) -> nn.Module:
        own = copy.deepcopy(model)
        undo = spread(find_experts(own), axis)
        experts: Any = own.model.layers[0].mlp.experts
        assert experts.num_experts == 2
        assert experts.gate_up_proj.shape == (2, 32, 48)
        for step in reversed(undo):
            step()
        return own

    for own in on_threads(2, work):
        experts: Any = own.model.layers[0].mlp.experts  # type: ignore[union-attr, index]
        assert experts.num_experts == 4
        assert not {"forward", "tensor_shards"} & vars(experts).keys()
        assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())


def test_shared_experts_are_as_before() -> None:
    def work(axis: ThreadAxis) -> Any:
        own = make("qwen2-moe")
        for step in reversed(spread(find_experts(own), axis)):
            step()
        return own

    for own in on_threads(2, work):
        for block in (layer.mlp for layer in own.model.layers):
            assert "forward" not in vars(block.shared_expert)
            assert not block._forward_hooks and not block.shared_expert.down_proj._forward_pre_hooks


def test_rank_zeros_values_count() -> None:
    model = make("mixtral")

    def work(axis: ThreadAxis) -> torch.Tensor:
        own = copy.deepcopy(model)
        for param in own.parameters():
            param.data += axis.rank
        spread(find_experts(own), axis)
        return own.model.layers[1].mlp.experts.down_proj.detach()  # type: ignore[no-any-return]

    assert torch.equal(torch.cat(on_threads(4, work)), model.model.layers[1].mlp.experts.down_proj)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_copies_of_a_model_send_rows_of_their_own(family: str) -> None:
    model = make(family)

    def work(axis: ThreadAxis) -> bool:
        own = copy.deepcopy(model)
        spread(find_experts(own), axis)
        loss = own_loss(own, axis.rank)
        other = copy.deepcopy(own)
        assert kept(other) == 0
        assert all(one._module is not two._module for one, two in zip(*map(layers, (own, other)), strict=True))
        return own_loss(other, axis.rank).item() == loss.item()

    assert all(on_threads(2, work))


def layers(model: nn.Module) -> list[Dispatch]:
    return dispatches(model.modules())


# -- what is refused ----------------------------------------------------------------------------------------------


def test_numbers_that_do_not_divide() -> None:
    model = make("mixtral", num_local_experts=6)
    with pytest.raises(ConfigError, match=r"autoep_size.*4.*has 6 experts.*Use one of 1, 2, 3, 6\."):
        check_experts(model, find_experts(model), 4)


def test_a_model_without_experts() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="Sequential has no module of experts"):
        check_experts(model, find_experts(model), 2)


def test_llama4_has_nothing_to_send() -> None:
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, intermediate_size_mlp=24, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Llama4ForCausalLM(config)
    with pytest.raises(ConfigError, match=r"Llama4TextExperts.*nothing to send.*tensor_parallel divides"):
        check_experts(model, find_experts(model), 2)


def test_adapters_of_experts_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(make("mixtral"), config)
    with pytest.raises(ConfigError, match=r"has an adapter \(ParamWrapper\)"):
        check_experts(model, find_experts(model), 2)


@pytest.mark.parametrize(
    ("numbers", "weights", "message"),
    [
        (torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 4), r"weights \(4, 4\)"),
        (torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2), "4 rows"),
        (torch.full((4, 2), 4), torch.ones(4, 2), "above 3, the last"),
    ],
)
def test_calls_of_another_kind(numbers: torch.Tensor, weights: torch.Tensor, message: str) -> None:
    model = make("mixtral")

    def work(axis: ThreadAxis) -> None:
        own = copy.deepcopy(model)
        spread(find_experts(own), axis)
        own.model.layers[0].mlp.experts(torch.ones(4, 32), numbers, weights)

    with pytest.raises(ModelError, match=message):
        on_threads(2, work)


class _WeighsInputs(nn.Module):
    """Experts whose rows are multiplied by the weights before, and not after."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = hidden.unsqueeze(1) * weights.unsqueeze(-1)  # [T, K, H]
        return torch.einsum("tkh,tkhi->tki", rows, self.up[index]).square().sum(1)


@pytest.mark.parametrize("on", ["all ranks", "one rank"])
def test_experts_that_weigh_otherwise_are_refused(on: str) -> None:
    """Their results would be others, in silence. All ranks say so, whichever has found it."""
    model = nn.Sequential(_WeighsInputs())
    if on == "one rank":
        nn.init.zeros_(model[0].up[:2])  # those of the first one give zeros, which add up

    def work(axis: ThreadAxis) -> str:
        own = copy.deepcopy(model)
        spread(find_experts(own), axis)
        try:
            own[0](torch.randn(3, 6), torch.tensor([[0, 1]] * 3), torch.ones(3, 2))
        except ModelError as error:
            return str(error)
        return "nothing"

    for said in on_threads(2, work):
        assert "0 (_WeighsInputs) does not return the sum" in said and "Remedy: remove the section" in said


@pytest.mark.parametrize("policy", by_day(("full", "selective"), "selective"))
def test_what_is_not_finite_tells_nothing_of_how_experts_weigh(policy: str) -> None:
    """An expert with NaN, or an overflow in fp16, made one rank refuse the model, and the others wait for it."""
    model = make("mixtral", "eager")

    def loss_of(model: Any, rank: int) -> torch.Tensor:
        forwards = dispatches(model.modules())
        if not forwards:
            return own_loss(model, rank)
        blocks = [(f"model.layers.{at}", layer) for at, layer in enumerate(model.model.layers)]
        checkpointed = CheckpointedBlocks(model, blocks, Recompute(policy))
        own_loss(model, rank).backward()  # selective checkpointing chooses what to keep
        model.zero_grad()
        param = model.model.layers[1].mlp.experts.down_proj
        lost, forwards[1]._tried = param.detach().clone(), False
        if rank == 1:
            nn.init.constant_(param[-1], torch.nan)
        own_loss(model, rank)
        assert forwards[1]._tried == (rank == 0)
        with torch.no_grad():
            param.copy_(lost)
        loss = own_loss(model, rank)
        assert forwards[1]._tried
        loss.backward()
        checkpointed.remove()
        return loss.detach()

    compare(model, on_ranks(model, 2, loss_of), own_loss)


def test_a_rank_that_trains_while_another_evaluates_is_told_so() -> None:
    """HF's generate ends on each rank when its own sequences end, and a rank may have fewer batches for evaluation."""
    model = make("mixtral")

    def work(axis: ThreadAxis) -> str:
        own = copy.deepcopy(model)
        spread(find_experts(own), axis)
        own_loss(own, axis.rank).backward()
        with torch.set_grad_enabled(axis.rank != 1):
            try:
                own_loss(own, axis.rank)
            except OrderError as error:
                return str(error)
        return "nothing"

    for said in on_threads(2, work):
        assert "layers.0.mlp.experts was called with gradients on 1 and without on 1 of the 2 ranks" in said
        assert "Remedy: make as many forwards on each rank" in said and "generate(..., synced_gpus=True)" in said
