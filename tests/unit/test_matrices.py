"""Owners of matrices, what ranks send each other for them, and the iteration, without ranks."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import _muon as theirs

import zerorun
from zerorun.distributed.layout import build_layout
from zerorun.distributed.topology import Topology
from zerorun.errors import ModelError
from zerorun.model_setup.checked_arguments import take_in
from zerorun.ops import newton_schulz
from zerorun.ops.newton_schulz import orthogonalize
from zerorun.optim.muon import Muon
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.matrix_exchange import TURN_NUMEL, MatrixExchange, choose_owners, cost_of, plan_exchange

LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


@pytest.mark.parametrize(("ranks", "most"), [(1, 1.0), (8, 1.01), (16, 1.01), (64, 1.07)])
def test_megatron_2162_6379_owners_of_llama_8b_have_as_much_to_do(ranks: int, most: float) -> None:
    """By elements in each unit, the same ranks would have it all: 2.15, 4.3 and 17."""
    shapes = LLAMA_8B * 32
    chosen = choose_owners(shapes, ranks)
    assert chosen == choose_owners(list(shapes), ranks)
    loads = Counter[int]()
    for shape, (owner, _) in zip(shapes, chosen, strict=True):
        loads[owner] += cost_of(shape)
    assert max(loads.values()) <= most * sum(loads.values()) / ranks


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_turns_hold_one_large_matrix_or_several_small_ones(ranks: int) -> None:
    for shapes in (LLAMA_8B * 32, [(512, 512)] * 100, [(4, 3)], []):
        held = Counter[tuple[int, int]]()
        for shape, place in zip(shapes, choose_owners(shapes, ranks), strict=True):
            held[place] += prod(shape)
        assert max(held.values(), default=0) <= max([TURN_NUMEL, *map(prod, shapes)])
        turns = {turn for _, turn in held}
        assert turns == set(range(len(turns)))


# -- bytes ---------------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, width: int = 256, blocks: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50)

    @staticmethod
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, width))


def config_of(stage: int, **params: Any) -> dict[str, Any]:
    optimizer = {"type": "Muon", "params": {"lr": 0.01, **params}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "optimizer": optimizer}


def exchange_of(model: nn.Module, config: dict[str, Any], world: int, rank: int) -> MatrixExchange:
    wanted, raw = take_in(model, config, None, None, None, world)
    plan = make_plan(model, wanted, raw, planned_topology(wanted, world, world, rank), "gloo", "cpu")
    assert plan.matrices is not None
    return plan.matrices


def llama_8b(ranks: int) -> list[MatrixExchange]:
    """Of the blocks, on each of the ranks that share them."""
    norms = [(4096,), (4096,)]
    names = {f"{block}.{n}": shape for block in range(32) for n, shape in enumerate([*LLAMA_8B, *norms])}
    by_block = [[name for name in names if name.startswith(f"{block}.")] for block in range(32)]
    layouts = [build_layout(own, [names[name] for name in own], ranks) for own in by_block]
    shapes = {name: shape for name, shape in names.items() if len(shape) == 2}
    places = [Topology.plan(ranks, rank) for rank in range(ranks)]
    return [plan_exchange(layouts, shapes, frozenset(), place, shares=False, fp32=False) for place in places]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_bytes_are_those_of_the_formula(ranks: int) -> None:
    """4 Psi (N - 1) / N^2 for each rank, up to what owners have beyond an even part of their own matrices."""
    found = llama_8b(ranks)
    psi, formula = 32 * sum(map(prod, LLAMA_8B)), 4 * 32 * sum(map(prod, LLAMA_8B)) * (ranks - 1) / ranks**2
    assert all([m.owner for m in one.matrices] == [m.owner for m in found[0].matrices] for one in found)
    assert sum(m.here for one in found for m in one.matrices) == psi
    sent = [[sum(way) for way in zip(*(one.sent(turn) for turn in range(len(one.turns))), strict=True)] for one in found]
    there, back = (sum(way) for way in zip(*sent, strict=True))
    assert there == back == 2 * sum(m.here for one in found for m in one.matrices if m.owner != one.rank)
    assert there + back == pytest.approx(ranks * formula, rel=0.02)
    assert max(map(sum, sent)) <= 1.06 * formula
    assert {(one.staging, one.owned) for one in found} == {(found[0].staging, found[0].owned)}
    assert found[0].bytes < 400 << 20


def test_ranks_that_have_it_all_send_results_only() -> None:
    with torch.device("meta"):
        model = Blocks()
    found = [exchange_of(model, config_of(0, ns_dtype="fp32"), 4, rank) for rank in range(4)]
    psi = sum(m.numel for m in found[0].matrices)
    assert all(one.sent(turn)[0] == 0 for one in found for turn in range(len(one.turns)))
    assert sum(one.sent(turn)[1] for one in found for turn in range(len(one.turns))) == 3 * 4 * psi


# -- the iteration -------------------------------------------------------------------------------------------------------


def theirs_of(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kept = torch.Tensor.clone if dtype == torch.float32 else torch.Tensor.bfloat16
    with mock.patch.object(torch.Tensor, "bfloat16", kept):
        return theirs._zeropower_via_newtonschulz(matrix, newton_schulz.MUON, newton_schulz.STEPS, newton_schulz.EPS)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("method", newton_schulz.METHODS)
@pytest.mark.parametrize("shape", [(64, 64), (48, 200), (200, 48), (1, 7), (7, 1)])
def test_the_iteration_is_that_of_torch(shape: tuple[int, int], method: str) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = matrix.clone()
    exact = theirs_of(matrix.clone(), torch.float32)
    assert relative(orthogonalize(matrix, torch.float32, method=method), exact) < 1e-5
    rounded = orthogonalize(matrix, torch.bfloat16, method=method)
    assert rounded.dtype == torch.bfloat16
    assert rounded.is_contiguous()
    assert relative(rounded, exact) < 0.03
    assert torch.equal(matrix, before)
    assert relative(orthogonalize(matrix, torch.bfloat16), theirs_of(matrix.clone(), torch.bfloat16)) < 0.01


def test_nothing_becomes_nothing() -> None:
    for method in newton_schulz.METHODS:
        assert not orthogonalize(torch.zeros(3, 5), torch.bfloat16, method=method).any()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", newton_schulz.SCALES)
def test_a_step_in_one_process_is_that_of_torch(scale: str, nesterov: bool) -> None:
    start, generator = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    ours, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    how = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.8, "nesterov": nesterov, "adjust_lr_fn": scale}
    made, reference = Muon([ours], **how, ns_dtype="fp32"), torch.optim.Muon([other], **how)
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        for _ in range(4):
            ours.grad = torch.randn(12, 5, generator=generator)
            other.grad = ours.grad.clone()
            made.step()
            reference.step()
    assert relative(ours.detach(), other.detach()) < 1e-5


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_a_matrix_are_matrices_for_themselves(transposed: bool) -> None:
    """A step of query, key and value in one parameter, and of the three of them."""
    lengths, start = (8, 4, 4), torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    apart = [nn.Parameter(part.clone()) for part in start.split(lengths)]
    fused = nn.Parameter((start.T if transposed else start).clone(memory_format=torch.contiguous_format))
    fused.grad = (gradient.T if transposed else gradient).contiguous()
    for param, part in zip(apart, gradient.split(lengths), strict=True):
        param.grad = part.clone()
    Muon(apart, lr=0.1, ns_dtype="fp32").step()
    Muon([{"params": [fused], "use_muon": True, "ns_parts": lengths}], lr=0.1, ns_dtype="fp32").step()
    found = fused.detach().T if transposed else fused.detach()
    assert relative(found, torch.cat(apart).detach()) < 1e-6


def test_parts_that_do_not_fill_a_side_are_refused() -> None:
    model = Blocks(8, 2)
    group = {"params": [model.blocks[0][0].weight], "use_muon": True, "ns_parts": [16, 8, 7]}
    with pytest.raises(ModelError, match=r"ns_parts = \[16, 8, 7\], but a matrix of shape \[32, 8\]"):
        matrices(model, [group])
    group["ns_parts"] = [16, 8, 8]
    assert matrices(model, [group]) == {"blocks.0.0.weight"}


def test_a_step_in_vain_leaves_nothing_behind() -> None:
    old, new = torch.ones(8), torch.ones(4)
    optimizer = Muon([{"params": [old, new], "use_muon": True}])
    optimizer.begin([old])
    optimizer.begin([old, new])
    assert optimizer.state.keys() == {old, new}
    optimizer.take_back()
    assert optimizer.state.keys() == {old}
    assert optimizer.state[old].keys() == {"momentum_buffer"}


# -- roles ---------------------------------------------------------------------------------------------------------------


def ways(model: nn.Module, groups: Any = None) -> dict[str, bool]:
    """By name, whether Muon has it."""
    _, raw = take_in(model, config_of(1), None, None, groups, 1)
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)]: group["use_muon"] for group in raw.groups for param in group["params"]}


def matrices(model: nn.Module, groups: Any = None) -> set[str]:
    return {name for name, has in ways(model, groups).items() if has}


def test_matrices_of_blocks_are_muons_whatever_their_names() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    for tied in (True, False):
        llama = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
        assert matrices(llama) == {n for n, p in llama.named_parameters() if ".layers." in n and p.dim() == 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=8))
    assert matrices(gpt2) == {n for n, p in gpt2.named_parameters() if ".h." in n and p.dim() == 2}
    assert len(matrices(gpt2)) == 8


def test_a_row_of_layers_ends_with_the_head() -> None:
    row = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 9))
    assert matrices(row) == {"1.weight", "3.weight"}
    embedded = nn.Sequential(*(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4)) for _ in range(2)))
    assert matrices(embedded) == {"0.1.weight", "1.1.weight"}


def test_deepspeed_8438_llamafactory_8041_a_model_made_in_parts_has_the_same_roles() -> None:
    with zerorun.zero.Init():
        model = Blocks(8, 2)
    assert matrices(model) == matrices(Blocks(8, 2))


def test_groups_have_the_last_word() -> None:
    model = Blocks(8, 2)
    head, rest = list(model.head.parameters()), [*model.embedding.parameters(), *model.blocks.parameters()]
    assert matrices(model, [{"params": rest, "use_muon": False}, {"params": head[:1], "use_muon": True}]) == {"head.weight"}
    assert matrices(model, [{"params": rest, "lr": 0.5}]) == matrices(model)
    with pytest.raises(ModelError, match=r"'head\.bias' of shape \(50,\)"):
        matrices(model, [{"params": head, "use_muon": True}])
    with pytest.raises(ModelError, match="finds no matrix"):
        matrices(nn.Linear(3, 4))


def test_filters_are_matrices_if_groups_say_so() -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 2) for _ in range(2)), nn.Linear(4, 4), nn.Linear(4, 4))
    assert matrices(model) == {"2.weight"}
    filters = [{"params": [model[0].weight], "use_muon": True}, {"params": list(model[2].parameters())}]
    assert matrices(model, filters) == {"0.weight", "2.weight"}
    assert exchange_of_groups(model, filters).matrices[0].shape == (3, 12)


def exchange_of_groups(model: nn.Module, groups: Any) -> MatrixExchange:
    wanted, raw = take_in(model, config_of(1), None, None, groups, 2)
    plan = make_plan(model, wanted, raw, planned_topology(wanted, 2, 2, 0), "gloo", "cpu")
    assert plan.matrices is not None
    return plan.matrices


def test_rates_by_kind_and_by_group() -> None:
    model = Blocks(8, 2)
    groups = [{"params": list(model.blocks.parameters())}, {"params": list(model.head.parameters()), "lr": 0.5}]
    _, raw = take_in(model, config_of(1, muon_lr=0.2, adam_lr=0.3), None, None, groups, 1)
    from zerorun.optim.optimizers import build_optimizer

    made = build_optimizer(raw.name, raw.params, raw.groups)
    assert [(group["use_muon"], group["lr"]) for group in made.param_groups] == [
        (True, 0.2),
        (False, 0.3),
        (True, 0.5),
        (False, 0.5),
    ]


def test_the_configuration_says_how_much_goes_which_way() -> None:
    wanted, _ = take_in(Blocks(8, 2), config_of(1), None, None, None, 1)
    note = wanted.effective()["optimizer.type"].note
    assert note is not None
    assert note.startswith("Muon updates 6 matrices with 1,152 elements, and AdamW 9 parameters with ")
    assert 'those for DeepSpeed need "adjust_lr_fn": "original"' in note
    wanted, _ = take_in(Blocks(8, 2), config_of(1, adjust_lr_fn="original"), None, None, None, 1)
    assert "Learning rates" not in str(wanted.effective()["optimizer.type"].note)
