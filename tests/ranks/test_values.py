"""Values that ranks tell each other: by rank, of any group; and a rank that gets something else runs nothing of it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from zerorun.checkpoint.ranks import Ranks
from zerorun.distributed.topology import Topology
from zerorun.distributed.transport.communicator import Communicator
from zerorun.distributed.transport.gloo import Gloo
from zerorun.distributed.transport.process_group import init_distributed
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.distributed.transport.world import _HEAD, gather_values
from zerorun.errors import CheckpointError, MessageError, PipelineError
from zerorun.pipeline.p2p import ACTIVATIONS, PointToPoint


class Evil:
    """Leaves ``trace`` where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def tell() -> list[Any]:
    init_distributed(torch.device("cpu"))
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    found = [gather_values(["x" * rank, torch.full((rank,), rank)])]
    for length in (200, 300, 9000):  # in one message, in two, and ranks that differ
        assert gather_values("y" * (length * rank)) == ["y" * (length * other) for other in range(dist.get_world_size())]
    if rank < 2:
        found.append(gather_values({rank: "of two"}, pair))
    return found


def test_every_rank_hears_all_in_their_order() -> None:
    everywhere = run_ranks(3, tell)
    for rank, found in enumerate(everywhere):
        assert [text for text, _ in found[0]] == ["", "x", "xx"]
        assert [tensor.tolist() for _, tensor in found[0]] == [[], [1], [2, 2]]
        assert found[1:] == ([[{0: "of two"}, {1: "of two"}]] if rank < 2 else [])


def tell_much() -> list[int]:
    """The bytes of each rank in collectives that all take part in alike, where one or two ranks have much to tell."""
    init_distributed(torch.device("cpu"))
    rank, padded, gather = dist.get_rank(), [], dist.all_gather

    def noted(found: list[torch.Tensor], mine: torch.Tensor, **options: Any) -> Any:
        padded.append(mine.numel())
        return gather(found, mine, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", noted)
        for who in ([0], [2], [1, 3]):
            mine = [
                "y" * 300_000 if rank in who else "z" * rank * 100,
                torch.full((40_000,) if rank in who else (1,), rank),
            ]
            for other, (text, tensor) in enumerate(gather_values(mine)):
                assert text == ("y" * 300_000 if other in who else "z" * other * 100)
                assert tensor.tolist() == [other] * (40_000 if other in who else 1)
    return padded


def test_what_few_ranks_have_takes_no_room_for_the_others() -> None:
    for padded in run_ranks(4, tell_much):
        assert 0 < sum(padded) < 3000


def tell_what_cannot_be_told() -> list[str]:
    init_distributed(torch.device("cpu"))
    mine = object() if dist.get_rank() else 1
    ranks = Ranks(Topology.create(2, dist.get_rank(), device_type="cpu"))
    caught = []
    for tell, kind in ((gather_values, MessageError), (ranks.gather, CheckpointError)):
        with pytest.raises(kind, match=r"rank 1: a builtins\.object cannot be sent") as error:
            tell(mine)
        caught.append(str(error.value))
    assert gather_values(1) == [1, 1]
    ranks.close()
    return caught


def test_all_ranks_are_told_who_could_not_tell_its_value() -> None:
    first, second = run_ranks(2, tell_what_cannot_be_told)
    assert first == second


def tell_bytes(content: bytes, group: dist.ProcessGroup | None) -> None:
    """What ``gather_values`` sends: the length, and the bytes; those that do not fit into the first message in another."""
    whole = len(content).to_bytes(8, "little") + content
    for part in filter(None, (whole[:_HEAD].ljust(_HEAD), whole[_HEAD:])):
        sent = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(sent) for _ in range(dist.get_world_size(group))], sent, group=group)


def be_attacked(trace: str) -> list[str]:
    """Rank 1 plays a stranger: it sends pickles wherever rank 0 takes something from it. What rank 0 found."""
    init_distributed(torch.device("cpu"))
    rank, cpu = dist.get_rank(), torch.device("cpu")
    topology = Topology.create(2, rank, device_type="cpu")
    comm, ranks = Communicator(topology, cpu), Ranks(topology)
    transport = Gloo("pipe", dist.group.WORLD, rank, 2, cpu, CommunicationStatistics())
    p2p = PointToPoint(transport, lambda message, label, peer: message.result(60), torch.device("cpu"))
    group = ranks._group._group if ranks._group is not None else None
    content, found = pickle.dumps(Evil(Path(trace))), []
    for way, tell in ((None, comm.control.values), (group, ranks.gather), (None, transport.values)):
        if rank == 1:
            if tell == comm.control.values:
                dist.barrier(group=way)
            tell_bytes(content, way)
            continue
        try:
            tell(1)
        except (MessageError, CheckpointError) as error:
            found.append(str(error))
    if rank == 1:
        tag = p2p._tags[ACTIVATIONS]
        for part in (torch.tensor([len(content)] * 2), torch.frombuffer(bytearray(content), dtype=torch.uint8)):
            dist.group.WORLD.send([part], 0, tag).wait()
    else:
        with pytest.raises(PipelineError) as error:
            p2p.receive(1, ACTIVATIONS)
        found.append(str(error.value))
    dist.barrier()
    ranks.close()
    return found


def test_what_a_stranger_sends_is_not_run(tmp_path: Path) -> None:
    found = run_ranks(2, be_attacked, str(tmp_path / "owned"))[0]
    assert not (tmp_path / "owned").exists()
    assert len(found) == 4
    assert all("cannot be read" in text for text in found)
