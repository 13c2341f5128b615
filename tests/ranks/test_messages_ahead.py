"""Messages between stages: they travel before they are asked for, whatever follows on what."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from harness import patience, run_ranks
from torch.utils import _pytree

from zerorun.distributed.transport.gloo import Gloo
from zerorun.distributed.transport.process_group import init_distributed
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.pipeline.p2p import ACTIVATIONS, GRADIENTS, PointToPoint


def p2p() -> PointToPoint:
    init_distributed(torch.device("cpu"))
    place = (dist.get_rank(), dist.get_world_size())
    transport = Gloo("pipe", dist.group.WORLD, *place, torch.device("cpu"), CommunicationStatistics())
    return PointToPoint(transport, lambda message, label, peer: message.result(60), torch.device("cpu"))


def travel_ahead() -> list[bool]:
    """Whether a message is there before it is asked for: of the first of a kind, its header alone can be."""
    carried, found, value = p2p(), [], torch.arange(6.0)
    for number in range(4):
        if dist.get_rank() == 0:
            carried.send(value + number, 1, ACTIVATIONS)
            carried.finish()
            continue
        carried.expect(0, ACTIVATIONS)
        expected = carried._expected[0, ACTIVATIONS]
        places = [expected.header, *(expected.guess or ())]
        deadline = time.monotonic() + 60 * patience()
        while not all(place.arrival.done() for place in places if place.arrival) and time.monotonic() < deadline:
            time.sleep(0.001)
        found.append(expected.guess is not None and torch.equal(expected.guess[0].landing, value + number))
        assert torch.equal(carried.receive(0, ACTIVATIONS), value + number)
    return found


def test_what_is_like_the_last_message_travels_ahead() -> None:
    assert run_ranks(2, travel_ahead)[1] == [False, False, True, True]


def change_what_was_sent() -> list[float]:
    """What rank 1 gets of a buffer that rank 0 changes before the message can leave, because nobody waits for it yet."""
    carried, buffer, found = p2p(), torch.zeros(8), []
    for number in range(3):
        if dist.get_rank() == 0:
            carried.send(buffer, 1, ACTIVATIONS)
            buffer.fill_(number + 1.0)
        dist.barrier()
        if dist.get_rank() == 1:
            found += set(carried.receive(0, ACTIVATIONS).tolist())
    carried.finish()
    return found


def test_what_was_sent_may_change() -> None:
    """As a layer changes its buffer in the next micro-batch, while the next stage is busy with this one."""
    assert run_ranks(2, change_what_was_sent)[1] == [0.0, 1.0, 2.0]


def alone_before() -> bool:
    """Rank 0 has made couriers of a group of its own, which rank 1 knows nothing of."""
    if dist.get_rank() == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
        for _ in range(3):
            PointToPoint(
                Gloo("pipe", alone, 0, 1, torch.device("cpu"), CommunicationStatistics()),
                lambda *unused: None,
                torch.device("cpu"),
            )
    carried, value = p2p(), torch.arange(6.0)
    carried.send(value, 1 - dist.get_rank(), ACTIVATIONS)
    found = torch.equal(carried.receive(1 - dist.get_rank(), ACTIVATIONS), value)
    carried.finish()
    return found


def test_what_else_a_rank_has_made_does_not_matter() -> None:
    assert run_ranks(2, alone_before) == [True, True]


VALUES: list[Any] = [
    torch.arange(6.0).view(2, 3),
    torch.arange(10.0),
    {"a": torch.ones(2, 2), "mask": torch.tensor([True, False]), "none": None},
    (torch.empty(0, 4), 3),
    [],
    torch.ones(2, 3, requires_grad=True),
    torch.tensor(5),
]


def exchange(seed: int) -> dict[str, int]:
    """Both ranks send the same random row of values to each other, in both sorts. Returns the bytes that were sent."""
    carried, rng, peer = p2p(), random.Random(seed), 1 - dist.get_rank()
    for _ in range(60):
        sort, expects = rng.choice((ACTIVATIONS, GRADIENTS)), rng.random() < 0.7
        value = VALUES[rng.choice((0, 0, 0, rng.randrange(len(VALUES))))]
        if expects:
            carried.expect(peer, sort)
        carried.send(value, peer, sort)
        found = carried.receive(peer, sort)
        for mine, theirs in zip(_pytree.tree_leaves(found), _pytree.tree_leaves(value), strict=True):
            assert type(mine) is type(theirs)
            if isinstance(mine, torch.Tensor):
                assert (mine.dtype, mine.requires_grad) == (theirs.dtype, theirs.requires_grad)
                assert torch.equal(mine, theirs)
        assert _pytree.tree_structure(found) == _pytree.tree_structure(value)
    carried.finish()
    return {label: traffic.bytes for label, traffic in carried._transport.statistics.traffic.items()}


def bytes_of(value: Any) -> int:
    return sum(leaf.nbytes for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def expected_bytes(seed: int) -> dict[str, int]:
    """The tensors, and those of a wrong guess: the last message's, where that was like the one before it."""
    rng, rows = random.Random(seed), {ACTIVATIONS: [], GRADIENTS: []}  # type: ignore[var-annotated]
    for _ in range(60):
        sort, _ = rng.choice((ACTIVATIONS, GRADIENTS)), rng.random()
        rows[sort].append(rng.choice((0, 0, 0, rng.randrange(len(VALUES)))))
    found = {}
    for sort, row in rows.items():
        wrong = sum(bytes_of(VALUES[b]) for a, b, c in zip(row, row[1:], row[2:], strict=False) if a == b != c)
        found[f"pipeline: {sort}"] = sum(bytes_of(VALUES[number]) for number in row) + wrong
    return found


def test_any_row_of_messages() -> None:
    for seed in range(4):
        for found in run_ranks(2, exchange, seed):
            assert found == expected_bytes(seed)
