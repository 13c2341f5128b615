"""Checkpoints of divided models without processes: who writes what, how it comes together, and what each rank reads."""

from __future__ import annotations

import ctypes
import json
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from covering import by_day
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerorun.checkpoint import cuts, gather, write_plan
from zerorun.checkpoint.cuts import blocks, in_stretches, put, span, take
from zerorun.checkpoint.gather import Collector
from zerorun.checkpoint.inventory import Contents, TensorPart, together
from zerorun.checkpoint.manifest import Manifest
from zerorun.checkpoint.read import Read, Reader
from zerorun.checkpoint.save import memory_of_parts
from zerorun.checkpoint.tensorfile import dtype_of
from zerorun.checkpoint.write_plan import MASTER, MODEL, Rest, Row, WritePlan, make_plan
from zerorun.distributed.layout import build_layout
from zerorun.distributed.tensor_shard import TensorShard, fused_ranges
from zerorun.distributed.topology import Topology
from zerorun.errors import CheckpointError
from zerorun.ops.rounding import MasterFormat

quick = settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
parts = pytest.mark.parametrize("part", by_day(range(3), 0))  # of the examples


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of three elements, and rows of which few fit into memory."""
    monkeypatch.setattr(gather, "_STRETCH", 24)
    monkeypatch.setattr(cuts, "_MOST_BYTES", 200)


# -- shares ------------------------------------------------------------------------------------------------------


@dataclass
class Divided:
    """How a tensor is divided: along ``dim`` in blocks of ``lengths``; ``alike`` neighbouring ranks have the same."""

    shape: tuple[int, ...]
    dim: int = -1
    lengths: tuple[int, ...] = ()
    alike: int = 1

    def shard(self, rank: int, size: int) -> TensorShard | None:
        if self.dim < 0 or size == 1:
            return None
        groups = -(-size // self.alike)
        return TensorShard(self.shape, self.dim, fused_ranges(self.lengths, rank // self.alike, groups))


@st.composite
def division(draw: st.DrawFn) -> Divided:
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=3))
    if not shape or draw(st.integers(0, 3)) == 0:
        return Divided(tuple(shape))
    dim = draw(st.integers(0, len(shape) - 1))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any))
    shape[dim] = sum(lengths)
    return Divided(tuple(shape), dim, tuple(lengths), draw(st.sampled_from([1, 1, 2])))


def numbered(shape: tuple[int, ...], begin: int = 0) -> torch.Tensor:
    return torch.arange(begin, begin + prod(shape)).view(shape)


@st.composite
def runs(draw: st.DrawFn) -> tuple[TensorShard, int, int]:
    """A share, and a run of it: (share, start, numel)."""
    divided = draw(division().filter(lambda found: found.dim >= 0))
    size = draw(st.integers(2, 4))
    shard = divided.shard(draw(st.integers(0, size - 1)), size)
    assert shard is not None
    local = prod(shard.local_shape)
    start = draw(st.integers(0, local))
    return shard, start, draw(st.integers(0, local - start))


@quick
@given(runs())
def test_a_run_is_where_its_blocks_say(found: tuple[TensorShard, int, int]) -> None:
    shard, start, numel = found
    whole = numbered(shard.shape)
    expected = shard.cut(whole).reshape(-1)[start : start + numel]
    made = list(blocks(shard, start, numel))
    assert len(made) <= 3
    elements: dict[int, int] = {}
    for block in made:
        for row in range(block.rows):
            for cut in block.cuts:
                for index in range(cut.width):
                    here = cut.here + row * block.step_here + index
                    assert here not in elements
                    elements[here] = cut.there + row * block.step_there + index
    assert [elements[index] for index in range(numel)] == expected.tolist()
    low, high = span(shard, start, numel)
    assert (low, high) == ((int(expected.min()), int(expected.max()) + 1) if numel else (0, 0))
    if in_stretches(shard):
        assert sum(len(block.cuts) for block in made) <= len(shard.ranges)


@quick
@given(runs())
def test_a_run_is_put_and_taken(found: tuple[TensorShard, int, int]) -> None:
    shard, start, numel = found
    whole = numbered(shard.shape).reshape(-1)
    run = shard.cut(whole.view(shard.shape)).reshape(-1)[start : start + numel]
    target = torch.full_like(whole, -1)
    put(shard, start, run, target)
    assert sorted(target[target >= 0].tolist()) == sorted(run.tolist())
    assert torch.equal(target[target >= 0], whole[target >= 0])
    most = 0

    def read(begin: int, to: torch.Tensor) -> None:
        nonlocal most
        assert to.is_contiguous()
        assert begin >= 0
        assert begin + to.numel() <= whole.numel()
        most = max(most, to.numel())
        to.copy_(whole[begin : begin + to.numel()])

    out = torch.full((numel,), -1)
    take(shard, start, out, read)
    assert torch.equal(out, run)
    assert most * 8 <= max(200, prod(shard.shape[shard.dim :]) * 8), "more rows than fit were read at a time"


@quick
@given(runs(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_reader_gives_the_elements_of_a_share(
    tmp_path_factory: pytest.TempPathFactory, found: tuple[TensorShard, int, int], dtype: torch.dtype
) -> None:
    shard, start, numel = found
    folder = tmp_path_factory.mktemp("model")
    before, whole = torch.ones(5), numbered(shard.shape).float()
    safetensors.torch.save_file({"a": before, "x": whole}, folder / "model.safetensors")
    out = torch.full((numel,), -1, dtype=dtype)
    with Reader(folder, None) as reader:
        reader.read(Read(MODEL, "x", start, out, shard))
    assert torch.equal(out, shard.cut(whole).reshape(-1)[start : start + numel].to(dtype))


# -- plans -------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A model in training on the ranks of ``topology``: what each has, and the whole."""

    topology: Topology
    parts: list[list[TensorPart]]  # by rank
    order: list[str] = field(default_factory=list)
    whole: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)  # set, name -> tensor
    readers: set[int] = field(default_factory=set)  # ranks whose shard group has peer memory

    def plan(self) -> WritePlan:
        return make_plan([[part.row() for part in parts] for parts in self.parts], self.topology, self.order)


@st.composite
def models(draw: st.DrawFn) -> Model:
    pipe, replicate, tensor = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    shard = draw(st.integers(1, 3))
    size = pipe * replicate * shard * tensor
    model = Model(Topology.plan(size, pipe=pipe, tensor=tensor, shard_degree=shard), [[] for _ in range(size)])
    for group in model.topology.groups("shard"):
        model.readers |= set(group) if draw(st.booleans()) else set()
    tables = st.lists(division(), min_size=0 if pipe > 1 else 1, max_size=4)
    tied = draw(division())
    for stage in range(pipe):
        names = [f"s{stage}.p{index}" for index in range(10)]
        divided = dict(zip(names, draw(tables), strict=False))
        if stage in (0, pipe - 1):
            divided["tied"] = tied  # its last copy is known by the name of the first
        model.order += [name for name in divided if name not in model.order]
        kind = draw(st.sampled_from(["resident", "sharded", "bf16"]))
        for rank in model.topology.filter_match(pipe=stage):
            _hold(model, rank, divided, kind)
    return model


def _hold(model: Model, rank: int, divided: dict[str, Divided], kind: str) -> None:
    """What ``rank`` has of its stage's parameters and of one state of theirs."""
    topology, place = model.topology, model.topology.coordinate(rank)
    shards = {name: found.shard(place.tensor, topology.tensor) for name, found in divided.items()}
    shapes = [shard.local_shape if (shard := shards[name]) else found.shape for name, found in divided.items()]
    layout = build_layout(list(divided), shapes, topology.shard)
    sets = (MASTER if kind == "bf16" else MODEL, "optimizer.exp_avg")
    for entry, (name, found) in enumerate(divided.items()):
        for number, target in enumerate(sets):
            key = (MODEL if name == "tied" and number == 0 else target), name
            whole = model.whole.setdefault(key, numbered(found.shape, 10**6 * (len(model.whole) + 1)))
            shard = shards[name]
            local = (whole if shard is None else shard.cut(whole)).reshape(-1)
            pieces = [(p.start, p.start + p.numel) for p in layout.pieces(place.shard) if p.entry == entry]
            for start, end in [(0, local.numel())] if kind == "resident" else pieces:
                model.parts[rank].append(TensorPart(*key, start, local[start:end].clone(), found.shape, shard))


class Post:
    """What ranks send to one another."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)

    def of(self, rank: int, topology: Topology) -> Any:
        def send(tensor: torch.Tensor, to: int, tag: int) -> Any:
            assert tensor.is_contiguous()
            self.waiting[rank, to, tag].append(tensor)
            return SimpleNamespace(wait=lambda: None)

        def receive(tensor: torch.Tensor, source: int, tag: int) -> None:
            tensor.copy_(self.waiting[source, rank, tag].popleft())

        return SimpleNamespace(rank=rank, topology=topology, send=send, receive=receive)


def collected(model: Model, plan: WritePlan) -> dict[tuple[str, str], torch.Tensor]:
    """What the writers of ``plan`` get together, by the collectors of all ranks."""
    post, collectors = Post(), []
    for rank, parts in enumerate(model.parts):
        seen = Topology.plan(
            model.topology.world_size, rank, pipe=model.topology.pipe, tensor=model.topology.tensor,
            shard_degree=model.topology.shard,
        )  # fmt: skip
        memory, rests = memory_of_parts(parts)
        assert len(memory) == len(parts)

        def read_peer(peer: int, address: int, out: torch.Tensor, seen: Topology = seen) -> None:
            assert peer in seen.ranks_along("shard"), "no rank reads beyond its shard group"
            ctypes.memmove(out.data_ptr(), address, out.numel() * out.element_size())

        reader = read_peer if rank in model.readers else None
        collectors.append(Collector(plan, memory, post.of(rank, seen), reader, rests))
    found = {}
    for task in plan.tasks:
        stretches = [stretch.clone() for stretch in collectors[task.writer].stretches(task)]
        found[task.set, task.tensor.name] = torch.cat([torch.empty(0, dtype=dtype_of(task.tensor.dtype)), *stretches])
    for collector in collectors:
        collector.finish()
    assert not any(post.waiting.values()), "something was sent that nobody took"
    return found


@parts
@quick
@given(model=models())
def test_every_element_comes_together_once(part: int, model: Model) -> None:
    plan = model.plan()
    found = collected(model, plan)
    assert found.keys() == model.whole.keys()
    for key, whole in model.whole.items():
        assert torch.equal(found[key].view(whole.shape), whole), key
    names = [task.tensor.name for task in plan.tasks]
    assert names == sorted(names, key=model.order.index), "stages stand in their order"


@parts
@quick
@given(model=models())
def test_values_that_are_kept_in_two_tensors_come_together(part: int, model: Model) -> None:
    """As fp32, from wherever the halves are, and a few at a time."""
    for number, parts in enumerate(model.parts):
        model.parts[number] = [in_two(part) if part.set == MASTER else part for part in parts]
    found = collected(model, model.plan())
    for key, whole in model.whole.items():
        wanted = fp32_of(whole) if key[0] == MASTER else whole
        assert torch.equal(found[key].view(whole.shape), wanted), key


def test_what_is_beside_a_stretch_is_as_far_in_its_part() -> None:
    shard = TensorShard((8, 2), 0, ((0, 2), (4, 6)))
    row = Row(MASTER, "x", 0, 8, "F32", (8, 2), 1000, "BF16", shard, Rest("I16", 5000))
    found = [(s.offset, s.numel, s.address, s.rest) for s in write_plan._of_row(0, row)]
    assert found == [(0, 4, 1000, Rest("I16", 5000)), (4, 4, 1008, Rest("I16", 5008))]


def fp32_of(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers % (1 << 24)).float()


def in_two(part: TensorPart) -> TensorPart:
    tensor, rest = MasterFormat.REMAINDER.parts(fp32_of(part.tensor))
    return replace(part, tensor=tensor, rest=rest)


@parts
@quick
@given(model=models())
def test_a_tensor_is_written_where_it_is(part: int, model: Model) -> None:
    """By a rank of the first stage that has it, from one replica; a writer that has it whole asks nobody."""
    for task in model.plan().tasks:
        holders = {
            rank: [part for part in parts if (part.set, part.name) == (task.set, task.tensor.name)]
            for rank, parts in enumerate(model.parts)
        }
        place = model.topology.coordinate
        first = min(place(rank).pipe for rank, parts in enumerate(model.parts) for p in parts if p.name == task.tensor.name)
        assert place(task.writer).pipe == first
        assert len({place(source.rank).replicate for source in task.sources}) == 1
        columns = {(place(s.rank).pipe, place(s.rank).tensor) for s in task.sources}
        if all(part.shard is None for parts in holders.values() for part in parts):
            assert len(columns) == 1, "what columns have alike comes from one"
        if any(part.shard is None and part.tensor.numel() == task.tensor.numel for part in holders[task.writer]):
            assert [source.rank for source in task.sources] == [task.writer]


@parts
@quick
@given(model=models(), data=st.data())
def test_what_no_rank_has_is_noticed(part: int, model: Model, data: st.DataObject) -> None:
    """A column's run, or all that a column has, is gone, and no other column has the same."""
    divided = [part for parts in model.parts for part in parts if part.shard is not None and part.tensor.numel()]
    if not divided:
        return
    gone = data.draw(st.sampled_from(divided))
    for parts in model.parts:
        parts[:] = [p for p in parts if (p.set, p.name, p.shard) != (gone.set, gone.name, gone.shard)]
    if any((part.set, part.name) == (gone.set, gone.name) for parts in model.parts for part in parts):
        with pytest.raises(CheckpointError, match="is an error in zerorun"):
            model.plan()


def test_a_run_that_is_missing_is_noticed() -> None:
    shard = [TensorShard((4, 6), 1, fused_ranges((6,), rank, 2)) for rank in range(2)]
    model = Model(Topology.plan(4, tensor=2), [[] for _ in range(4)], ["x"])
    for rank in range(3):  # rank 3 has the second half of the right columns
        run = torch.zeros(6)
        model.parts[rank].append(TensorPart(MODEL, "x", 6 * (rank // 2), run, (4, 6), shard[rank % 2]))
    with pytest.raises(CheckpointError, match=r"has 12 elements, but ranks hold only the first 6.*error in zerorun"):
        model.plan()


# -- stages ------------------------------------------------------------------------------------------------------


def test_stages_make_one_model() -> None:
    first = Contents({"embed": (4, 2), "a": (2,)}, {"e2": "embed"}, ["a._extra_state"])
    last = Contents({"b": (3,), "embed": (4, 2)}, {"head": "embed"}, [])
    made = together([first, None, last])
    assert list(made.shapes) == ["embed", "a", "b"]
    assert made.aliases == {"e2": "embed", "head": "embed"}
    assert made.extra == ["a._extra_state"]


def test_manifests_of_stages_make_one() -> None:
    first, last = (Manifest("t", "now", {"global_steps": 1}) for _ in range(2))
    facts = {"dtype": "F32", "trainable": True, "group": None}
    first.parameters = {"embed": {"shape": [4, 2], **facts}}
    last.parameters = {"b": {"shape": [3], **facts}, "embed": {"shape": [4, 2], **facts}}
    last.aliases, last.extra_state = {"head": "embed"}, {"b": 1}
    last.optimizer = {"type": "Adam", "groups": [], "scalars": {}}
    for stage in (first, last):
        first.add_stage(stage)
    assert list(first.parameters) == ["embed", "b"]
    assert (first.aliases, first.extra_state, first.optimizer) == ({"head": "embed"}, {"b": 1}, last.optimizer)
    content = json.loads(first.to_text())["content"]
    assert Manifest.from_text(first.to_text(), Path("x")).parameters == content["parameters"]
