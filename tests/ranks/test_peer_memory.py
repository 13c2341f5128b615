"""Ranks of one host read each other's memory: results do not change, whoever is late, and whatever ends or differs."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import patience, run_ranks, start_ranks
from models import CASES
from reference import Result, differences, train_reference
from training import finish, make_config, make_engine, merged, read_slowly, run_steps

from zerorun.distributed.transport import peer_memory
from zerorun.distributed.transport.connect import connect_axis
from zerorun.distributed.transport.peer_memory import PeerEnded, PeerMemory, PeerMemoryError, PeersDisagree
from zerorun.distributed.transport.same_host import SameHost
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.errors import OrderError
from zerorun.plan import make_plan

STEPS = 2
MODELS = ("tied", "frozen", "lora", "unused_on_one_rank", "moe", "repeated_apart", "checkpoint_groups")  # by day
every_stage = pytest.mark.parametrize("stage", range(4))


def gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def connect() -> PeerMemory:
    memory = PeerMemory.connect(gather, dist.get_rank(), dist.get_world_size())
    assert memory is not None
    return memory


# -- exchanges ---------------------------------------------------------------------------------------------------


def copy_backwards(memory: PeerMemory) -> None:
    """Let a copy take its first eight bytes last, and other ranks write in between."""
    read = memory.read

    def parts(peer: int, address: int, target: int, size: int) -> None:
        if size > 8:
            read(peer, address + 8, target + 8, size - 8)
            time.sleep(0.002)
        read(peer, address, target, min(size, 8))

    memory.read = parts  # type: ignore[method-assign]


def exchange_many(count: int, backwards: bool) -> bool:
    """Rank r offers r + 10 i in exchange i; waits come late and out of order."""
    peer_memory.SLOTS, memory = 8, connect()
    if backwards:
        copy_backwards(memory)
    rank, found, made = dist.get_rank(), {}, {}
    for index in range(count):

        def take(tables: list[torch.Tensor], index: int = index) -> None:
            values = [torch.zeros(3) for _ in tables]
            for peer in range(len(tables)):
                if peer != rank:
                    memory.read_tensor(peer, int(tables[peer][0]), values[peer])
            found[index] = [value[1].item() for value in values]

        made[index] = memory.exchange(5, "test", [torch.full((3,), rank + 10.0 * index)], take, until_given=index % 2 == 0)
        if index % 3 == 2:
            made[index].wait()
    memory.finish()
    peer_memory.SLOTS = 4096
    others = [peer for peer in range(dist.get_world_size()) if peer != rank]
    return all(found[index][peer] == peer + 10 * index for index in range(count) for peer in others)


@pytest.mark.parametrize("backwards", (False, True))
@pytest.mark.parametrize("world", (2, 4))
def test_more_exchanges_than_slots(world: int, backwards: bool) -> None:
    assert run_ranks(world, exchange_many, 50, backwards) == [True] * world


class CutReads:
    """The C library, with a kernel that copies ``most`` bytes in a call: Linux copies 4 KiB less than 2 GiB."""

    def __init__(self, library: Any, most: int) -> None:
        self._library, self._most = library, most

    def process_vm_readv(self, process: int, here: Any, heres: int, there: Any, theres: int, flags: int) -> int:
        for place in (here._obj, there._obj):  # of ctypes.byref()
            place.size = min(place.size, self._most)
        return int(self._library.process_vm_readv(process, here, heres, there, theres, flags))


def read_more_than_a_call_copies() -> list[float]:
    """Rank r has 1000 numbers from 1000 r on; each reads those of the other one."""
    memory, rank = connect(), dist.get_rank()
    own, found = torch.arange(1000.0) + 1000 * rank, torch.zeros(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_memory, "_READ_BYTES", 64)
        library = CutReads(peer_memory._readable(), 72)
        patch.setattr(peer_memory, "_readable", lambda: library)

        def take(tables: list[torch.Tensor]) -> None:
            memory.read_tensor(1 - rank, int(tables[1 - rank][0]), found)

        memory.exchange(5, "test", [own], take, until_given=True).wait()
    return [*found.tolist()]


def test_reads_of_more_than_a_call_of_the_kernel_copies() -> None:
    expected = [[float(1000 * other + number) for number in range(1000)] for other in (1, 0)]
    assert run_ranks(2, read_more_than_a_call_copies) == expected


LONG = timedelta(seconds=20 * patience())


def drop_before_the_other_looks() -> list[bool]:
    """Rank 1 drops the group when it is done, and rank 0 has still to see on its board that it is. Whether the board is
    kept then, and after the ranks have met in another group."""
    memory, rank = connect(), dist.get_rank()
    board = ctypes.addressof(memory._board)
    made = memory.exchange(5, "test", [torch.ones(3)], lambda tables: None, until_given=False)
    made.wait()
    if rank == 0:
        dist.barrier()
    memory.finish(LONG)
    del memory, made
    gc.collect()
    if rank == 1:
        dist.barrier()
    kept = board in left_boards()
    another = connect()
    assert another is not None
    return [kept, board in left_boards()]


def left_boards() -> list[int]:
    """The addresses of the boards of groups that were dropped."""
    return [ctypes.addressof(board) for _, board in peer_memory._left]


def test_a_board_is_there_until_all_have_looked() -> None:
    assert run_ranks(2, drop_before_the_other_looks) == [[True, False]] * 2


def keep_one_group_while_another_is_connected() -> bool:
    """Rank 0 looks whether its part was read only after rank 1 has dropped the group, and its board with the next one.
    Whether the board is still there."""
    memory, rank = connect(), dist.get_rank()
    board = ctypes.addressof(memory._board)
    memory.exchange(5, "test", [torch.ones(3)], lambda tables: None, until_given=False).wait()
    dist.barrier()
    if rank == 1:
        memory.finish(LONG)
        del memory
        gc.collect()
    another = connect()
    kept = board in left_boards()
    if rank == 0:
        memory.finish(LONG)
    another.finish(LONG)
    return kept


def test_a_group_may_be_kept_on_one_rank() -> None:
    assert run_ranks(2, keep_one_group_while_another_is_connected) == [False, False]


def give_up_in_the_midst() -> tuple[str, float]:
    """Rank 1 offers what rank 0 does not read at once, and frees it, as where both give an engine up after an error. What
    rank 0 is told when it waits for it after all, and what it reads in a group that is made meanwhile."""
    memory, rank = connect(), dist.get_rank()
    if rank == 0:
        read = torch.zeros(1024)
        made = memory.exchange(
            5,
            "test",
            [torch.ones(1024)],
            lambda tables: memory.read_tensor(1, int(tables[1][0]), read),
            until_given=False,
        )
    dist.barrier()
    if rank == 1:
        mapping = mmap.mmap(-1, mmap.PAGESIZE)
        offered = torch.frombuffer(mapping, dtype=torch.float32)
        made = memory.exchange(5, "test", [offered], lambda tables: None, until_given=False)
        allow(offered, 0)  # as if it were freed, and nothing else came to lie there
    dist.barrier()
    another, found = connect(), torch.zeros(3)
    another.exchange(
        6,
        "test",
        [torch.full((3,), float(rank))],
        lambda tables: another.read_tensor(1 - rank, int(tables[1 - rank][0]), found),
        until_given=True,
    ).wait(LONG)
    told = ""
    if rank == 0:
        with pytest.raises(PeerMemoryError) as raised:
            made.wait(LONG)
        told = str(raised.value)
        with pytest.raises(PeerMemoryError):
            memory.finish(LONG)
    dist.barrier()
    if rank == 1:
        allow(offered, mmap.PROT_READ | mmap.PROT_WRITE)
    return told, float(found[0])


def allow(page: torch.Tensor, access: int) -> None:
    """Let what fills a page of memory be read and written as ``access`` says."""
    where = ctypes.c_void_p(page.data_ptr())
    assert ctypes.CDLL(None).mprotect(where, ctypes.c_size_t(page.nbytes), access) == 0


def test_what_was_given_up_in_one_group_is_no_error_of_another() -> None:
    (told, first), (_, second) = run_ranks(2, give_up_in_the_midst)
    assert "Bad address" in told and (first, second) == (1.0, 0.0)


def overwrite_at_once(how: str) -> list[float]:
    """The last rank is slow to read the others' parts, which these write to as soon as they may."""
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = connect_axis("test", dist.group.WORLD, rank, world, torch.device("cpu"), CommunicationStatistics())
    if rank == world - 1:
        read_slowly(transport.memory, 0.3)
    buffer = torch.full((64,), float(rank + 1))
    if how == "sum":
        transport.all_reduce(buffer, "test")
        found = sorted(set(buffer.tolist()))
    else:
        full = torch.empty(64 * world)
        transport.all_gather(full, range(0, 64 * world + 1, 64), "test", buffer).wait()
        transport.fence()
    buffer.fill_(-1.0)
    transport.fence()
    return found if how == "sum" else sorted(set(full.tolist()))


def sum_beside_many_files() -> list[float]:
    """Of ranks that have opened more files than select() knows, before their engines: maps of data, say."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        return [3.0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        return overwrite_at_once("sum")
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_may_have_many_open_files() -> None:
    assert run_ranks(2, sum_beside_many_files) == [[3.0]] * 2


def test_a_sum_may_be_written_to_at_once() -> None:
    assert run_ranks(2, overwrite_at_once, "sum") == [[3.0]] * 2


def test_what_was_gathered_may_be_written_to_when_it_is_quiet() -> None:
    assert run_ranks(2, overwrite_at_once, "gather") == [[1.0, 2.0]] * 2


def offer_more_than_slots(count: int) -> list[float]:
    """Rank 0 makes ``count`` exchanges before rank 1 makes its first, with room for 4 that wait to be read."""
    peer_memory.SLOTS, memory = 4, connect()
    rank, limit, found = dist.get_rank(), timedelta(seconds=30), torch.zeros(count)

    def take(tables: list[torch.Tensor], index: int) -> None:
        memory.read_tensor(1 - rank, int(tables[1 - rank][0]), found[index : index + 1])

    try:
        if rank == 1:
            time.sleep(0.3)
        for index in range(count):
            source = torch.full((1,), rank + 10.0 * index)
            memory.exchange(5, "test", [source], partial(take, index=index), until_given=False)
        memory.finish(limit)
    finally:
        peer_memory.SLOTS = 4096
    return found.tolist()


@pytest.mark.parametrize("count", (4, 5, 6))
def test_a_rank_that_is_ahead_waits_for_a_free_slot(count: int) -> None:
    expected = [[10.0 * index + rank for index in range(count)] for rank in (1, 0)]
    assert run_ranks(2, offer_more_than_slots, count) == expected


def disagree() -> str:
    memory = connect()
    try:
        memory.exchange(dist.get_rank(), "gather of unit 7", [torch.zeros(1)], lambda tables: None, until_given=True).wait()
    except PeersDisagree as error:
        dist.barrier()
        return str(error)
    return ""


def test_ranks_that_mean_different_things_are_told() -> None:
    for message in run_ranks(2, disagree):
        assert "make different collectives at the same time. Remedy: let all ranks" in message


def disagree_on_size() -> str:
    """Rank 1 has a tensor of one element less: a read of it would go on behind its end."""
    transport = connect_axis("test", dist.group.WORLD, dist.get_rank(), 2, torch.device("cpu"), CommunicationStatistics())
    assert transport.memory is not None
    try:
        transport.all_reduce(torch.ones(8 - dist.get_rank()), "tensor: sum")
    except OrderError as error:
        dist.barrier()
        return str(error)
    return ""


def test_ranks_with_tensors_of_other_sizes_are_told() -> None:
    first, second = run_ranks(2, disagree_on_size)
    assert "ranks 0 and 1 disagree on the size of 'tensor: sum': 32 and 28 bytes" in first
    assert "ranks 1 and 0 disagree on the size of 'tensor: sum': 28 and 32 bytes" in second


def connected(variable: str) -> tuple[bool, bool]:
    """(with the variable as the harness sets it, with 0 on one rank)."""
    engine = make_engine(CASES["plain"], make_config(3))
    usual = engine.comm.reads_parts
    engine.destroy()
    before = os.environ.pop(variable, "1")
    os.environ[variable] = "0" if dist.get_rank() == 1 else before
    refused = PeerMemory.connect(gather, dist.get_rank(), dist.get_world_size())
    os.environ[variable] = before
    return usual, refused is not None


@pytest.mark.parametrize(("world", "usual"), [(2, True), (3, False)])
def test_all_ranks_or_none(world: int, usual: bool) -> None:
    assert run_ranks(world, connected, "ZERORUN_PEER_MEMORY") == [(usual, False)] * world


# -- training ----------------------------------------------------------------------------------------------------


def train_unpacked(model: str, config: dict[str, Any]) -> tuple[Result, bool]:
    """The run with every fp32 gradient summed from where autograd left it, and whether that was so.

    Slots begin with NaN, as they may: what is of no parameter must not come into the norm.
    """
    make_plan.LARGE_NUMEL, usual = 0, make_plan.LARGE_NUMEL
    try:
        seen = []
        real = SameHost.sum_parts
        SameHost.sum_parts = lambda self, *a, **k: seen.append(1) or real(self, *a, **k)  # type: ignore
        engine = make_engine(CASES[model], config)
        for slot in engine.runtime.made.grad_slots.buffers:
            slot.fill_(0xFF)  # which is NaN in every dtype
        result = run_steps(engine, CASES[model], STEPS)
        finish(engine, result)
        return result, bool(seen)
    finally:
        make_plan.LARGE_NUMEL, SameHost.sum_parts = usual, real  # type: ignore[method-assign]


@pytest.mark.each_value
@pytest.mark.parametrize("model", by_day(CASES, *MODELS))
@pytest.mark.parametrize("turn", (0, 2))
def test_unpacked_gradients_give_the_same_run(turn: int, model: str) -> None:
    number = list(CASES).index(model) + turn
    stage = number % 4
    number += number // 4  # else accumulation would always go with the same stages
    world, accumulation, clip = (2, 4)[number % 4 // 3], (1, 3)[number % 2], (0.0, 0.5)[number // 2 % 2]
    config = make_config(stage, accumulation=accumulation, clip=clip)
    expected = train_reference(
        CASES[model], world_size=world, steps=STEPS, accumulation=accumulation, clip=clip, optimizer="AdamW"
    )
    for result, unpacked in run_ranks(world, train_unpacked, model, config):
        assert unpacked
        assert differences(result, expected) == []


@pytest.mark.parametrize("stage", (2, 3))
def test_what_belongs_to_no_parameter_is_not_in_the_norm(stage: int) -> None:
    """Where the optimizer is on the host, the sum goes to a slot in which other units have had their gradients."""
    config = merged(
        make_config(stage, accumulation=3, clip=0.5), {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    )
    expected = train_reference(CASES["moe"], world_size=2, steps=STEPS, accumulation=3, clip=0.5, optimizer="AdamW")
    for result, unpacked in run_ranks(2, train_unpacked, "moe", config):
        assert unpacked
        assert differences(result, expected) == []


def train_with_pauses(config: dict[str, Any], seed: int | None) -> Result:
    """Ranks pause at random: each is late, and early, somewhere."""
    case = CASES["plain"]
    engine = make_engine(case, config)
    if seed is not None:
        pauses = random.Random(seed + dist.get_rank())
        for module in engine.module.modules():
            module.register_forward_hook(lambda *args: time.sleep(pauses.choice((0, 0, 0.01))))
            module.register_full_backward_hook(lambda *args: time.sleep(pauses.choice((0, 0, 0.01))))
    result = run_steps(engine, case, STEPS)
    result.weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.destroy()
    return result


@pytest.mark.each_value
@pytest.mark.parametrize("stage", by_day(range(4), 3))
@pytest.mark.parametrize("world", by_day((2, 4), 4))
def test_late_ranks_change_nothing(world: int, stage: int) -> None:
    config = make_config(stage, accumulation=2, clip=0.5, precision="bf16" if stage % 2 else "fp32")
    expected = run_ranks(world, train_with_pauses, config, None)
    for found, usual in zip(run_ranks(world, train_with_pauses, config, 1), expected, strict=True):
        assert found.losses == usual.losses
        assert all(torch.equal(value, usual.weights[name]) for name, value in found.weights.items())


# -- ends --------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time, torch, zerorun
from torch import nn
torch.set_num_threads(1)
def handler(*unused):
    if ending == "memory goes first":
        time.sleep(2)
        os._exit(3)
    raise RuntimeError("a worker is killed")
signal.signal(signal.SIGALRM, handler)
stage, ending = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
engine = zerorun.initialize(model, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage},
                                    "optimizer": {"type": "AdamW"}})
rank = torch.distributed.get_rank()
for step in range(3):
    if ending == "die in a forward" and rank == 1:
        model[2].register_forward_pre_hook(lambda *unused: os.kill(os.getpid(), 9))
    if ending == "a handler raises" and step == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5) if rank == 1 else time.sleep(3)
    if ending == "memory goes first" and step == 1 and rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    elif ending == "memory goes first" and step == 1:
        time.sleep(1)
        from zerorun.distributed.transport.peer_memory import PeerMemory
        read = PeerMemory.read
        def bad_address(memory, peer, address, target, size):
            if size > 1000:
                raise OSError(14, "Bad address")
            read(memory, peer, address, target, size)
        PeerMemory.read = bad_address
    loss = engine(torch.ones(2, 64)).square().mean()
    if ending == "die" and step == 2 and rank == 1:
        os.kill(os.getpid(), 9)
    engine.backward(loss)
    engine.step()
if ending == "rank 0 goes on alone" and rank == 0:
    time.sleep(3)
    assert all(value.isfinite().all() for value in engine.module.state_dict().values())
"""


def last_error(errors: str) -> str:
    """The line of stderr that names the exception with which the rank has ended."""
    return re.findall(r"^(?:\[rank\d+\]: )?([\w.]+Error: .*)", errors, re.MULTILINE)[-1]


@pytest.mark.parametrize(
    ("stage", "ending"),
    by_day([(0, "die"), (1, "die"), (2, "die"), (3, "die"), (3, "die in a forward")], (0, "die"), (3, "die in a forward")),
)
def test_a_killed_rank_is_noticed_at_once(stage: int, ending: str) -> None:
    """In its first forward, too, when ranks have not agreed on an order yet: not the order is wrong."""
    with start_ranks(2, SCRIPT, str(stage), ending) as (first, second):
        assert second.finish(60 * patience())[0] == -signal.SIGKILL
        begun = time.monotonic()
        code, _, errors = first.finish(30 * patience())
        assert time.monotonic() - begun < 15 * patience()
    assert code == 1
    assert last_error(errors).startswith("zerorun.errors.RankLeftError: collective '")
    assert "another rank ended" in last_error(errors)


@pytest.mark.parametrize("stage", (0, 3))
def test_what_a_signal_handler_raises_in_a_wait_is_no_matter_of_other_ranks(stage: int) -> None:
    """A worker of a data loader that was killed was told as another order of units, or as another rank that ended."""
    with start_ranks(2, SCRIPT, str(stage), "a handler raises") as (first, second):
        code, _, errors = second.finish(60 * patience())
        assert code == 1 and last_error(errors) == "RuntimeError: a worker is killed", errors
        code, _, errors = first.finish(30 * patience())
    assert code == 1 and last_error(errors).startswith("zerorun.errors.RankLeftError: "), errors


def test_a_rank_that_lets_go_of_its_memory_before_it_ends_has_ended() -> None:
    """Where others compute, that takes seconds: it was told as a rank that had not taken part."""
    with start_ranks(2, SCRIPT, "3", "memory goes first") as (first, second):
        assert second.finish(60 * patience())[0] == 3
        code, _, errors = first.finish(30 * patience())
    assert code == 1 and last_error(errors).startswith("zerorun.errors.RankLeftError: "), errors


SET_UP = """
import os, sys, torch, zerorun
from torch import nn
place = sys.argv[1]
zerorun.init_distributed("cpu")
rank = torch.distributed.get_rank()
if place == "zero.Init":
    with zerorun.zero.Init():
        nn.Linear(8, 8)
        if rank:
            os._exit(3)
        nn.Linear(8, 8)
elif rank:
    os._exit(3)
zerorun.initialize(nn.Linear(4, 4), {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}})
"""


@pytest.mark.parametrize("place", ("zero.Init", "initialize"))
def test_a_rank_that_ends_before_there_is_an_engine(place: str) -> None:
    with start_ranks(2, SET_UP, place) as (first, second):
        assert second.finish(60 * patience())[0] == 3
        code, _, errors = first.finish(30 * patience())
    assert code == 1 and last_error(errors).startswith("zerorun.errors.RankLeftError: "), errors


def test_a_read_from_a_process_that_has_ended_says_so() -> None:
    """It may end between the look at its board and the read of its tensors."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    memory = PeerMemory(0, 2)
    memory._boards[1] = ended.pid, 0
    with pytest.raises(PeerEnded):
        memory.read_tensor(1, 0, torch.empty(4))
    memory._boards.clear()  # nobody reads this one's


@pytest.mark.parametrize("stage", by_day((1, 2), 2))
def test_a_rank_may_go_on_after_the_others_are_done(stage: int) -> None:
    with start_ranks(2, SCRIPT, str(stage), "rank 0 goes on alone") as scripts:
        for script in scripts:
            code, _, errors = script.finish(60 * patience())
            assert "Error" not in errors
            assert code == 0


# -- who may read ------------------------------------------------------------------------------------------------


class Recorder:
    """In place of the C library: remembers what is asked of prctl, and does the rest."""

    def __init__(self, real: Any) -> None:
        self.real, self.named = real, []  # type: ignore[var-annotated]

    def prctl(self, option: int, value: Any, *rest: int) -> int:
        assert option == peer_memory._PR_SET_PTRACER
        self.named.append(ctypes.c_long(value.value).value)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def named_in_turn() -> dict[str, Any]:
    """Whom this rank lets read its memory: with a group, with a second one, without any; and where connecting fails."""
    recorder = Recorder(peer_memory._readable())
    usual, peer_memory._readable = peer_memory._readable, lambda: recorder  # type: ignore[assignment]
    others = peer_memory._served, peer_memory._permission  # groups that this process has already
    peer_memory._served, peer_memory._permission = [], peer_memory._Permission()
    try:
        first = connect()
        second = connect()
        with_two = list(recorder.named)
        del first
        with_one = list(recorder.named)
        del second
        without = list(recorder.named)
        recorder.named.clear()
        opened, PeerMemory._open = PeerMemory._open, lambda self, cards: dist.get_rank() == 0  # type: ignore[method-assign]
        try:
            refused = PeerMemory.connect(gather, dist.get_rank(), dist.get_world_size())
        finally:
            PeerMemory._open = opened  # type: ignore[method-assign]
        told = {"two": with_two, "one": with_one, "none": without, "refused": refused, "after": recorder.named}
        return {**told, "launcher": os.getppid()}
    finally:
        peer_memory._readable = usual
        peer_memory._served, peer_memory._permission = others


def test_only_the_launchers_processes_may_read_and_only_while_they_must() -> None:
    for found in run_ranks(2, named_in_turn):
        launcher = found["launcher"]
        assert found["two"] == found["one"] == [launcher]
        assert found["none"] == [launcher, 0]
        assert found["refused"] is None
        assert found["after"] == [launcher, 0]


def test_the_nearest_common_ancestor() -> None:
    assert peer_memory.nearest_common([[40, 30, 20], [31, 30, 20], [30, 20]]) == 30
    assert peer_memory.nearest_common([[40], [41]]) == peer_memory._ANYBODY
    assert peer_memory.ancestors()[:1] == [os.getppid()] * (os.getppid() > 1)
    assert 1 not in peer_memory.ancestors()


def test_all_may_read_when_the_named_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, permission = Recorder(None), peer_memory._Permission()
    monkeypatch.setattr(peer_memory, "_readable", lambda: recorder)
    ended = subprocess.Popen(["sleep", "60"])
    permission.widen(ended.pid)
    permission.renew()
    assert recorder.named == [ended.pid]
    ended.kill()
    ended.wait()
    permission.renew()
    permission.renew()
    assert recorder.named == [ended.pid, -1]


def test_groups_that_go_at_once_on_two_threads_close_what_is_open_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close would hit whatever has been opened under that number meanwhile."""
    permission, closed = peer_memory._Permission(), []
    monkeypatch.setattr(peer_memory, "_readable", lambda: None)
    monkeypatch.setattr(peer_memory, "_served", [])

    def close(number: int) -> None:
        time.sleep(0.02)  # the other thread comes
        closed.append(number)

    permission.widen(os.getpid())
    opened = permission._alive
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        threads = [threading.Thread(target=permission.end_unused) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert closed == [opened]
    os.close(opened or 0)


def test_the_older_ancestor_covers_both(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, permission = Recorder(None), peer_memory._Permission()
    monkeypatch.setattr(peer_memory, "_readable", lambda: recorder)
    monkeypatch.setattr(peer_memory, "ancestors", lambda: [os.getpid(), os.getppid()])
    permission.widen(os.getpid())
    permission.widen(os.getppid())
    permission.widen(os.getpid())
    permission.widen(peer_memory._ANYBODY)
    permission.widen(os.getppid())
    assert recorder.named == [os.getpid(), os.getppid(), -1]
