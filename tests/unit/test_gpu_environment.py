"""What environments with GPUs lead to, with CUDA's calls stubbed: which GPU a rank takes, and which backend serves it."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zerorun.distributed import device as devices
from zerorun.distributed.device import default_device
from zerorun.distributed.transport import process_group
from zerorun.errors import TopologyError
from zerorun.zero.offload.host_link import HostLink

VARIABLES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "ZERORUN_DEVICE",
    "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_NCCL_HIGH_PRIORITY",
)
GpuMaker = Callable[..., list[Any]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> GpuMaker:
    """``gpus(count, **environment)``: as if this process saw so many GPUs. Returns what set_device will be called with."""

    def see(count: int, **environment: str) -> list[Any]:
        for name in VARIABLES:
            monkeypatch.setenv(name, "")  # so that it is put back as it is now
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        chosen: list[Any] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"gpu-{device.index}"))
        return chosen

    return see


@pytest.mark.parametrize(
    ("count", "environment", "device"),
    [
        (0, {}, "cpu"),
        (0, {"LOCAL_RANK": "3"}, "cpu"),
        (8, {"LOCAL_RANK": "3"}, "cuda:3"),
        (8, {"SLURM_LOCALID": "5"}, "cuda:5"),  # srun, before anything has set LOCAL_RANK
        (8, {"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, "cuda:2"),  # workers of a launcher that srun has started
        (1, {"LOCAL_RANK": "6"}, "cuda:0"),  # a container for each rank
        (4, {"LOCAL_RANK": "1", "ZERORUN_DEVICE": "cuda"}, "cuda:1"),
        (4, {"LOCAL_RANK": "1", "ZERORUN_DEVICE": "cuda:2"}, "cuda:2"),
        (4, {"LOCAL_RANK": "1", "ZERORUN_DEVICE": "cpu"}, "cpu"),
    ],
)
def test_the_device_of_a_rank(gpus: GpuMaker, count: int, environment: dict[str, str], device: str) -> None:
    gpus(count, **environment)
    assert default_device() == torch.device(device)


@pytest.mark.parametrize(
    ("count", "wanted", "words"),
    [
        (0, "cuda", "sees no GPU"),
        (2, "cuda:2", "sees 2 GPUs"),
        (1, "gpu", "no device"),
        (1, "meta", "zerorun does not support"),
    ],
)
def test_a_device_that_is_not_there(gpus: GpuMaker, count: int, wanted: str, words: str) -> None:
    gpus(count, ZERORUN_DEVICE=wanted)
    with pytest.raises(TopologyError, match=f"ZERORUN_DEVICE.*{wanted}.*{words}.*Remedy"):
        default_device()


def test_a_script_that_has_initialised_torch_gets_its_gpu(gpus: GpuMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = gpus(8, LOCAL_RANK="3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    process_group.init_distributed()
    process_group.init_distributed("cuda")
    process_group.init_distributed("nccl")
    assert chosen == [torch.device("cuda", 3)] * 3
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    process_group.init_distributed()
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == "0"  # what the user says


def backends(names: list[str], named: str | None = None) -> list[Any]:
    """What ranks find that call their GPUs so, "" those that have none; or the words of the errors that they raise."""
    store, found = dist.HashStore(), [None] * len(names)

    def rank(number: int, name: str) -> None:
        device = torch.device("cuda", 0) if name else torch.device("cpu")
        try:
            found[number] = process_group._backends(device, store, number, len(names), named)  # type: ignore[call-overload]
        except TopologyError as error:
            found[number] = str(error)  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank, args=item, name=item[1] or None) for item in enumerate(names)]
    [thread.start() for thread in threads]
    [thread.join(20) for thread in threads]
    return found


@pytest.fixture
def named_by_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "name_of", lambda device, otherwise: threading.current_thread().name)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


NCCL, GLOO = "cpu:gloo,cuda:nccl", "gloo"


@pytest.mark.parametrize(
    ("names", "named", "backend"),
    [
        (["a", "b", "c", "d"], None, NCCL),  # whatever each rank can see of its host
        (["a", "b", "a"], None, GLOO),
        (["a"], None, NCCL),
        (["", ""], None, GLOO),
        (["a", "b"], "gloo", GLOO),
        (["a", "b"], "nccl", NCCL),
    ],
)
def test_nccl_unless_ranks_share_a_gpu(named_by_thread: None, names: list[str], named: str | None, backend: str) -> None:
    assert backends(names, named) == [backend] * len(names)


def test_nccl_where_ranks_share_a_gpu_is_refused_on_all(named_by_thread: None) -> None:
    for words in backends(["a", "b", "b"], "nccl"):
        assert "share a GPU" in words and "Remedy" in words


def test_ranks_without_a_gpu_are_named_on_all(named_by_thread: None) -> None:
    """They would wait for half an hour, some in gloo and some in NCCL."""
    for words in backends(["a", "", "b"]):
        assert f"rank 1 on {socket.gethostname()}." in words and "1 of 3" in words and "Remedy" in words


def test_of_many_ranks_without_a_gpu_some_are_named(named_by_thread: None) -> None:
    for words in backends(["a", *[""] * 11]):
        assert words.count("rank ") == process_group._MOST_NAMED and "and 3 more" in words


def rooms_of_a_start(store: dist.Store, late: int | None) -> list[str]:
    """Where three ranks meet of which ``late`` comes last."""
    found = [""] * 3

    def rank(number: int) -> None:
        if number == late:
            others_are_there.wait(20)
        found[number] = process_group._room(store, number, timedelta(minutes=1))
        if number == 0:
            process_group._let_in(store, found[0], 3)

    others_are_there = threading.Event()
    threads = [threading.Thread(target=rank, args=[number], daemon=True) for number in range(3)]
    [thread.start() for thread in threads]
    [thread.join(0.2) for number, thread in enumerate(threads) if number != late]
    others_are_there.set()
    [thread.join(20) for thread in threads]
    return found


@pytest.mark.parametrize("late", (None, 0, 1))
def test_each_start_has_a_room_of_its_own(late: int | None) -> None:
    """In a store that outlives the ranks, as torchrun's does, whoever comes first."""
    store, before = dist.HashStore(), set[str]()
    for start in (None, late, late):
        (room,) = set(rooms_of_a_start(store, start))
        assert room and room not in before
        before.add(room)


def test_a_gpu_is_called_by_its_uuid(gpus: GpuMaker) -> None:
    gpus(2)
    assert devices.name_of(torch.device("cuda", 1), "here") == "gpu-1"
    assert devices.name_of(torch.device("cpu"), "here") == "here"


# -- threads and memory ------------------------------------------------------------------------------------------------


def test_the_thread_of_offload_has_the_device_of_its_rank(gpus: GpuMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with GPU 0, where what it does would make a context of each rank."""
    chosen = gpus(8)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    link = HostLink(torch.device("cuda", 3), pinned=False)
    assert not chosen and link.begin(lambda: 7)() == 7
    assert chosen == [torch.device("cuda", 3)]
    link.close()


class Pins:
    """Stands for CUDA's calls that pin memory."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.unmapped = False  # whether memory was gone before CUDA was told
        self.error = 0  # which CUDA keeps

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.answer == 0:
            self.pinned[address] = nbytes
        self.error = self.answer
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        self.unmapped |= not any(int(low, 16) <= address < int(high, 16) for low, high in ranges)
        return 0

    def launch(self, numel: int, device: str) -> None:
        """A kernel, after which torch asks CUDA for errors."""
        kept, self.error = self.error, 0
        if kept:
            raise RuntimeError("CUDA error: out of memory")


@pytest.mark.parametrize("answer", (0, 2))
def test_pinned_memory_takes_its_bytes_and_no_more(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    """torch's allocator would take 4 MiB for these. It does where CUDA refuses."""
    pins, asked = Pins(answer), []
    empty = torch.empty

    def record(*sizes: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*sizes, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pins)
    monkeypatch.setattr(torch, "empty", record)
    monkeypatch.setattr(torch, "ones", pins.launch)
    numel = (1 << 19) + 3
    flat = devices.host_empty(numel, torch.float32, pinned=True)
    assert flat.numel() == numel and flat.dtype == torch.float32
    flat.fill_(2.0)
    assert pins.error == 0, "the next kernel of the script would raise it"
    assert list(pins.pinned.values()) == ([4 * numel] if answer == 0 else [])
    assert asked == ([] if answer == 0 else [True])
    part = flat[5:9]
    del flat
    gc.collect()
    assert part.tolist() == [2.0] * 4 and len(pins.pinned) == (answer == 0)
    del part
    gc.collect()
    assert not pins.pinned and not pins.unmapped


def test_a_little_pinned_memory_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Pins(0))
    monkeypatch.setattr(torch, "empty", lambda numel, **kwargs: (numel, kwargs["pin_memory"]))
    assert devices.host_empty(1000, torch.float32, pinned=True) == (1000, True)
