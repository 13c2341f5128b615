"""Bytes held and bytes sent are those of the ZeRO formulas, nothing moves or grows in the steady state, and the Python
work of a step depends on units, not on parameters.

With P parameters on N ranks and Adam (master and two moments in fp32, gradients in fp32), a rank holds

    stage 0    stage 1             stage 2             stage 3
    18 P       6 P + 12 P / N      2 P + 16 P / N      18 P / N      bytes in bf16
    16 P       8 P +  8 P / N      4 P + 12 P / N      16 P / N      bytes in fp32, where weights are their own masters

and the slots that units share; it sends 2 P (N - 1) / N elements a step, at stage 3 at most 3 P (N - 1) / N.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Block, Case, Place, reset
from torch import nn
from training import make_config, make_engine

import zerorun
from zerorun.distributed.layout import Layout, build_layout
from zerorun.distributed.transport import peer_memory
from zerorun.distributed.transport.gloo import Gloo
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.plan.reductions import MAX_REDUCING, Reductions
from zerorun.plan.units import UnitPolicy, choose_units
from zerorun.zero.gathers import gathers
from zerorun.zero.unit import Unit

ITEMSIZE = {"fp32": 4, "bf16": 2}
every_stage = pytest.mark.parametrize("stage", range(4))


class Even(nn.Module):
    """Divides by 2 and 4 ranks without padding, if ``width`` is a multiple of 32. Width 20 needs padding everywhere."""

    def __init__(self, width: int = 32, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=width % 32 != 0) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Gpt2(nn.Module):
    """Real blocks: parameters of many sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(24) for _ in range(4))
        self.last = nn.Linear(24, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _loss(width: int) -> Any:
    def loss(model: Any, place: Place) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1 + place.rank + 10 * place.step + 100 * place.micro)
        return model(torch.randn(2, 3, width, generator=generator)).float().square().mean()

    return loss


CASES = {
    "even": Case("even", Even, _loss(32)),
    "padded": Case("padded", lambda: Even(20), _loss(20)),
    "blocks": Case("blocks", Gpt2, _loss(24)),
}


# -- what the formulas say ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ledger:
    """The layouts of a model's units for ``ranks`` ranks; the first is that of the root.

    ``slots`` for parameters: one for the unit in use, and one for the next if that is gathered meanwhile. Three ranks
    exchange over sockets: with two slots for gradients, one is on the wire while autograd fills the other.
    """

    layouts: list[Layout]
    ranks: int
    slots: int = 2

    @property
    def grad_slots(self) -> int:
        return 2 if self.slots == 2 and self.ranks == 3 else 1

    @classmethod
    def of(cls, module: nn.Module, ranks: int, slots: int = 2) -> Ledger:
        layouts = []
        for spec in choose_units(module, UnitPolicy()):
            names, shapes = [name for name, _ in spec.params], [tuple(param.shape) for _, param in spec.params]
            layouts.append(build_layout(names, shapes, ranks))
        return cls(layouts, ranks, slots)

    @property
    def padding(self) -> int:
        return sum(layout.padding for layout in self.layouts)

    @property
    def full(self) -> int:
        """Elements of all flat buffers."""
        return sum(layout.numel for layout in self.layouts)

    @property
    def shard(self) -> int:
        return self.full // self.ranks

    def optimized(self, rank: int, stage: int) -> int:
        """Elements that the optimizer of ``rank`` sees: from its first parameter in a unit to the end of its last."""
        total = 0
        for layout in self.layouts:
            if stage == 0 or self.ranks == 1:
                total += layout.entries[-1].end
            else:
                pieces = layout.pieces(rank)
                if pieces:
                    total += pieces[-1].shard_start + pieces[-1].numel - pieces[0].shard_start
        return total

    def memory(self, rank: int, stage: int, itemsize: int) -> dict[str, int]:
        owned = self.full if stage == 0 else self.shard
        root, largest = self.layouts[0].numel, max(layout.numel for layout in self.layouts[1:])
        slots = 0
        if stage >= 2:
            slots += 4 * (self.grad_slots * largest + root)
        if stage == 3:
            slots += self.slots * -(-itemsize * largest // 64) * 64 + itemsize * (root - root // self.ranks)
        return {
            "parameters": itemsize * (self.shard if stage == 3 else self.full),
            "gradients": 4 * (self.shard if stage >= 2 else self.full),
            "master": 4 * owned if itemsize == 2 else 0,
            "moments": 8 * self.optimized(rank, stage),
            "slots": slots,
            "buffers": 0,
        }

    def sent(self, stage: int, itemsize: int, accumulation: int = 1) -> int:
        """Bytes that one rank sends in a step."""
        away = [layout.numel - layout.numel // self.ranks for layout in self.layouts]
        reduced = 4 * sum(away) * (accumulation if stage >= 2 else 1)
        if stage == 0:
            return reduced + 4 * sum(away)
        if stage < 3:
            return reduced + itemsize * sum(away)
        blocks = list(range(1, len(self.layouts)))
        slot_of = [-1, *((block - 1) % self.slots for block in blocks)]
        visits = (blocks + blocks[::-1]) * accumulation
        gathered = gathers(visits, slot_of, [None] * self.slots)
        return reduced + itemsize * (away[0] + sum(away[block] for block in gathered))


# -- what an engine does -----------------------------------------------------------------------------------------


def run_step(engine: zerorun.Engine, case: Case, step: int) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        engine.backward(case.loss(engine, Place(dist.get_rank(), step, micro)))
        engine.step()


def sent_bytes(engine: zerorun.Engine) -> int:
    report = engine.communication_report()
    return sum(entry["bytes"] for label, entry in report.items() if not label.startswith("control"))


def account(name: str, config: dict[str, Any]) -> tuple[dict[str, int], int, int]:
    """(memory by kind, without the receive buffers; those; bytes sent in a steady step)."""
    case = CASES[name]
    engine = make_engine(case, config)
    for step in range(2):
        run_step(engine, case, step)
    before = sent_bytes(engine)
    run_step(engine, case, 2)
    sent = sent_bytes(engine) - before
    memory, pool = engine.memory_report(), engine.comm.buffer_bytes
    memory["slots"] -= pool
    engine.destroy()
    return memory, pool, sent


# Model, ranks, slots for parameters.
CELLS = [("even", 2, 2), ("even", 4, 1), ("padded", 2, 1), ("padded", 3, 2), ("blocks", 3, 1), ("blocks", 4, 2)]


@pytest.mark.each_value
@every_stage
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize(("name", "ranks", "slots"), CELLS)
def test_bytes_are_those_of_the_formula(name: str, ranks: int, slots: int, precision: str, stage: int) -> None:
    itemsize = ITEMSIZE[precision]
    ledger = Ledger.of(CASES[name].build(), ranks, slots)
    config = make_config(stage, precision=precision, zero_optimization={"overlap_comm": slots > 1})
    results = run_ranks(ranks, account, name, config)
    for rank, (memory, pool, sent) in enumerate(results):
        assert memory == ledger.memory(rank, stage, itemsize)
        assert sent == ledger.sent(stage, itemsize)
        largest = max(layout.numel for layout in ledger.layouts)
        assert pool <= 8 * (largest - largest // ranks) + 128 * ranks
    if not ledger.padding:
        check_textbook(results[0], ledger.full, ranks, precision, stage)


def check_textbook(found: tuple[dict[str, int], int, int], params: int, ranks: int, precision: str, stage: int) -> None:
    """Without padding the figures are the papers' (Rajbhandari et al. 2020, arXiv:1910.02054)."""
    memory, _, sent = found
    whole, sharded = {
        "bf16": ((18, 0), (6, 12), (2, 16), (0, 18)),
        "fp32": ((16, 0), (8, 8), (4, 12), (0, 16)),
    }[precision][stage]
    held = sum(size for kind, size in memory.items() if kind != "slots")
    assert held == whole * params + sharded * params // ranks
    limit = 3 if stage == 3 else 2
    elements = sent / 4 if precision == "fp32" else None
    if elements is not None:
        assert elements <= limit * params * (ranks - 1) / ranks
        assert stage == 3 or elements == limit * params * (ranks - 1) / ranks


def slots(config: dict[str, Any]) -> tuple[int, bool]:
    """(shared slots for parameters, whether ranks read each other's memory)."""
    engine = make_engine(CASES["even"], config)
    found = engine.runtime.made.param_slots.count, engine.comm.reads_peers
    engine.destroy()
    return found


@pytest.mark.parametrize("ranks", (2, 3))
def test_stage_3_looks_ahead_where_bytes_move_meanwhile(ranks: int) -> None:
    for count, reads_peers in run_ranks(ranks, slots, make_config(3)):
        assert count == (1 if reads_peers else 2)


def test_padding_is_small() -> None:
    """Less than 16 elements for a parameter and for a shard."""
    for name, case in CASES.items():
        module = case.build()
        for ranks in (2, 3, 4, 7):
            ledger = Ledger.of(module, ranks)
            parameters = len(list(module.parameters()))
            assert ledger.padding <= 15 * (parameters + ranks * len(ledger.layouts)), name
    assert Ledger.of(CASES["even"].build(), 4).padding == 0


@every_stage
def test_accumulation_sends_what_it_must(stage: int) -> None:
    """Whole gradients are reduced once a step, shards in every backward; weights are published once a step."""
    ledger = Ledger.of(CASES["even"].build(), 2)
    config = make_config(stage, accumulation=3, zero_optimization={"overlap_comm": True})
    for _, _, sent in run_ranks(2, account, "even", config):
        expected = ledger.sent(stage, 4, accumulation=3)
        assert sent == expected if stage < 3 else sent <= expected  # slots may still hold a unit of the last backward


def test_half_the_bytes_on_a_bf16_wire() -> None:
    full = run_ranks(2, account, "even", make_config(0))[0][2]
    config = make_config(2, precision="bf16", communication_data_type="bf16")
    assert run_ranks(2, account, "even", config)[0][2] * 2 == full


def reductions_on_their_way(overlap: bool) -> int:
    """How many there are at most in a backward."""
    seen, real = [], Reductions.begin

    def begin(self: Reductions[Unit], unit: Unit) -> None:
        real(self, unit)
        seen.append(len(self._in_flight))

    case = Case("row", lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(6))), classes=("Sequential",))
    engine = make_engine(case, make_config(1, zero_optimization={"overlap_comm": overlap}))
    Reductions.begin = begin  # type: ignore[method-assign, assignment]
    try:
        engine.backward(engine(torch.ones(2, 4)).sum())
    finally:
        Reductions.begin = real  # type: ignore[method-assign]
    engine.zero_grad()
    engine.destroy()
    assert len(seen) >= 6
    return max(seen)


@pytest.mark.parametrize(("overlap", "most"), ((True, MAX_REDUCING), (False, 0)))
def test_no_more_reductions_are_on_their_way_than_are_counted(overlap: bool, most: int) -> None:
    """Each has a buffer to receive into."""
    assert run_ranks(2, reductions_on_their_way, overlap) == [most] * 2


def broadcast_bytes() -> list[int]:
    """Of a tensor of 20 bytes, from each rank in turn."""
    place = (dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    transport = Gloo("test", None, *place, CommunicationStatistics())
    found = []
    for source in range(dist.get_world_size()):
        transport.broadcast(torch.zeros(5), f"from {source}", source)
        found.append(transport.statistics.traffic[f"from {source}"].bytes)
    return found


def test_a_broadcast_is_sent_to_every_other_rank() -> None:
    assert run_ranks(3, broadcast_bytes) == [[40, 0, 0], [0, 40, 0], [0, 0, 40]]


# -- the steady state --------------------------------------------------------------------------------------------


def addresses(engine: zerorun.Engine) -> list[int]:
    """Of every buffer that the engine keeps."""
    tensors = [*engine.runtime.made.param_slots.buffers, *engine.runtime.made.grad_slots.buffers]
    for unit in engine.units:
        for flat_group in unit.flat_groups:
            kept = (flat_group.full, flat_group.shard, flat_group.master, flat_group.grad_full, flat_group.grad_shard)
            tensors += [tensor for tensor in kept if tensor is not None]
    return [tensor.data_ptr() for tensor in tensors]


def live_tensors() -> tuple[int, int]:
    """(tensors, bytes of their storages) that Python can reach, once gloo's threads have let go of theirs."""
    found = [count_tensors()]
    while (len(found) < 100 and len(set(found[-5:])) > 1) or len(found) < 5:
        time.sleep(0.01)
        found.append(count_tensors())
    return found[-1]


def count_tensors() -> tuple[int, int]:
    gc.collect()
    real = (torch.Tensor, torch.nn.Parameter)  # torch.compile leaves others, without storage, in a worker it ran in
    tensors = [thing for thing in gc.get_objects() if type(thing) in real]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(sizes.values())


def watch(name: str, config: dict[str, Any]) -> list[tuple[Any, ...]]:
    case = CASES[name]
    engine = make_engine(case, config)
    found = []
    for step in range(5):
        run_step(engine, case, step)
        engine.comm.fence()  # what others may still read is alive until they have
        found.append((addresses(engine), engine.memory_report(), engine.comm.buffer_bytes, live_tensors()))
    engine.destroy()
    return found


@pytest.mark.each_value
@every_stage
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_nothing_moves_or_grows_after_the_second_step(stage: int, precision: str) -> None:
    config = make_config(stage, precision=precision, accumulation=2, clip=0.1)
    for found in run_ranks(2, watch, "blocks", config):
        second = found[1]
        for step, later in enumerate(found[2:], 2):
            for what, ours, theirs in zip(("addresses", "memory", "pool", "tensors"), later, second, strict=True):
                assert ours == theirs, f"{what} in step {step}"


# -- Python work -------------------------------------------------------------------------------------------------


class Many(nn.Module):
    """``count`` parameters that the forward uses in one call."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"p{index}", nn.Parameter(torch.zeros(32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat(tuple(self._parameters.values())).sum()  # type: ignore[arg-type]


class ManyBlocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Many(count) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


WAITING = ("peer_memory.py", "waits.py", "watch/board.py")


def python_calls(stage: int, precision: str, count: int) -> dict[str, int]:
    """By function, the calls of Python functions in one step.

    Left out are those that ask, or note, whether the other rank has come so far.
    """
    config = make_config(stage, precision=precision, clip=1.0)
    engine = make_engine(Case("many", lambda: reset(ManyBlocks(count))), config)
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and not frame.f_code.co_filename.endswith(WAITING):
            calls[f"{frame.f_code.co_filename}: {frame.f_code.co_name}"] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "_CHECK_S", 60.0)  # a wait of 50 ms, on a busy machine, would look for the time limit
        for step in range(4):
            if step == 3:
                engine.comm.fence()
                sys.setprofile(profile)
            engine.backward(engine(torch.ones(2, 8)).float().mean())
            engine.step()
        engine.comm.fence()
        sys.setprofile(None)
    engine.destroy()
    return dict(calls)


@pytest.mark.each_value
@every_stage
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_python_calls_depend_on_units_only(stage: int, precision: str) -> None:
    few, many = (run_ranks(2, python_calls, stage, precision, count)[0] for count in (6, 60))
    assert {name: (few.get(name), many.get(name)) for name in few | many if few.get(name) != many.get(name)} == {}
