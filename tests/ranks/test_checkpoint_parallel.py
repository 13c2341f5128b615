"""Checkpoints of models divided over tensor ranks and pipeline stages: each loads at every other division, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import by_day, covering
from harness import run_ranks
from models import Place, token_loss, tokens
from torch import nn
from training import make_config, shared_topology
from transformers.pytorch_utils import Conv1D

import zerorun
from zerorun.distributed.tensor_shard import even_range, fused_ranges
from zerorun.engine import initialize
from zerorun.errors import CheckpointError
from zerorun.tensor_parallel.collectives import make_region
from zerorun.tensor_parallel.layers import make_column_parallel, make_row_parallel, make_vocab_parallel, use_columns

VOCAB, WIDTH, HIDDEN = 41, 16, 22  # neither the vocabulary nor the hidden elements divide by 2 and 4
SAMPLES = 4
Whole = dict[str, torch.Tensor]  # "name" and "name/state" -> whole tensor


class Gated(nn.Module):
    """A block with a fused projection, transposed as in GPT-2, and one whose weight every tensor rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fused, self.down = nn.LayerNorm(WIDTH), Conv1D(2 * HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH)
        self.shared, self.back = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def divide(self, topology: zerorun.Topology) -> None:
        rank, size = topology.tensor_rank, topology.tensor
        region = make_region(topology, torch.device("cpu"))
        make_column_parallel(self.fused, region, fused_ranges((HIDDEN, HIDDEN), rank, size))
        make_row_parallel(self.down, region, (even_range(HIDDEN, rank, size),))
        use_columns(self.shared, region, even_range(8, rank, size))
        make_row_parallel(self.back, region, (even_range(8, rank, size),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm(x)
        gate, up = self.fused(inside).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return x + self.back(torch.tanh(self.shared(x)))


class Model(nn.Module):
    """``part``: which pipeline stage of two it is; None is all. The head is tied to the embedding."""

    def __init__(self, part: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(index): Gated() for index in range(3)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.tensor([1.0]))
        self.head.weight = self.embed.weight
        if part == 0:
            del self.blocks["1"], self.blocks["2"], self.norm, self.head
        elif part == 1:
            del self.blocks["0"], self.embed, self._buffers["scale"]

    def divide(self, topology: zerorun.Topology) -> None:
        for block in self.blocks.values():
            block.divide(topology)
        region = make_region(topology, torch.device("cpu"))
        if hasattr(self, "embed"):
            make_vocab_parallel(self.embed, region)
        if hasattr(self, "head"):
            own = (even_range(VOCAB, topology.tensor_rank, topology.tensor),)
            make_column_parallel(self.head, region, own, gather_output=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits; of a stage alone something that needs all its parameters."""
        x = self.embed(ids) if hasattr(self, "embed") else F.one_hot(ids % WIDTH, WIDTH).float()
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


Cell = tuple[int, int, int, int, str]  # pipe, tensor, shard degree (0: all), stage, precision


def topology_of(cell: Cell) -> zerorun.Topology:
    return shared_topology(cell[2] or None, pipe=cell[0], tensor=cell[1])


@contextmanager
def different_models() -> Iterator[None]:
    """initialize() takes other modules on other ranks, as it does of pipelines."""
    compare, initialize.compare_ranks = initialize.compare_ranks, lambda *unused: None
    cut, initialize.cut = initialize.cut, lambda model, *unused: model  # they are stages already
    try:
        yield
    finally:
        initialize.compare_ranks, initialize.cut = compare, cut


def make_engine(cell: Cell, seed: int, *, frozen: bool = False, model: nn.Module | None = None) -> zerorun.Engine:
    pipe, tensor, shard, stage, precision = cell
    topology = shared_topology(shard or None, pipe=pipe, tensor=tensor)
    torch.manual_seed(seed)
    made = model or Model(topology.pipe_rank if pipe > 1 else None)
    if tensor > 1 and model is None:
        made.divide(topology)
    for name, param in made.named_parameters():
        param.requires_grad_(not frozen or "norm" in name or "fused" in name)
    config = make_config(stage, precision=precision)
    config["zero_optimization"]["shard_degree"] = topology.shard
    with different_models():
        engine = zerorun.initialize(made, config, topology=topology)
    if pipe > 1 and topology.pipe_rank > 0:
        engine.sharded_model.parts.copies = {"head.weight": "embed.weight"}
        vars(engine).pop("checkpointer")  # it had been made without
    return engine


def train(engine: zerorun.Engine, steps: int) -> None:
    """Data-parallel ranks divide the samples, all others have the same. Stages of a pipeline are trained apart."""
    topology = engine.topology
    for step in range(steps):
        samples = range(topology.data_parallel_rank, SAMPLES, topology.data_parallel_size)
        ids = torch.cat([tokens(Place(0, step, index)) for index in samples])
        loss = token_loss(engine, ids) if topology.pipe == 1 else engine(ids).float().square().mean()
        engine.backward(loss)
        engine.step()
    if topology.pipe > 1:
        tie_stages(engine)


def whole_of(engine: zerorun.Engine) -> Whole:
    """Weights, masters and moments of all stages, under the names of the whole model."""
    found: Whole = {}
    for name, param in engine.module.named_parameters():
        name = engine.sharded_model.parts.copies.get(name, name)
        states = [("master", zerorun.zero.safe_get_full_fp32_param(param))]
        states += [(k, zerorun.zero.safe_get_full_optimizer_state(param, k)) for k in ("exp_avg", "exp_avg_sq")]
        found |= {f"{name}/{key}": value.clone() for key, value in states if value is not None}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    joined: Whole = {}
    for others in everyone:
        for name, value in others.items():
            assert torch.equal(joined.setdefault(name, value), value), f"ranks differ in {name}"
    return joined | engine.state_dict()


def tie_stages(engine: zerorun.Engine) -> None:
    """Let both stages have the same of the tensor that they share: here they are trained apart."""
    mine = engine.module.embed.weight if hasattr(engine.module, "embed") else engine.module.head.weight
    master = zerorun.zero.safe_get_full_fp32_param(mine).contiguous()
    dist.broadcast(master, 0)
    zerorun.zero.safe_set_full_fp32_param(mine, master)
    for key in ("exp_avg", "exp_avg_sq"):
        state = zerorun.zero.safe_get_full_optimizer_state(mine, key).contiguous()
        dist.broadcast(state, 0)
        zerorun.zero.safe_set_full_optimizer_state(mine, state, key)
    engine.sharded_model.publish()


def save(folder: str, cells: dict[str, Cell], asynchronous: bool) -> dict[str, tuple[Whole, Whole]]:
    """name -> what a checkpoint must hold, and what an export."""
    results = {}
    for name, cell in cells.items():
        engine = make_engine(cell, seed=1)
        train(engine, 2)
        expected = whole_of(engine)
        engine.save_checkpoint(folder, tag=name, client_state={"cell": name}, asynchronous=asynchronous)
        if asynchronous:
            train(engine, 1)  # what is saved is as it was
        engine.wait_for_checkpoint()
        engine.export(Path(folder) / "exported" / name)
        results[name] = expected, engine.state_dict()
        engine.destroy()
    return results


def load(folder: str, names: list[str], cells: list[Cell], back: str) -> dict[tuple[str, Cell], tuple[Whole, str]]:
    """Load each checkpoint of ``names`` at each of ``cells``, and save the last one again under ``back``."""
    results = {}
    for name in names:
        for cell in cells:
            engine = make_engine(cell, seed=2)
            path, client = engine.load_checkpoint(folder, tag=name)
            assert path is not None
            assert engine.global_steps == 2
            results[name, cell] = whole_of(engine), client["cell"]
            engine.save_checkpoint(folder, tag=f"{back}{name}", client_state={"cell": name})
            train(engine, 1)
            engine.destroy()
    return results


def assert_same(found: Whole, expected: Whole, where: object) -> None:
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, (where, name)
        assert torch.equal(found[name], value), (where, name)


SAVED: dict[int, dict[str, Cell]] = {
    1: {"one": (1, 1, 0, 1, "fp32")},
    2: {
        "tensor2-stage0": (1, 2, 0, 0, "fp32"),
        "tensor2-stage1": (1, 2, 0, 1, "fp32"),
        "pipe2-stage3": (2, 1, 0, 3, "fp32"),
    },
    4: {
        "tensor2-data2-stage3": (1, 2, 0, 3, "fp32"),
        "tensor2-replicas-stage2": (1, 2, 1, 2, "fp32"),
        "tensor4-stage1": (1, 4, 0, 1, "fp32"),
        "pipe2-tensor2-stage1": (2, 2, 0, 1, "fp32"),
        "pipe2-data2-stage3": (2, 1, 0, 3, "fp32"),
    },
}
LOADED: dict[int, list[Cell]] = {
    1: [(1, 1, 0, 3, "fp32")],
    2: [(1, 1, 0, 3, "fp32"), (1, 2, 0, 3, "fp32"), (2, 1, 0, 1, "fp32")],
    3: [(1, 3, 0, 1, "fp32")],
    4: [(1, 4, 0, 3, "fp32"), (1, 2, 0, 1, "fp32"), (2, 2, 0, 3, "fp32"), (2, 1, 1, 2, "fp32")],
}


# By day: what is saved, and which cells load it.
_SAVED_BY_DAY = ("one", "tensor2-replicas-stage2", "pipe2-tensor2-stage1")
_LOADED_BY_DAY = ((1, 2, 0, 3, "fp32"), (2, 1, 0, 1, "fp32"), (1, 3, 0, 1, "fp32"))


@pytest.mark.parametrize("strength", by_day((0, 1, 2), 0))
def test_every_division_loads_at_every_other(strength: int, tmp_path: Path) -> None:
    """Weights, masters and moments come back bit for bit; saved again elsewhere, and loaded by one rank, too."""
    made: dict[str, tuple[Whole, Whole]] = {}
    for world, each in SAVED.items():
        cells = {name: cell for name, cell in each.items() if strength or name in _SAVED_BY_DAY}
        made |= run_ranks(world, save, str(tmp_path), cells, world == 4, timeout_s=300)[0]
    expected = {name: held for name, (held, _) in made.items()}
    names, moments = list(expected), [key for key in expected["one"] if key.endswith("/exp_avg_sq")]
    assert len(moments) == len(dict(Model().named_parameters()))
    loaded = [cell for several in LOADED.values() for cell in several if strength or cell in _LOADED_BY_DAY]
    again = []
    for row in covering({"cell": loaded, "name": names}, strength or 1):
        world = next(world for world, several in LOADED.items() if row["cell"] in several)
        again.append(f"back{world}-{row['name']}")
        for by_rank in run_ranks(world, load, str(tmp_path), [row["name"]], [row["cell"]], f"back{world}-", timeout_s=500):
            for (name, cell), (found, client) in by_rank.items():
                assert_same(found, expected[name], (name, cell))
                assert client == name
    for (name, cell), (found, _) in run_ranks(1, load, str(tmp_path), again, LOADED[1], "last-", timeout_s=300)[0].items():
        assert_same(found, expected[name.partition("-")[2]], (name, cell))
    for name, (_, weights) in made.items():
        files = [safetensors.torch.load_file(path) for path in (tmp_path / "exported" / name).glob("*.safetensors")]
        assert sum(map(len, files)) == len(weights) - 1, "a tied tensor is written once"
        exported = {key: value for file in files for key, value in file.items()}
        assert_same(exported | {"head.weight": exported["embed.weight"]}, weights, name)


def save_apart(folder: str, cell: Cell) -> tuple[Whole, float]:
    """Returns the next random number, too."""
    engine = make_engine(cell, seed=1)
    train(engine, 2)
    torch.manual_seed(100 + dist.get_rank())
    engine.save_checkpoint(Path(folder) / f"disk{dist.get_rank()}")
    number, found = torch.rand(()).item(), whole_of(engine)
    engine.destroy()
    return found, number


def load_apart(folder: str, cell: Cell) -> tuple[Whole, float]:
    engine = make_engine(cell, seed=2)
    engine.load_checkpoint(Path(folder) / f"disk{dist.get_rank()}")
    number, found = torch.rand(()).item(), whole_of(engine)
    engine.destroy()
    return found, number


@pytest.mark.nightly  # by day: the test of this name in test_checkpoint_contents.py, and test_frozen_weights_and_masters
@pytest.mark.parametrize("loads", (1, 2))
def test_every_rank_has_a_disk_of_its_own(loads: int, tmp_path: Path) -> None:
    """Then ranks send one another what is in their files, picked from the rows there.

    Random numbers go on rank by rank if ranks have the places that they had, and only then.
    """
    expected, numbers = zip(*run_ranks(4, save_apart, str(tmp_path), (1, 2, 0, 1, "fp32")), strict=True)
    assert len(set(numbers)) == 4
    for cell, same in (((1, 4, 0, 2, "fp32"), False), ((1, 2, 0, 3, "fp32"), True))[-loads:]:
        found, drawn = zip(*run_ranks(4, load_apart, str(tmp_path), cell), strict=True)
        assert (drawn == numbers) == same
        for rank in range(4):
            assert_same(found[rank], expected[0], cell)


# -- half precision, frozen weights, pretrained ones -------------------------------------------------------------


def save_frozen(folder: str, cell: Cell) -> Whole:
    engine = make_engine(cell, seed=1, frozen=True)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="all")
    engine.save_checkpoint(folder, tag="trainable", trainable_only=True)
    found = whole_of(engine)
    engine.destroy()
    return found


def load_frozen(folder: str, cell: Cell) -> tuple[Whole, Whole]:
    found = []
    for tag in ("all", "trainable"):
        engine = make_engine(cell, seed=1, frozen=True)
        engine.load_checkpoint(folder, tag=tag)
        found.append(whole_of(engine))
        engine.destroy()
    engine = make_engine(cell, seed=3, frozen=True)
    with pytest.raises(CheckpointError, match="other frozen weights"):
        engine.load_checkpoint(folder, tag="trainable")
    engine.destroy()
    return found[0], found[1]


FROZEN: list[tuple[int, Cell, int, Cell]] = [
    (4, (1, 2, 0, 3, "bf16"), 2, (1, 1, 0, 1, "bf16")),
    (2, (1, 1, 0, 3, "bf16"), 4, (1, 4, 0, 2, "bf16")),
    (2, (1, 2, 0, 0, "bf16"), 4, (1, 2, 0, 3, "bf16")),
]


@pytest.mark.parametrize(("world", "cell", "later", "other"), by_day(FROZEN, FROZEN[0]))
def test_frozen_weights_and_masters(world: int, cell: Cell, later: int, other: Cell, tmp_path: Path) -> None:
    """Also of checkpoints without the frozen weights, which are compared with those that are there."""
    expected = run_ranks(world, save_frozen, str(tmp_path), cell)[0]
    assert any(name.endswith("/master") for name in expected)
    for all_, trainable in run_ranks(later, load_frozen, str(tmp_path), other, timeout_s=120):
        assert_same(all_, expected, "all")
        assert_same(trainable, expected, "trainable")


def load_weights(folder: str, cell: Cell) -> tuple[Whole, Whole]:
    """Into divided layers, before initialize and after it."""
    engine = make_engine(cell, seed=5)
    zerorun.load_pretrained(engine.module, folder)
    after = engine.state_dict()
    engine.destroy()
    torch.manual_seed(6)
    topology = topology_of(cell)
    model = Model()
    model.divide(topology)
    zerorun.load_pretrained(model, folder)
    engine = make_engine(cell, seed=0, model=model)
    before = engine.state_dict()
    engine.destroy()
    return before, after


@pytest.mark.parametrize("stage", [1, 3])
def test_pretrained_weights_into_divided_layers(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = Model().state_dict()
    weights = {name: value for name, value in expected.items() if name != "head.weight"}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    for before, after in run_ranks(4, load_weights, str(tmp_path), (1, 2, 0, stage, "fp32")):
        assert_same(before, expected, "before")
        assert_same(after, expected, "after")


# -- refused -----------------------------------------------------------------------------------------------------


def load_other(folder: str, cell: Cell) -> list[str]:
    """Problems of one stage are raised on all ranks."""
    texts = []
    engine = make_engine(cell, seed=1)
    engine.save_checkpoint(folder, tag="x")
    engine.destroy()
    engine = make_engine(cell, seed=1)
    if hasattr(engine.module, "head"):
        engine.module.register_buffer("late", torch.zeros(1))
    for act in (
        lambda: engine.load_checkpoint(folder, tag="x"),
        lambda: zerorun.load_pretrained(engine.module, folder + "/x"),
    ):
        with pytest.raises(CheckpointError) as found:
            act()
        texts.append(str(found.value))
    engine.load_checkpoint(folder, tag="x", allow_missing=["late"])
    engine.destroy()
    return texts


@pytest.mark.parametrize("cell", [(2, 1, 0, 1, "fp32"), (2, 2, 0, 3, "fp32")])
def test_what_a_stage_lacks_is_an_error_on_all_ranks(cell: Cell, tmp_path: Path) -> None:
    texts = run_ranks(cell[0] * cell[1], load_other, str(tmp_path), cell)
    assert len({tuple(found) for found in texts}) == 1
    assert all("lacks 'late'" in text for text in texts[0])


# -- ranks and stages that have nothing --------------------------------------------------------------------------


class Narrow(nn.Module):
    """One hidden element, which one tensor rank has."""

    def __init__(self, topology: zerorun.Topology) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if topology.tensor > 1:
            region, own = (
                make_region(topology, torch.device("cpu")),
                (even_range(1, topology.tensor_rank, topology.tensor),),
            )
            make_column_parallel(self.up, region, own)
            make_row_parallel(self.down, region, own)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def use_narrow(folder: str, cell: Cell, load: bool) -> Whole:
    torch.manual_seed(2 if load else 1)
    engine = make_engine(cell, seed=0, model=Narrow(topology_of(cell)))
    if load:
        engine.load_checkpoint(folder)
    else:
        train(engine, 2)
        engine.save_checkpoint(folder)
    found = whole_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_without_elements_of_a_tensor(precision: str, tmp_path: Path) -> None:
    expected = run_ranks(2, use_narrow, str(tmp_path), (1, 2, 0, 1, precision), False)[0]
    for world, cell in ((1, (1, 1, 0, 1, precision)), (4, (1, 2, 0, 3, precision))):
        for found in run_ranks(world, use_narrow, str(tmp_path), cell, True):
            assert_same(found, expected, cell)


def use_without_optimizer(folder: str, cell: Cell, load: bool) -> Whole:
    """The last stage has nothing to train."""
    topology = topology_of(cell)
    torch.manual_seed(2 if load else 1)
    engine = make_engine(cell, seed=0, model=Model(topology.pipe_rank if cell[0] > 1 else None))
    if topology.pipe_rank == 1:
        engine.sharded_model.optimizer = None
        vars(engine).pop("checkpointer", None)
    if load:
        engine.load_checkpoint(folder, allow_missing=["rng"])
    else:
        engine.save_checkpoint(folder)
    found = engine.state_dict()
    engine.destroy()
    return found


def test_a_stage_that_trains_nothing(tmp_path: Path) -> None:
    expected = run_ranks(2, use_without_optimizer, str(tmp_path), (2, 1, 0, 1, "fp32"), False)[0]
    for world, pipe in ((1, 1), (2, 2)):
        for found in run_ranks(world, use_without_optimizer, str(tmp_path), (pipe, 1, 0, 1, "fp32"), True):
            assert_same(found, expected, world)
