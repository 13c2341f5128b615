"""The saver: one save at a time, and copies that are what was to be saved."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from zerorun.checkpoint.inventory import TensorPart
from zerorun.checkpoint.save import Captured, Saver
from zerorun.checkpoint.write import Destination
from zerorun.checkpoint.write_plan import MODEL


def saver() -> Saver:
    alone = SimpleNamespace(close=lambda: None, agree=lambda problem: None, gather=lambda value: [value])
    return Saver(alone, None)  # type: ignore[arg-type]


def captured(*tensors: torch.Tensor) -> Captured:
    parts = [TensorPart(MODEL, f"p{index}", 0, tensor, (tensor.numel(),)) for index, tensor in enumerate(tensors)]
    return Captured(parts, [part.name for part in parts], {}, {}, None)  # type: ignore[arg-type]


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    """Two at once would write, rename and delete the same names."""
    events: list[str] = []
    may_end, kept = threading.Event(), saver()

    def write(captured: Captured, target: Destination) -> Path:
        events.append(f"{target.tag} begins")
        if target.tag == "first":
            may_end.wait(60)
        events.append(f"{target.tag} ends")
        return target.directory / target.tag

    kept._write = write  # type: ignore[method-assign]
    kept.save(captured(), Destination(tmp_path, "first"), asynchronous=True)
    timer = threading.Timer(0.2, may_end.set)
    timer.start()
    assert kept.save(captured(), Destination(tmp_path, "second"), asynchronous=False) == tmp_path / "second"
    may_end.set()
    kept.close()
    timer.join()
    assert events == ["first begins", "first ends", "second begins", "second ends"]


def staged(kept: Saver, *tensors: torch.Tensor) -> list[torch.Tensor]:
    found: list[Any] = [part.tensor for part in kept._stage(captured(*tensors).parts)]
    return found


def test_copies_are_what_was_to_be_saved() -> None:
    """Their memory is kept for the next save, unless a buffer has another size or dtype by then."""
    kept, first = saver(), torch.tensor([1.0, 2.0])
    (copy,) = staged(kept, first)
    first.zero_()
    assert copy.tolist() == [1.0, 2.0]
    (again,) = staged(kept, torch.tensor([3.0, 4.0]))
    assert again.data_ptr() == copy.data_ptr()
    for other in (torch.tensor([2.0**53 - 1, 1 / 3], dtype=torch.float64), torch.tensor([7, 8]), torch.arange(3.0)):
        (copy,) = staged(kept, other)
        assert copy.dtype == other.dtype and torch.equal(copy, other)
