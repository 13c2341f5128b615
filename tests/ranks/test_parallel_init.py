"""Models that are partitioned as they are built, or filled from files, and then cut and divided, equal one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from test_parallel_matrix import build, compare, reference, train
from torch import nn
from training import make_config

import zerorun
from zerorun.zero.init import part_of

CELLS = ((2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 3, 1), (2, 2, 2))


def in_init(name: str) -> nn.Module:
    with zerorun.zero.Init():
        model = build(name)
    assert all(part_of(param) is not None for param in model.parameters())
    return model


def from_files(name: str, folder: str) -> nn.Module:
    with zerorun.zero.Init():  # so that buffers have values
        torch.manual_seed(99)
        model = build(name)
        nn.init.zeros_(next(model.parameters()))
    zerorun.load_pretrained(model, folder)
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("name", ("llama", "gpt2"))
@pytest.mark.parametrize(("tensor", "pipe", "data"), by_day(CELLS, (2, 1, 2), (1, 3, 1)))
def test_built_in_init_equals_one_process(name: str, tensor: int, pipe: int, data: int) -> None:
    config = make_config(3 if pipe < 3 else 1, clip=0.5)
    found = run_ranks(tensor * pipe * data, train, name, tensor, pipe, config, in_init)
    compare(found, reference(name, data, 1))


@pytest.mark.parametrize("name", by_day(("llama", "gpt2"), "llama"))
def test_filled_from_files_equals_one_process(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    found = run_ranks(4, train, name, 2, 2, make_config(3, clip=0.5), partial(from_files, folder=str(tmp_path)))
    compare(found, reference(name, 1, 1))


def frozen_values(dtype: torch.dtype) -> list[int]:
    """The bytes of a frozen parameter of 3 elements that Init has partitioned, after an edit of its first byte."""
    with zerorun.zero.Init():
        holder = nn.Module()
        values = torch.arange(3 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        holder.codes = nn.Parameter(values, requires_grad=False)
    assert part_of(holder.codes) is not None
    with zerorun.zero.GatheredParameters([holder.codes], modifier_rank=0):
        if dist.get_rank() == 0:
            holder.codes.data.view(torch.uint8)[0] = 7
    with zerorun.zero.GatheredParameters([holder.codes]):
        return holder.codes.detach().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", (torch.int16, torch.complex64))
def test_frozen_parameters_of_any_dtype(dtype: torch.dtype) -> None:
    """The backends of torch know only some."""
    assert run_ranks(2, frozen_values, dtype) == [[7, *range(1, 3 * dtype.itemsize)]] * 2
