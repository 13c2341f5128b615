"""Tensor parallelism on ranks: every stage gives the run of one process, in losses, norms and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from torch import nn
from torch.nn import functional
from training import make_config

import zerorun
from zerorun import log
from zerorun.activations.checkpointing import checkpoint
from zerorun.distributed.tensor_shard import even_range
from zerorun.errors import StepError
from zerorun.tensor_parallel import parallelize
from zerorun.tensor_parallel.collectives import Region, gather_sequence, make_region, split_sequence
from zerorun.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from zerorun.tensor_parallel.loss import vocab_parallel_cross_entropy
from zerorun.tensor_parallel.random import region_seed

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 17, 12, 5, 2, 3


class Block(nn.Module):
    """``region``: None for ordinary layers."""

    def __init__(self, region: Region | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if region is None:
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        else:
            self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, region=region)
            self.down = RowParallelLinear(4 * WIDTH, WIDTH, region=region)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, region: Region | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = (
            nn.Embedding(VOCABULARY, WIDTH) if region is None else VocabParallelEmbedding(VOCABULARY, WIDTH, region=region)
        )
        self.blocks = nn.ModuleList(Block(region) for _ in range(3))
        if region is None:
            self.head = nn.Linear(WIDTH, VOCABULARY)
        else:
            self.head = ColumnParallelLinear(WIDTH, VOCABULARY, region=region, gather_output=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def tokens_of(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def reference(data: int, accumulation: int, clip: float) -> dict[str, Any]:
    model = Model(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.1)
    norms, losses = [], []
    for step in range(STEPS):
        batches = [tokens_of(step, micro, rank) for micro in range(accumulation) for rank in range(data)]
        found = torch.stack([loss_of(model(tokens[:, :-1]), tokens) for tokens in batches])
        found.mean().backward()
        losses.append(float(found.mean()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: v.detach() for n, v in model.state_dict().items()}}


def train(stage: int, tensor: int, accumulation: int, clip: float, changes: dict[str, Any]) -> dict[str, Any]:
    topology = zerorun.Topology.create(
        dist.get_world_size(),
        dist.get_rank(),
        tensor=tensor,
        device_type="cpu",
        shard_degree=changes.get("zero_optimization", {}).get("shard_degree"),
    )
    model = Model(make_region(topology, torch.device("cpu")))
    engine = zerorun.initialize(
        model, make_config(stage, accumulation=accumulation, clip=clip, **changes), topology=topology
    )
    norms, losses = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            tokens = tokens_of(step, micro, topology.data_parallel_rank)
            loss = loss_of(engine(tokens[:, :-1]).float(), tokens)
            total += float(loss)
            engine.backward(loss)
            engine.step()
        losses.append(total / accumulation)
        norms.append(engine.get_global_grad_norm())
    weights = engine.state_dict()
    traffic = engine.communication_report()
    engine.destroy()
    topology.close()
    return {"losses": losses, "norms": norms, "weights": weights, "traffic": traffic, "rank": topology.data_parallel_rank}


def compare(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    ranks = {result["rank"]: result["losses"] for result in found}
    means = [sum(column) / len(column) for column in zip(*ranks.values(), strict=True)]
    torch.testing.assert_close(torch.tensor(means), torch.tensor(expected["losses"]), rtol=1e-6, atol=0)
    for result in found:
        torch.testing.assert_close(torch.tensor(result["norms"]), torch.tensor(expected["norms"]), rtol=1e-6, atol=0)
        torch.testing.assert_close(result["weights"], expected["weights"], rtol=1e-6, atol=1e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize(("world", "tensor"), ((2, 2), (3, 3), (4, 2), (4, 4)))
def test_equals_one_process(stage: int, world: int, tensor: int) -> None:
    accumulation, clip = (3, 0.0) if world == 2 else (1, 0.5)
    found = run_ranks(world, train, stage, tensor, accumulation, clip, {})
    compare(found, reference(world // tensor, accumulation, clip))


@pytest.mark.parametrize("stage", by_day((1, 3), 3))
def test_hybrid_sharding_and_offload(stage: int) -> None:
    changes: dict[str, Any] = {"zero_optimization": {"shard_degree": 2, "offload_optimizer": {"device": "cpu"}}}
    compare(run_ranks(8, train, stage, 2, 1, 0.5, changes), reference(4, 1, 0.5))


# -- dropout -----------------------------------------------------------------------------------------------------


def penalized(factor: float) -> list[str]:
    """What is said of a loss to which ``factor`` times the norms of all weights are added, of which ranks have parts."""
    log._warned.clear()
    topology = zerorun.Topology.create(dist.get_world_size(), dist.get_rank(), tensor=2, device_type="cpu")
    model = Model(make_region(topology, torch.device("cpu")))
    engine = zerorun.initialize(model, make_config(0), topology=topology)
    said = []
    for step in range(2):
        tokens = tokens_of(step, 0, 0)
        loss = loss_of(engine(tokens[:, :-1]), tokens)
        engine.backward(loss + factor * sum(param.norm() for param in model.parameters()))
        try:
            engine.step()
        except StepError as error:
            said.append(str(error))
    engine.destroy()
    topology.close()
    return [*said, *(text for text in log._warned if "apart by more than rounding" in text)]


@pytest.mark.parametrize(("factor", "told"), ((0.0, ""), (1e-4, "apart by more than rounding"), (1.0, "different losses")))
def test_a_loss_that_reads_divided_weights_is_told(factor: float, told: str) -> None:
    """Each rank has the norm of its part. These are nearly the same, and small beside the loss."""
    for said in run_ranks(2, penalized, factor):
        assert len(said) == (2 if factor == 1 else 1 if factor else 0)
        assert all(told in text and "as a penalty on weights does" in text for text in said)


class Dropping(nn.Module):
    """Dropout inside the region, of divided columns, and outside, of whole activations.

    ``region`` None: one process that draws, for each of ``size`` ranks, what that rank draws inside.
    """

    def __init__(self, region: Region | None, size: int, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.region, self.size, self.recompute = region, size, recompute
        self.blocks = nn.ModuleList(Block(region) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(self.run, block, x) if self.recompute else self.run(block, x)
        return x

    def run(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        normed = block.norm(x)
        inside = self.drop_whole(block, normed) if self.region is None else functional.dropout(block.up(normed), 0.3)
        return x + functional.dropout(block.down(functional.gelu(inside)), 0.2)

    def drop_whole(self, block: Block, normed: torch.Tensor) -> torch.Tensor:
        drawn = int(torch.randint(2**63 - 1, (), dtype=torch.int64))
        outside, parts = torch.get_rng_state(), []
        for rank, part in enumerate(block.up(normed).chunk(self.size, -1)):
            torch.manual_seed(region_seed(drawn, rank))
            parts.append(functional.dropout(part, 0.3))
        torch.set_rng_state(outside)
        return torch.cat(parts, -1)


def input_of(step: int) -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))


def train_dropping(recompute: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    topology = zerorun.Topology.create(
        dist.get_world_size(), dist.get_rank(), tensor=dist.get_world_size(), device_type="cpu"
    )
    model = Dropping(make_region(topology, torch.device("cpu")), topology.tensor, recompute)
    torch.manual_seed(7 + dist.get_rank())  # initialize() lets all ranks go on as tensor rank 0
    engine = zerorun.initialize(model, make_config(3, clip=0.5), topology=topology)
    losses = []
    for step in range(STEPS):
        loss = engine(input_of(step)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    topology.close()
    return losses, weights


@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("size", (2, 3))
def test_dropout_equals_one_process_with_the_same_streams(size: int, recompute: bool) -> None:
    model = Dropping(None, size, recompute=False)
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(input_of(step)).square().mean()
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found, weights in run_ranks(size, train_dropping, recompute):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=0)
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-6, atol=1e-6)


class Headed(nn.Module):
    """Dropout of whole activations, and logits that stay divided. ``fails``: the forward, by its number, that raises."""

    def __init__(self, region: Region | None, fails: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block(region) for _ in range(2))
        made = region is None
        self.head = nn.Linear(WIDTH, VOCABULARY) if made else ColumnParallelLinear(WIDTH, VOCABULARY, region=region)
        self.fails, self.calls = fails, 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(tokens))  # type: ignore[no-any-return]

    def trunk(self, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(self.table(tokens), 0.4, self.training)
        for block in self.blocks:
            x = functional.dropout(block(x), 0.2, self.training)
        self.calls += self.training
        if self.calls == self.fails:
            self.blocks[0].up(x)
            raise ValueError("a sample that cannot be used")
        return x


def in_pieces(model: Headed, tokens: torch.Tensor) -> torch.Tensor:
    return model.head(model.trunk(tokens))  # type: ignore[no-any-return]


HEADED = {"plan": 0, "made": 0, "pieces": 0, "raises": 2}


def train_headed(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    topology = zerorun.Topology.create(2, dist.get_rank(), tensor=2, device_type="cpu")
    region = make_region(topology, torch.device("cpu"))
    model, changes = Headed(region if kind == "made" else None, HEADED[kind]), {}
    if kind != "made":
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise"}
        changes = {"tensor_parallel": {"size": 2, "plan": plan}}
    torch.manual_seed(7)
    engine = zerorun.initialize(model, make_config(1, clip=0.5, **changes), topology=topology)
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(step, 0, 0)
        try:
            found = in_pieces(model, tokens[:, :-1]) if kind == "pieces" else engine(tokens[:, :-1])
        except ValueError:
            continue
        loss = vocab_parallel_cross_entropy(found, tokens[:, 1:], region.axis, VOCABULARY)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    topology.close()
    return losses, weights


def draw(*ignored: Any) -> None:
    """What the common stream loses where a region is entered."""
    torch.randint(2**63 - 1, (), dtype=torch.int64)


@pytest.mark.parametrize("kind", HEADED)
def test_dropout_equals_one_process_where_logits_stay_divided_or_a_forward_raises(kind: str) -> None:
    model = Headed(None, HEADED[kind])
    for layer in (*(block.up for block in model.blocks), model.head):
        layer.register_forward_pre_hook(draw)
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(step, 0, 0)
        try:
            loss = loss_of(model(tokens[:, :-1]), tokens)
        except ValueError:
            continue
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found, weights in run_ranks(2, train_headed, kind):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=0)
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-6, atol=1e-6)


class Drops(nn.Module):
    """A block that drops divided columns, and what is whole or divided along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inside, self.outside = nn.Dropout(0.3), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outside(self.down(self.inside(torch.tanh(self.up(self.norm(x))))))  # type: ignore[no-any-return]


class DropsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Drops() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def modes(sequence_parallel: bool, mode: str) -> list[Any]:
    """What the last block drops inside and outside of its region, and what the common stream gives afterwards."""
    topology = zerorun.Topology.create(2, dist.get_rank(), tensor=2, device_type="cpu")
    model, region, found = DropsTwice(), make_region(topology, torch.device("cpu")), []
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    parallelize(model, plan, region=region, sequence_parallel=sequence_parallel)
    if mode == "dropouts alone":
        model.eval()
    else:
        model.blocks[0].eval()
    for part in (model.blocks[1].inside, model.blocks[1].outside):
        part.train().register_forward_hook(
            lambda module, args, output: found.append((output == 0)[:, :2])
        )  # as many on each rank
    torch.manual_seed(7)
    model(input_of(0))
    found.append(torch.rand(()))
    topology.close()
    return found


@pytest.mark.parametrize("mode", ("first in evaluation", "dropouts alone"))
@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_ranks_draw_their_own_whatever_modes_blocks_are_in(sequence_parallel: bool, mode: str) -> None:
    """Fine-tuning has the first blocks in evaluation, Monte Carlo dropout all but the dropouts."""
    (inside, outside, after), other = run_ranks(2, modes, sequence_parallel, mode)
    assert not torch.equal(inside, other[0]) and inside.any()
    assert torch.equal(outside, other[1]) != sequence_parallel and outside.any()
    assert after == other[2]


# -- bytes -------------------------------------------------------------------------------------------------------


def sent_by(size: int) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """The traffic of one step on this rank, and that of its loss alone."""
    topology = zerorun.Topology.create(size, dist.get_rank(), tensor=size, device_type="cpu")
    region = make_region(topology, torch.device("cpu"))
    engine = zerorun.initialize(Model(region), make_config(1), topology=topology)
    before = engine.communication_report()
    tokens = tokens_of(0, 0, 0)
    engine.backward(loss_of(engine(tokens[:, :-1]), tokens))
    after = engine.communication_report()
    own = even_range(VOCABULARY, topology.tensor_rank, size)
    vocab_parallel_cross_entropy(
        torch.zeros(BATCH * LENGTH, own[1] - own[0]), tokens[:, 1:].flatten(), region.axis, VOCABULARY
    )
    last = engine.communication_report()
    engine.destroy()
    topology.close()
    return {k: v for k, v in difference(after, before).items() if k.startswith("tensor")}, difference(last, after)


def difference(now: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    found = {}
    for label, counts in now.items():
        was = before.get(label, {"calls": 0, "bytes": 0})
        if counts != was:
            found[label] = {kind: counts[kind] - was[kind] for kind in counts}
    return found


@pytest.mark.parametrize("size", (2, 3, 4))
def test_bytes_sent_are_those_of_the_formula(size: int) -> None:
    """2 (t - 1) / t of the activations for an all-reduce: one in a block each way, one for each end."""
    activations = BATCH * LENGTH * WIDTH * 4
    found = run_ranks(size, sent_by, size)
    for kind, count in (("forward", 4), ("backward", 4)):  # the embedding and 3 blocks; 3 blocks and the head
        label = f"tensor: all-reduce {kind}"
        assert sum(traffic[label]["bytes"] for traffic, _ in found) == count * 2 * (size - 1) * activations
    for _, loss in found:
        assert loss == {"tensor: cross-entropy": {"calls": 1, "bytes": 3 * BATCH * LENGTH * 4 * (size - 1)}}


def gather_short() -> torch.Tensor:
    topology = zerorun.Topology.create(2, dist.get_rank(), tensor=2, device_type="cpu")
    region = make_region(topology, torch.device("cpu"))
    whole = torch.arange(6.0).view(2, 1, 3)
    found = gather_sequence(split_sequence(whole, region.axis), region.axis, 1)
    topology.close()
    return found


def test_a_sequence_may_be_shorter_than_the_ranks_are_many() -> None:
    for found in run_ranks(2, gather_short):
        assert torch.equal(found, torch.arange(6.0).view(2, 1, 3))
