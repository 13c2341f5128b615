"""The race checker finds races that are planted, each of another kind, and nothing where the wait is there."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from races import Races, looking_for_races
from simulation import simulated_device

from zerorun.distributed import simulated
from zerorun.distributed.device import CopyStream, host_empty
from zerorun.distributed.simulated import COMPUTATION, DEVICE
from zerorun.zero.offload.host_link import HostLink

SIZE = 8


class Place:
    """Two buffers of the device, one of the host, and streams; ``right``: nothing is left out."""

    def __init__(self, races: Races, right: bool) -> None:
        self.races, self.right = races, right
        self.here, self.there = (torch.zeros(SIZE, device=DEVICE) for _ in range(2))
        self.host = host_empty(SIZE, torch.float32, pinned=True)
        self.host.zero_()
        self.copies, self.others = CopyStream(DEVICE), CopyStream(DEVICE)
        self.copies.follow()
        self.others.follow()


def read_before_it_is_written(at: Place) -> None:
    at.here.add_(1)
    if at.right:
        at.copies.follow()
    at.copies.copy(at.here, at.host)


def overwritten_while_it_is_read(at: Place) -> None:
    left = at.copies.copy(at.here, at.host)
    if at.right:
        left.wait()
    at.here.add_(1)


def used_before_it_has_come(at: Place) -> None:
    came = at.copies.copy(at.host, at.here)
    if at.right:
        came.wait()
    at.there.add_(at.here)


def the_program_overwrites_what_is_sent(at: Place) -> None:
    sent = at.copies.copy(at.host, at.here)
    if at.right:
        sent.synchronize()
    at.host.add_(1)


def the_program_reads_what_has_not_come(at: Place) -> None:
    came = at.copies.copy(at.here, at.host)
    if at.right:
        came.synchronize()
    at.host.sum()


def waited_for_by_the_device_only(at: Place) -> None:
    """The computation waits, and the program goes on."""
    came = at.copies.copy(at.here, at.host)
    came.wait()
    if at.right:
        came.synchronize()
    at.host.mul_(2)


def two_streams_write_the_same(at: Place) -> None:
    first = at.copies.copy(at.host, at.here)
    if at.right:
        first.wait()
        at.others.follow()
    at.others.copy(at.host, at.here)


def an_earlier_event_is_waited_for(at: Place) -> None:
    first = at.copies.copy(at.host, at.there)
    second = at.copies.copy(at.host, at.here)
    (second if at.right else first).wait()
    at.here.add_(1)


def given_back_while_it_is_read(at: Place) -> None:
    made = at.here + 1
    at.copies.follow(made if at.right else None)
    at.copies.copy(made, at.host)
    del made


def made_by_a_stream_and_used_by_another(at: Place) -> None:
    with at.copies.copying():
        made = torch.empty(SIZE, device=DEVICE)
        made.copy_(at.host)
    at.copies.lead(made if at.right else None)
    at.here.add_(made)
    del made


def a_collective_begins_before_what_it_reads(at: Place) -> None:
    at.copies.copy(at.host, at.here)
    if at.right:
        at.copies.lead()
    begin_collective(at)


def a_collective_is_not_waited_for(at: Place) -> None:
    end = begin_collective(at)
    if at.right:
        end.wait()
    at.there.add_(1)


def a_thread_is_not_waited_for(at: Place) -> None:
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(at.host.add_, 1)
        if at.right:
            work.result()
        at.host.mul_(2)


def begin_collective(at: Place) -> simulated.Event:
    """As the simulated NCCL does, on a stream of its own: it sums ``here`` into ``there``."""
    stream = simulated.SimulatedStream(DEVICE, "collectives")
    stream.wait_stream(COMPUTATION)
    simulated.observer().begin(stream, [at.here], [at.there], "all_reduce")
    return stream.record_event()


PLANTED = (
    *(read_before_it_is_written, overwritten_while_it_is_read, used_before_it_has_come),
    *(the_program_overwrites_what_is_sent, the_program_reads_what_has_not_come, waited_for_by_the_device_only),
    *(two_streams_write_the_same, an_earlier_event_is_waited_for, given_back_while_it_is_read),
    *(made_by_a_stream_and_used_by_another, a_collective_begins_before_what_it_reads, a_collective_is_not_waited_for),
    a_thread_is_not_waited_for,
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_planted_race_is_found(planted: Callable[[Place], None]) -> None:
    for right in (True, False):
        with simulated_device(), looking_for_races() as races:
            place = Place(races, right)
            planted(place)
            gc.collect()
            found = dict(races.found)  # before the end of the place, which gives all back
            del place
        assert bool(found) != right, f"right: {right}: {list(found)}"


def test_weights_are_sent_behind_what_reads_them() -> None:
    """In a training step the program has waited for the device by then: the links may not count on that."""
    with simulated_device(), looking_for_races() as races:
        link, weight = HostLink(DEVICE), torch.zeros(SIZE, device=DEVICE)
        master = link.empty(SIZE, torch.float32).zero_()
        weight.sum()
        link.open()
        link.send([(master, weight)]).synchronize()
        link.close()
        assert not races.found


# -- what is put off ---------------------------------------------------------------------------------------------------


def test_a_copy_is_made_when_it_is_waited_for() -> None:
    copies, source, target = CopyStream(DEVICE), torch.ones(4), torch.zeros(4)
    came = copies.copy(source, target)
    assert target.isnan().all()
    source.fill_(2.0)  # which nothing has allowed
    came.synchronize()
    assert target.tolist() == [2.0] * 4


def test_copies_of_a_stream_are_in_order() -> None:
    """What a later copy writes may be read by an earlier one."""
    copies, first, second, third = CopyStream(DEVICE), torch.ones(4), torch.zeros(4), torch.zeros(4)
    copies.copy(first, second)
    copies.copy(second, third)
    end = copies.copy(torch.full((4,), 5.0), second)
    assert third.tolist() == [1.0] * 4
    end.wait()
    assert second.tolist() == [5.0] * 4


def test_a_stream_waits_for_another() -> None:
    one, other, first, second, third = (
        CopyStream(DEVICE),
        CopyStream(DEVICE),
        *(torch.full((4,), i + 1.0) for i in range(3)),
    )
    came = one.copy(first, second)
    with other.copying():
        came.wait()
    end = other.copy(second, third)
    assert second.isnan().all() and third.isnan().all()
    end.synchronize()
    assert third.tolist() == [1.0] * 4


def test_nothing_but_copies_goes_into_a_stream_of_copies() -> None:
    with pytest.raises(NotImplementedError, match="ones"), CopyStream(DEVICE).copying():
        torch.ones(2)
