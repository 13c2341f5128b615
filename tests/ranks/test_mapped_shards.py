"""Stage 3 on one host, shards of whole pages: the gathered parameters are the memory of all ranks, and no copy."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Case, Place, reset
from reference import Result, differences, train_reference
from torch import nn
from training import make_config, make_engine, train

import zerorun
from zerorun.distributed import layout
from zerorun.distributed.layout import build_layout
from zerorun.distributed.transport import huge_pages
from zerorun.distributed.transport.mapped_shards import _places
from zerorun.plan import make_plan

STEPS = 2
MODELS = ("tied", "unused_alternating_steps", "moe")  # by day
CASE = CASES["plain"]


@contextmanager
def whole_pages() -> Iterator[None]:
    """Shards of small models are whole pages, too."""
    usual = layout.LARGE_SHARD
    layout.LARGE_SHARD = 1
    try:
        yield
    finally:
        layout.LARGE_SHARD = usual


def train_mapped(model: str, config: dict[str, Any]) -> Result:
    with whole_pages():
        return train(CASES[model], config, STEPS)


def flat_groups(engine: zerorun.Engine) -> list[Any]:
    return [flat_group for unit in engine.units if not unit.resident for flat_group in unit.flat_groups]


def mappings() -> int:
    """Ranges of addresses of this process that are shards of some rank."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:zerorun shards" in line for line in maps)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- results -----------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("model", by_day(CASES, *MODELS))
def test_mapped_shards_give_the_same_run(model: str, precision: str) -> None:
    number = list(CASES).index(model)
    world, accumulation, clip = (2, 4)[number % 4 // 3], (1, 3)[number % 2], (0.0, 0.5)[number // 2 % 2]
    config = make_config(3, accumulation=accumulation, clip=clip, precision=precision)
    if precision == "fp32":
        expected = train_reference(
            CASES[model], world_size=world, steps=STEPS, accumulation=accumulation, clip=clip, optimizer="AdamW"
        )
        for result in run_ranks(world, train_mapped, model, config):
            assert differences(result, expected) == []
        return
    resident = run_ranks(world, train_mapped, model, {**config, "zero_optimization": {"stage": 2}})
    for result, usual in zip(run_ranks(world, train_mapped, model, config), resident, strict=True):
        assert result.losses == usual.losses
        assert all(torch.equal(value, usual.weights[name]) for name, value in result.weights.items())


# -- memory ------------------------------------------------------------------------------------------------------


def count_memory() -> dict[str, Any]:
    before = mappings(), open_files()
    with whole_pages():
        engine = make_engine(CASE, make_config(3))
    own = sum(flat_group.shard.nbytes for flat_group in flat_groups(engine))
    sent = []
    for _ in range(2):  # in the first, ranks ask one another for the order
        sent.append(bytes_of_gathers(engine))
        with torch.no_grad():
            CASE.loss(engine, Place(0, 0, 0))
    found = {
        "mapped": all(flat_group.plan.mapped for flat_group in flat_groups(engine)),
        "ranges of one segment": (mappings() - before[0]) / len(flat_groups(engine)),
        "bytes of parameter slots": engine.runtime.made.param_slots.bytes,
        "shards are in place": all(s.shard.data_ptr() == s.full[s.plan.low :].data_ptr() for s in flat_groups(engine)),
        "gathered per own byte": (bytes_of_gathers(engine) - sent[1]) / own,
    }
    engine.destroy()
    del engine
    gc.collect()
    found["ranges that stay"], found["files that stay"] = mappings() - before[0], open_files() - before[1]
    return found


def bytes_of_gathers(engine: zerorun.Engine) -> int:
    return sum(traffic.bytes for label, traffic in engine.comm.traffic.items() if "all-gather" in label)


@pytest.mark.parametrize("world", (2, 4))
def test_nothing_is_held_twice_and_nothing_stays(world: int) -> None:
    for found in run_ranks(world, count_memory):
        assert found == {
            "mapped": True,
            "ranges of one segment": world,
            "bytes of parameter slots": 0,
            "shards are in place": True,
            "gathered per own byte": world - 1,  # what others are given is counted as if it were sent
            "ranges that stay": 0,
            "files that stay": 0,
        }


def large_shards(width: int) -> tuple[list[bool], int]:
    """(which flat groups are mapped, bytes of slots) of blocks with ``width`` ** 2 parameters, as they are by default."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))))
    engine = make_engine(Case("large", lambda: model, lambda model, place: model(torch.ones(1, 8)).sum()), make_config(3))
    found = [flat_group.plan.mapped for flat_group in flat_groups(engine)], engine.runtime.made.param_slots.bytes
    engine.destroy()
    return found


def test_small_shards_are_not_padded_to_pages() -> None:
    assert run_ranks(2, large_shards, 100) == [([False, False], aligned(100 * 100, 2))] * 2
    assert run_ranks(2, large_shards, 1001) == [([True, True], 0)] * 2
    assert run_ranks(3, large_shards, 1001) == [([False, False], 2 * aligned(1001 * 1001, 3))] * 3  # over gloo


def others_resident() -> int:
    """Bytes of other ranks' shards that count as resident in this process."""
    total, others = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "memfd:zerorun shards" in line:
                others = line.split()[1].endswith("p")  # private; the rank's own are shared
            elif line.startswith("Rss:") and others:
                total, others = total + int(line.split()[1]) * 1024, False
    return total


def build_tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(8)))


def resident_bytes(kept: float) -> dict[str, Any]:
    """For each step (looks, what it has of others at most, and what at its end), in blocks. ``kept``: that may stay."""
    data = torch.ones(4, 256, requires_grad=True)  # so that the first block has a backward hook, too
    case = Case("tower", build_tower, lambda model, place: model(data).sum(), classes=("Sequential",))
    block = 256 * 256 * 4 * (dist.get_world_size() - 1) // dist.get_world_size()
    make_plan.KEPT_BYTES, usual = int(kept * block), make_plan.KEPT_BYTES
    try:
        with whole_pages():
            engine = make_engine(case, make_config(3))
    finally:
        make_plan.KEPT_BYTES = usual
    seen: list[float] = []

    def look(*_: Any) -> None:
        seen.append(others_resident() / block)

    for layer in engine.module:
        layer[0].register_forward_hook(look)
        layer[0].register_full_backward_hook(look)
    found = []
    for _ in range(2):
        seen.clear()
        engine.backward(case.loss(engine, Place(0, 0, 0)))
        engine.step()
        found.append((len(seen), max(seen), others_resident() / block))
    return {
        "mapped": sum(s.plan.mapped for s in flat_groups(engine)),
        "steps": found,
        "slots": engine.runtime.made.param_slots.count,
    }


@pytest.mark.each_value
@pytest.mark.parametrize(("kept", "most"), by_day(((0, 1.0), (3, 4.0), (3.9, 4.0), (8, 8.0)), (3, 4.0)))
@pytest.mark.parametrize("world", by_day((2, 4), 4))
def test_pages_of_others_stay_no_longer_than_in_a_slot_but_for_some(world: int, kept: float, most: float) -> None:
    for found in run_ranks(world, resident_bytes, kept):
        assert found == {"mapped": 8, "steps": [(16, most, 0.0)] * 2, "slots": 1}


# -- huge pages --------------------------------------------------------------------------------------------------

HUGE = 2 << 20


def collapses() -> bool:
    """True if this kernel makes one huge page of those of a file in memory, when asked to."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    file = os.memfd_create("probe")
    os.ftruncate(file, HUGE)
    with mmap.mmap(-1, 2 * HUGE) as room:  # the end of which becomes one aligned page of the file
        start = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % HUGE
        address = ctypes.addressof(ctypes.c_char.from_buffer(room, start))
        fixed = mmap.MAP_SHARED | 0x10
        assert library.mmap(address, HUGE, mmap.PROT_READ | mmap.PROT_WRITE, fixed, file, 0) == address
        os.close(file)
        room[start] = 1
        return library.madvise(address, HUGE, 25) == 0


def huge_bytes() -> tuple[int, int]:
    """Bytes of huge pages that this process has mapped: of its own shards, of others'."""
    found, kind = [0, 0], -1
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.split()[0][-1] != ":":
                kind = int(line.split()[1].endswith("p")) if "memfd:zerorun shards" in line else -1
            elif line.startswith("ShmemPmdMapped:") and kind >= 0:
                found[kind] += int(line.split()[1]) * 1024
    return found[0], found[1]


def build_wide() -> nn.Module:
    torch.manual_seed(0)  # a block takes 9.0 MB: neither it nor its shards are a whole number of huge pages
    return nn.Sequential(*(nn.Sequential(nn.Linear(1500, 1500, bias=False)) for _ in range(2)))


def train_wide(stage: int, advice: int) -> dict[str, Any]:
    """Two steps. ``advice``: that makes pages huge."""
    data = torch.randn(4, 1500, generator=torch.Generator().manual_seed(dist.get_rank()))
    case = Case("wide", build_wide, lambda model, place: model(data).pow(2).mean(), classes=("Sequential",))
    engine = make_engine(case, make_config(stage))
    seen, losses = [huge_bytes()], []
    engine.module[1][0].register_forward_hook(lambda *_: seen.append(huge_bytes()))
    huge_pages._MADV_COLLAPSE, usual = advice, huge_pages._MADV_COLLAPSE
    try:
        for _ in range(2):
            losses.append(engine.backward(case.loss(engine, Place(0, 0, 0))))
            engine.step()
    finally:
        huge_pages._MADV_COLLAPSE = usual
    found = {"losses": losses, "weights": engine.state_dict(), "huge": [*seen, huge_bytes()]}
    engine.destroy()
    return found


@pytest.mark.parametrize("world", by_day((2, 4), 2))
def test_shards_lie_in_huge_pages_where_the_kernel_allows(world: int) -> None:
    usual = run_ranks(world, train_wide, 2, 25)
    for advice in (25, 9999):  # as Linux has it; one that no kernel knows
        for rank, found in enumerate(run_ranks(world, train_wide, 3, advice)):
            own = [whole_huge_pages(peer, world) * (advice == 25 and collapses()) for peer in range(world)]
            ours, others = 2 * own[rank], 2 * (sum(own) - own[rank])  # of two blocks
            assert found["huge"] == [(0, 0), (0, 0), (ours, others), (ours, 0)]  # from the end of the first step on
            assert found["losses"] == usual[rank]["losses"]
            for name, weight in found["weights"].items():
                assert torch.equal(weight, usual[rank]["weights"][name])


def whole_huge_pages(rank: int, world: int) -> int:
    """Bytes of the huge pages that lie within the shard of ``rank``, if the flat buffer begins with one."""
    shard = build_layout(["weight"], [(1500 * 1500,)], world).numel * 4 // world
    return max((rank + 1) * shard // HUGE - -(-rank * shard // HUGE), 0) * HUGE


@pytest.mark.parametrize("rank", range(4))
def test_large_shards_begin_in_their_file_where_they_do_in_their_buffer(rank: int) -> None:
    """So that the kernel can map huge pages of them; also of kernels that do not."""
    sizes = [HUGE + 4096, 8192, 3 * HUGE, HUGE - 4096, 2 * HUGE + 12288]
    places, end = _places(sizes, rank)[:-1], 0
    for place, nbytes in zip(places, sizes, strict=True):
        assert end <= place < end + HUGE
        assert nbytes < HUGE or (place - rank * nbytes) % HUGE == 0
        end = place + nbytes
    assert _places(sizes, rank)[-1] == end


def many_segments() -> list[bool]:
    make_plan.MOST_RANGES, usual = 7, make_plan.MOST_RANGES
    try:
        with whole_pages():
            engine = make_engine(CASE, make_config(3))
    finally:
        make_plan.MOST_RANGES = usual
    forward_loss = float(CASE.loss(engine, Place(0, 0, 0)))
    found = [flat_group.plan.mapped for flat_group in flat_groups(engine)]
    engine.destroy()
    return [*found, forward_loss > 0]


def test_too_many_segments_are_not_mapped() -> None:
    assert run_ranks(2, many_segments) == [[False] * 4 + [True]] * 2


def aligned(numel: int, ranks: int) -> int:
    """Bytes of a slot for ``numel`` elements."""
    return build_layout(["weight"], [(numel,)], ranks).numel * 4


# -- writes ------------------------------------------------------------------------------------------------------


class Halved(nn.Module):
    """Halves its weight in its forward, on one rank, and so that torch does not count it, or it would be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rank = nn.Linear(128, 128), -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == dist.get_rank():
            self.linear.weight.data.mul_(0.5)
        return self.linear(x)


def build_halved() -> nn.Module:
    return reset(nn.Sequential(*(Halved() for _ in range(3))))


def write_in_forward() -> tuple[float, float]:
    """How much a parameter differs from a step without the writes: in the part of the rank that wrote, in the other."""
    case = Case("halved", build_halved, lambda model, place: model(torch.ones(1, 128)).sum() * 0.0, classes=("Halved",))
    config = make_config(3, optimizer="SGD")
    config["zero_optimization"]["unit_policy"] = ["Halved"]
    weights = []
    for rank in (-1, 0):
        with whole_pages():
            engine = make_engine(case, config)
        for module in engine.module:
            module.rank = rank
        engine.backward(case.loss(engine, Place(0, 0, 0)))
        engine.step()
        dist.barrier()
        weights.append(engine.state_dict()["1.linear.weight"].view(-1))
        engine.destroy()
    usual, found = weights
    low, high = slice(0, 10240), slice(10240, None)  # half of the weight and bias, to whole pages
    return float((found - usual)[low].abs().max()), float((found - usual)[high].abs().max())


def test_a_module_that_writes_to_its_weight_reaches_no_other_rank() -> None:
    for own, other in run_ranks(2, write_in_forward):
        assert own > 0
        assert other == 0


# -- where it does not work --------------------------------------------------------------------------------------


def without_files() -> tuple[Result, bool, Result, bool]:
    """(run, mapped?) where rank 1 cannot make a file, and where it cannot open those of others."""
    found: list[Any] = []
    for name in ("memfd_create", "open"):
        usual = getattr(os, name)

        def refuse(path: Any, *args: Any, usual: Any = usual) -> Any:
            if dist.get_rank() == 1 and ("/fd/" in str(path) or "zerorun" in str(path)):
                raise PermissionError(13, "planted")
            return usual(path, *args)

        setattr(os, name, refuse)
        try:
            found.append(train_mapped("plain", make_config(3)))
            with whole_pages():
                engine = make_engine(CASE, make_config(3))
            found.append(any(flat_group.plan.mapped for flat_group in flat_groups(engine)))
            engine.destroy()
        finally:
            setattr(os, name, usual)
    return tuple(found)


def test_all_ranks_map_or_none() -> None:
    expected = train_reference(CASE, world_size=2, steps=STEPS, accumulation=1, clip=0.0, optimizer="AdamW")
    for made, first, opened, second in run_ranks(2, without_files):
        assert (first, second) == (False, False)
        assert differences(made, expected) == []
        assert differences(opened, expected) == []
