"""Checkpointed calls in one process: what they keep, what they cost in memory, and what goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerorun
from zerorun.activations import blocks, host_pool, selective
from zerorun.activations.blocks import Recompute
from zerorun.activations.checkpointed_call import Selection, run
from zerorun.activations.checkpointing import checkpoint, configure, is_configured, kept_bytes, reset
from zerorun.activations.host_pool import HostPool
from zerorun.config.parse import load_config
from zerorun.errors import ConfigError, ModelError

WIDTH, LENGTH = 64, 96
CPU = torch.device("cpu")


class GptBlock(nn.Module):
    """Attention and MLP; ``p``: dropout after both."""

    def __init__(self, p: float = 0.0, activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu) -> None:
        super().__init__()
        self.p, self.activation = p, activation
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(attended), self.p)
        return x + F.dropout(self.down(self.activation(self.up(self.norm2(x)))), self.p)


class Alive(TorchDispatchMode):
    """Remembers, weakly, every storage that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.made[leaf.untyped_storage()._cdata] = (
                    StorageWeakRef(leaf.untyped_storage()),
                    leaf.untyped_storage().nbytes(),
                )
        return out

    def bytes_without(self, module: nn.Module) -> int:
        """Those that are alive, without the parameters of ``module``, of which views are made."""
        given = {param.untyped_storage()._cdata for param in module.parameters()}
        return sum(size for key, (ref, size) in self.made.items() if key not in given and not ref.expired())


def call(block: nn.Module, x: torch.Tensor, policy: str, selection: Selection, pool: HostPool | None = None) -> Any:
    return block(x) if policy == "none" else run(block, (x,), {}, pool, selection if policy == "selective" else None)


def gradients(block: nn.Module, policy: str, selection: Selection, pool: HostPool | None = None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    loss = call(block, call(block, x, policy, selection, pool), policy, selection, pool).square().mean()
    return list(torch.autograd.grad(loss, [x, *block.parameters()]))


@pytest.fixture(autouse=True)
def _no_settings_left() -> Iterator[None]:
    yield
    from zerorun.activations import checkpointing

    checkpointing._current.configured = False
    checkpointing._use([checkpointing.Recompute()])


# -- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ("none", "full", "selective"))
@pytest.mark.parametrize("p", (0.0, 0.1))
def test_kept_bytes_are_what_is_kept(policy: str, p: float) -> None:
    """Equal to 2 % to the storages that are alive after the forward; the input counts, the output does not."""
    torch.manual_seed(0)
    block, selection = GptBlock(p), Selection()
    call(block, torch.randn(4, LENGTH, WIDTH, requires_grad=True), policy, selection)  # chooses
    with Alive() as alive:
        x = torch.randn(4, LENGTH, WIDTH).requires_grad_()
        output = call(block, x, policy, selection)
        graph = output.grad_fn
        del output, x
    assert graph is not None
    predicted = kept_bytes(block, torch.randn(4, LENGTH, WIDTH, requires_grad=True), policy=policy)
    assert predicted == pytest.approx(alive.bytes_without(block), rel=0.02)


@pytest.mark.parametrize("p", (0.0, 0.1))
@pytest.mark.parametrize("length", (16, LENGTH, 1024))
def test_selective_saves_sixty_percent_of_what_full_saves(length: int, p: float) -> None:
    x = torch.randn(2, length, WIDTH, requires_grad=True)
    none, full, chosen = (kept_bytes(GptBlock(p), x, policy=policy) for policy in ("none", "full", "selective"))
    assert full == x.nbytes
    assert full < chosen
    assert none - chosen >= 0.6 * (none - full)


def test_kept_bytes_takes_what_blocks_take() -> None:
    linear = nn.Linear(WIDTH, WIDTH)

    def function(x: torch.Tensor, *, scale: float, more: dict[str, Any]) -> tuple[torch.Tensor, None]:
        return torch.tanh(linear(x)) * scale + more["bias"], None

    x, bias = torch.zeros(2, WIDTH, requires_grad=True), torch.zeros(WIDTH)
    assert kept_bytes(function, x, scale=2.0, more={"bias": bias}) == x.nbytes + bias.nbytes
    assert kept_bytes(function, x, scale=2.0, more={"bias": bias}, policy="none") == 2 * x.nbytes
    with pytest.raises(ValueError, match="policy"):
        kept_bytes(function, x, policy="some")


# -- selective ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", (F.gelu, torch.relu_, lambda x: x.mul_(2).relu_()))
@pytest.mark.parametrize("in_host", (False, True))
def test_kept_results_may_be_changed_in_place(activation: Any, in_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """ReLU(inplace=True) writes into a kept result; through a view, whose changes torch does not count."""
    monkeypatch.setattr(host_pool, "SMALL_BYTES", 1)
    monkeypatch.setattr(selective, "KEPT_SHARE", 1.0)
    block, selection = GptBlock(0.1, activation), Selection()
    wanted = gradients(block, "none", selection)
    pool = HostPool(CPU) if in_host else None
    for _ in range(3):
        found = gradients(block, "selective", selection, pool)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(selection.chosen or ()) >= 4


def test_a_second_backward_and_another_sequence_of_operations() -> None:
    block, selection = GptBlock(0.1), Selection()
    gradients(block, "selective", selection)
    torch.manual_seed(3)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    loss = call(block, x, "selective", selection).square().mean()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())  # has not what the choice was made for
    wanted = gradients(other, "none", selection)
    assert all(torch.equal(a, b) for a, b in zip(gradients(other, "selective", selection), wanted, strict=True))


def test_of_results_that_save_as_much_for_a_byte_the_largest_are_kept() -> None:
    """40 bytes are to be had, which hold one result of 30 or one of 20, and not both."""
    results = [selective.Result(flops=40, storages={1: 20}), selective.Result(flops=60, storages={2: 30})]
    record = selective.Record(results, needed=2, saved={3: round(40 / selective.KEPT_SHARE)}, made={3})
    assert record.choose() == {1}
    record.results.append(selective.Result(flops=21, storages={4: 10}))
    assert record.choose() == {1}  # autograd does not need the third
    record.needed = 3
    assert record.choose() == {1, 2}


def test_attention_with_dropout_is_run_again() -> None:
    """A kept result would leave the random numbers of later dropouts at another place."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.zeros(1, 1, 2, 8)
    assert selective.counts(attention, (query, query, query), {})
    assert selective.counts(attention, (query, query, query, 0.0), {})
    assert not selective.counts(attention, (query, query, query, 0.1), {})
    assert not selective.counts(attention, (query, query, query), {"dropout_p": 0.1})


def test_a_model_that_checkpoints_itself_is_told_how_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Switched(nn.Sequential):
        gradient_checkpointing = True

        def gradient_checkpointing_disable(self) -> None:
            self.gradient_checkpointing = False

        def gradient_checkpointing_enable(self) -> None:
            self.gradient_checkpointing = True

    said: list[str] = []
    monkeypatch.setattr(blocks, "warn_once", said.append)
    model = Switched(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = blocks.CheckpointedBlocks(model, list(model.named_children()), blocks.Recompute("full"))
    model(torch.ones(1, 4))
    assert len(said) == 2 and all("no effect" in text for text in said)
    (advice,) = re.findall(r"Remedy: call model\.(\w+)\(\)", said[0])
    getattr(model, advice)()
    said.clear()
    model(torch.ones(1, 4))
    assert said == []
    handle.remove()


# -- host memory -------------------------------------------------------------------------------------------------


def test_small_frozen_and_odd_tensors_stay() -> None:
    pool = HostPool(CPU)
    large = torch.randn(256, 256, requires_grad=True)
    linear = nn.Linear(256, 256)

    def function(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x * mask, weight))

    for x, copies in ((large, 1), (large[:10], 0), (large.t(), 1), (large[:, 1:], 0), (large[:1].expand(256, 256), 0)):
        before = pool.counts.out_copies
        mask = torch.ones(256, x.shape[1])[: x.shape[0]]
        weight = linear.weight[:, : x.shape[1]] if x.shape[1] < 256 else linear.weight
        wanted = torch.autograd.grad(function(x, mask, weight).sum(), large)[0]
        output = run(function, (x, mask, weight), {}, pool)
        kept = pool.counts.out_copies - before
        assert torch.equal(torch.autograd.grad(output.sum(), large)[0], wanted)
        if x.shape[1] == 256:
            assert kept == copies
    assert pool.counts.buffers == 1


def test_what_comes_back_has_memory_of_its_own() -> None:
    x = torch.randn(8, 16).t()
    stored = host_pool.Stored(HostPool(CPU), x)
    for _ in range(3):  # as backward with retain_graph does, whoever writes to what it got
        found = stored.get()
        assert torch.equal(found, x) and found.stride() == x.stride()
        found.zero_()


def test_buffers_are_counted_in_bytes() -> None:
    pool = HostPool(CPU)
    kept = [host_pool.Stored(pool, tensor) for tensor in (torch.zeros(10), torch.zeros(3, dtype=torch.float64))]
    assert (pool.counts.buffers, pool.counts.buffer_bytes, pool.counts.out_bytes) == (2, 64, 64)
    kept.clear()
    kept.append(host_pool.Stored(pool, torch.zeros(12, dtype=torch.bfloat16)))
    assert (pool.counts.buffers, pool.counts.buffer_bytes, pool.counts.out_bytes) == (2, 64, 88)


def test_an_order_of_backward_that_is_not_the_reverse_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two losses, the first's graph first: from the second step on its groups are fetched before they are opened."""
    monkeypatch.setattr(host_pool, "SMALL_BYTES", 1)
    pool, block = HostPool(CPU), nn.Linear(WIDTH, WIDTH)
    late = []
    for _ in range(3):
        before = pool.counts.late_groups
        losses = []
        for _ in range(2):
            x = torch.randn(4, WIDTH, requires_grad=True)
            for _ in range(3):
                x = torch.tanh(run(block, (x,), {}, pool))
            losses.append(x.sum())
        for loss in losses:
            loss.backward()
        late.append(pool.counts.late_groups - before)
        del x, loss, losses
    assert late == [2, 1, 1]


def test_a_forward_without_backward_gives_its_buffers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "SMALL_BYTES", 1)
    pool, block = HostPool(CPU), nn.Linear(WIDTH, WIDTH)
    for _ in range(5):
        run(block, (torch.randn(4, WIDTH, requires_grad=True),), {}, pool)
    assert (pool.counts.buffers, pool.counts.out_copies, pool.counts.in_copies) == (1, 5, 0)


# -- the public function -----------------------------------------------------------------------------------------


def test_checkpoint_works_without_an_engine() -> None:
    block = GptBlock(0.1)

    def run_twice(through: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
        loss = through(block, through(block, x)).square().mean()
        return list(torch.autograd.grad(loss, [x, *block.parameters()]))

    wanted = run_twice(lambda function, x: function(x))
    assert not is_configured()
    for settings in (None, {"checkpoint_in_cpu": True}, {"deepspeed_config": {"activation_checkpointing": {}}}):
        if settings is not None:
            configure(None, **settings)
            assert is_configured()
        assert all(torch.equal(a, b) for a, b in zip(run_twice(checkpoint), wanted, strict=True))
    reset()
    with torch.no_grad():
        assert not checkpoint(block, torch.randn(1, LENGTH, WIDTH)).requires_grad


def test_configure_reads_the_file_and_the_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "SMALL_BYTES", 1)
    from zerorun.activations import checkpointing

    section = {"activation_checkpointing": {"cpu_checkpointing": True, "policy": "selective"}}
    configure(deepspeed_config=section, partition_activations=True, num_checkpoints=4)
    assert checkpointing._current.settings.pool is not None
    block, x = GptBlock(0.1), torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    for _ in range(2):
        torch.manual_seed(1)
        found = torch.autograd.grad(checkpoint(lambda x: block(x), x).sum(), x)[0]
    assert checkpointing._current.settings.pool.counts.out_copies > 2  # the second call keeps results, too
    torch.manual_seed(1)
    assert torch.equal(found, torch.autograd.grad(block(x).sum(), x)[0])
    configure(deepspeed_config=section, checkpoint_in_cpu=False)
    assert checkpointing._current.settings.pool is None


def test_settings_of_an_engine_that_is_gone_do_not_come_back() -> None:
    from zerorun.activations import checkpointing

    before = checkpointing._current.settings
    one, other = Recompute("selective"), Recompute("full")
    for order in ((0, 1), (1, 0)):
        adopted = [checkpointing.Adopted(one), checkpointing.Adopted(other)]
        adopted[order[0]].remove()
        assert checkpointing._current.settings is (other, one)[order[0]]
        adopted[order[1]].remove()
        assert checkpointing._current.settings is before
    adopted = [checkpointing.Adopted(one)]
    configure()
    chosen = checkpointing._current.settings
    adopted += [checkpointing.Adopted(other)]
    for each in adopted:
        each.remove()
    assert checkpointing._current.settings is chosen


def test_gradients_of_gradients() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def penalty(through: Callable[..., Any]) -> torch.Tensor:
        (slope,) = torch.autograd.grad(through(lambda x: torch.tanh(linear(x)), x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), linear.weight)[0]

    assert torch.equal(penalty(checkpoint), penalty(lambda function, x: function(x)))


def test_an_input_changed_in_place_is_named() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ModelError, match="changed in place"):
        checkpoint(lambda x: x.mul_(2).exp(), x * 1)
    y = x * 1
    output = checkpoint(lambda y: y.exp(), y)
    y.mul_(2)
    with pytest.raises(ModelError, match="changed in place"):
        output.sum().backward()


# -- configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "notes"),
    [
        ({}, []),
        ({"partition_activations": False, "cpu_checkpointing": False, "profile": False, "number_checkpoints": None}, []),
        ({"policy": "FULL"}, []),
        ({"policy": "every_n", "every_n": 3}, []),
        ({"policy": "full", "every_n": 3}, ["every_n"]),
        ({"policy": "selective", "cpu_checkpointing": True}, []),
        ({"cpu_checkpointing": True}, ["cpu_checkpointing"]),
        ({"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4}, None),
    ],
)
def test_notes(section: dict[str, Any], notes: list[str] | None) -> None:
    config = load_config({"gradient_clipping": 0, "activation_checkpointing": section})
    wanted = notes if notes is not None else list(section)
    assert sorted(note.key for note in config.notes) == sorted(f"activation_checkpointing.{key}" for key in wanted)


@pytest.mark.parametrize("section", ({"policy": "some"}, {"every_n": 0}, {"polcy": "full"}))
def test_wrong_sections(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        load_config({"activation_checkpointing": section})


def test_selective_and_compile_are_refused_together() -> None:
    source = {"compile": {"enabled": True}, "activation_checkpointing": {"policy": "selective"}}
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.policy"):
        load_config(source)
    load_config({**source, "activation_checkpointing": {"policy": "full"}})


def test_is_public() -> None:
    assert zerorun.checkpointing.checkpoint is checkpoint


def test_flops_of_attention_with_fewer_heads_of_keys() -> None:
    """Each head of keys is used by two of queries: as many products as if they were repeated."""
    query, key, value = torch.Size((2, 4, 5, 8)), torch.Size((2, 2, 7, 8)), torch.Size((2, 2, 7, 6))
    shapes = query, torch.Size((2, 4, 7, 8)), torch.Size((2, 4, 7, 6))
    assert selective._attention_flops(query, key, value) == flop_counter.sdpa_flop_count(*shapes)


def test_a_compiled_function_may_call_it() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)

    def loss(function: Any) -> torch.Tensor:
        return (function(layer, x) * 2.0).sum()

    expected = torch.autograd.grad(loss(lambda layer, x: layer(x)), layer.weight)
    found = torch.autograd.grad(torch.compile(loss, backend="eager")(checkpoint), layer.weight)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", ("full", "selective"))
@pytest.mark.parametrize("in_host", (False, True))
@pytest.mark.parametrize("layout", (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc))
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors(layout: torch.layout, in_host: bool, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "SMALL_BYTES", 1)
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(8, 8)
    graph = torch.eye(8).to_sparse(layout=layout).requires_grad_(layout == torch.sparse_coo)

    def block(graph: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(graph * 2.0, layer(x)).tanh()

    expected = torch.autograd.grad(block(graph, x).sum(), layer.weight)
    pool, selection = HostPool(torch.device("cpu")) if in_host else None, Selection() if policy == "selective" else None
    for _ in range(2):
        output = run(block, (graph, x), {}, pool, selection)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), layer.weight), expected, rtol=0.0, atol=0.0)
    kept = kept_bytes(block, graph, x, policy=policy)
    assert kept >= x.nbytes + 8 * 4, "the values of the sparse tensor count"


def test_a_sparse_input_changed_in_place_is_named() -> None:
    layer, graph = nn.Linear(8, 8), torch.eye(8).to_sparse()
    with pytest.raises(ModelError, match="changed in place"):
        run(lambda graph, x: torch.sparse.mm(graph.mul_(2.0), layer(x)), (graph, torch.randn(8, 8)), {})
