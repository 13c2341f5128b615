"""Freed host memory stays with the process for the next step, unless the user has said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest
import torch
from covering import by_day

from zerorun.distributed.transport.huge_pages import prefer_huge_pages
from zerorun.zero.offload.host_memory import give_back_freed

# A step: 16 MiB in pieces of 1 MiB, all freed at its end. Prints the page faults of the last of three, before memory is
# kept, and after that.
SCRIPT = """
import resource
import torch
from zerorun.zero.offload.host_memory import keep_freed
def step():
    pieces = [torch.ones(2**18) for _ in range(16)]
def faults():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
before = faults()
keep_freed()
print(before, faults())
"""
PAGES = 16 * 256  # of one step
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@cache
def faults(setting: str | None) -> list[int]:
    """Before and after, where the environment has the ``setting`` 65536."""
    env = {
        **{key: value for key, value in os.environ.items() if key not in SETTINGS},
        **({setting: "65536"} if setting else {}),
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_the_next_step_has_no_page_faults() -> None:
    assert faults(None)[1] < PAGES / 10
    # Each piece a mapping of its own: whether the end of a heap is given back depends on what lies behind it.
    assert faults("MALLOC_MMAP_THRESHOLD_")[0] > PAGES / 2


@pytest.mark.parametrize("name", by_day(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "MALLOC_MMAP_THRESHOLD_"))
def test_settings_of_the_user_stay(name: str) -> None:
    assert faults(name)[1] > PAGES / 2


def test_buffers_of_any_size_are_left_as_they_are() -> None:
    for numel in (0, 1, 2**20, 3 * 2**20):
        buffer = torch.zeros(numel)
        prefer_huge_pages(buffer)
        give_back_freed()
        assert buffer.sum() == 0
