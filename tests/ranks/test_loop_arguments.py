"""What a loop passes to an engine and cannot mean: one named error each, with what was given and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import CASES, Place
from training import make_config, make_engine

from zerorun.errors import CheckpointError, StepError, ZerorunError

PLAIN = CASES["plain"]


Mistake = tuple[Callable[[], Any], str, str]  # what is called, and what the error says is wrong, and the remedy


def losses(engine: Any, loss: torch.Tensor) -> list[Mistake]:
    number, labels = "tensor itself, and take loss.item() only to print", "only if they are given labels"
    return [
        (lambda: engine.backward(loss.item()), "backward() needs the loss as a tensor, got float", number),
        (lambda: engine.backward(numpy.float64(1)), "got float64", number),
        (lambda: engine.scale(1.0), "scale() needs the loss as a tensor, got float", number),
        (lambda: engine.backward(None), "got None", labels),
        (lambda: engine.backward(SimpleNamespace(loss=loss)), "a SimpleNamespace", "output.loss"),
        (lambda: engine.backward((loss,)), "a tuple", "the tensor that the model"),
        (lambda: engine.backward(loss.expand(2)), "(2,)", "loss.mean()"),
        (lambda: engine.backward(loss.detach()), "does not depend", "without detach()"),
        (lambda: engine.backward(loss, weight="x"), "weight of a loss must be a number, got str 'x'", "mask.sum()"),
        (lambda: engine.backward(loss, weight=torch.ones(3)), "must be a number, got a Tensor", "mask.sum()"),
    ]


def checkpoints(engine: Any, here: Path) -> list[Mistake]:
    path, name, slash = "str or a Path", "such as 'best'", "without '/'"
    return [
        (lambda: engine.save_checkpoint(None), "directory = None", path),
        (lambda: engine.save_checkpoint(3), "directory = 3", path),
        (lambda: engine.save_checkpoint(), "directory = ''", path),
        (lambda: engine.load_checkpoint(None), "directory = None", path),
        (lambda: engine.resume(), "directory = ''", path),
        (lambda: engine.export(None), "directory = None", path),
        (lambda: engine.save_checkpoint(here, ["best"]), "tag = ['best']: it must be a str, not a list", name),
        (lambda: engine.save_checkpoint(here, {"epoch": 1}), "tag = {'epoch': 1}", name),
        (lambda: engine.load_checkpoint(here, True), "tag = True", name),
        (lambda: engine.save_checkpoint(here, "a/b"), "tag = 'a/b'", slash),
        (lambda: engine.save_checkpoint(here, ""), "tag = ''", slash),
        (lambda: engine.load_checkpoint(here, ".."), "tag = '..'", slash),
        (lambda: engine.save_checkpoint(here, "t", [1]), "client_state = [1]: it must be a dict, not a list", "'mine'"),
        (lambda: engine.save_checkpoint(here, "t", {"f": losses}), "client_state.f is a builtins.function", "state_dict()"),
        (lambda: engine.export(here / "out", "int8"), "dtype = 'int8'", "'fp32', 'fp16', 'bf16'"),
        (lambda: engine.export(here / "out", merge_adapter=True), "has no adapters of PEFT", "leave it out"),
        (lambda: engine.export(here / "out", torch.int32), "dtype = torch.int32", "floating torch.dtype"),
    ]


def refused(kind: type[ZerorunError], mistakes: list[Mistake]) -> list[tuple[str, ...]]:
    """(error, what was expected in it) of those whose error is another one."""
    wrong = []
    for call, what, remedy in mistakes:
        try:
            call()
            wrong.append(("nothing", what))
        except Exception as error:
            before, _, after = str(error).partition("Remedy: ")
            if type(error) is not kind or what not in before or remedy not in after:
                wrong.append((repr(error), what, remedy))
    return wrong


def make_all(folder: str) -> list[tuple[str, ...]]:
    engine = make_engine(PLAIN, make_config(2))
    loss = PLAIN.loss(engine, Place(dist.get_rank(), 0, 0))
    wrong = refused(StepError, losses(engine, loss)) + refused(CheckpointError, checkpoints(engine, Path(folder)))
    engine.backward(loss)  # none of them has changed anything
    engine.step()
    engine.save_checkpoint(folder, 7)  # type: ignore[arg-type]
    engine.load_checkpoint(folder, "7", allow_missing="rng")
    engine.destroy()
    return wrong


def test_arguments_that_cannot_be_meant(tmp_path: Path) -> None:
    assert run_ranks(2, make_all, str(tmp_path)) == [[], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "latest"]


def save_on_one(folder: str) -> str:
    engine = make_engine(PLAIN, make_config(1))
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, "t" if dist.get_rank() == 0 else ["t"])
    engine.destroy()
    return str(caught.value)


def test_a_mistake_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    for message in run_ranks(2, save_on_one, str(tmp_path)):
        assert message.startswith("rank 1: tag = ['t']")
    assert not list(tmp_path.iterdir())
