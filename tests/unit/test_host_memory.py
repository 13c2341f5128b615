"""Freed host memory stays with the process for the next step, unless the user has said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from covering import by_day

from zerorun.distributed.transport.huge_pages import prefer_huge_pages
from zerorun.zero.offload.host_memory import give_back_freed

# A step: 16 MiB in pieces of 1 MiB, all freed at its end. Prints the page faults of the last of three.
SCRIPT = """
import resource, sys
import torch
from zerorun.zero.offload.host_memory import keep_freed
if sys.argv[1] == "keep":
    keep_freed()
def step():
    pieces = [torch.ones(2**18) for _ in range(16)]
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 16 * 256  # of one step
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def faults(what: str, **settings: str) -> int:
    env = {**{key: value for key, value in os.environ.items() if key not in SETTINGS}, **settings}
    done = subprocess.run([sys.executable, "-c", SCRIPT, what], env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_next_step_has_no_page_faults() -> None:
    assert faults("keep") < PAGES / 10
    # Each piece a mapping of its own: whether the end of a heap is given back depends on what lies behind it.
    assert faults("do not", MALLOC_MMAP_THRESHOLD_="65536") > PAGES / 2


@pytest.mark.parametrize("name", by_day(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "MALLOC_MMAP_THRESHOLD_"))
def test_settings_of_the_user_stay(name: str) -> None:
    assert faults("keep", **{name: "65536"}) > PAGES / 2


def test_buffers_of_any_size_are_left_as_they_are() -> None:
    for numel in (0, 1, 2**20, 3 * 2**20):
        buffer = torch.zeros(numel)
        prefer_huge_pages(buffer)
        give_back_freed()
        assert buffer.sum() == 0
