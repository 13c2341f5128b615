"""Messages between stages: what they say of a value, and what cannot be sent. Sending itself is in tests/ranks."""

from __future__ import annotations

import enum
import pickle
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree
from transformers.modeling_outputs import BaseModelOutputWithPast

from zerorun.distributed.wire import encode
from zerorun.errors import PipelineError
from zerorun.pipeline.p2p import describe, read_description, tensors_of

Pair = namedtuple("Pair", "left right")


class Sides(NamedTuple):
    left: Any
    right: int = 0


class Colour(str, enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: Any
    y: Any


@dataclass
class Unknown:
    x: Any


torch.export.register_dataclass(Point)


def test_a_description_is_all_but_the_elements() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    value = {"x": x, "more": [Pair(torch.ones(2, dtype=torch.bool), None), (1, 2.5, "text", True)]}
    described, tensors = describe(value)
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in tensors_of(value)]
    found = read_description(described)
    skeleton = _pytree.tree_unflatten(found.leaves, found.tree)
    assert (skeleton["x"].shape, skeleton["x"].dtype, skeleton["x"].wants_gradient) == ((2, 3), torch.float32, True)
    assert skeleton["more"][0].left.dtype == torch.bool
    assert not skeleton["more"][0].left.wants_gradient
    assert skeleton["more"][0].right is None
    assert skeleton["more"][1] == (1, 2.5, "text", True)
    assert describe({"x": torch.ones(2, 3, requires_grad=True), "more": value["more"]})[0] == described
    assert describe({"x": x.detach(), "more": value["more"]})[0] != described


@pytest.mark.parametrize(
    ("value", "what"),
    (
        ({"a": [1, object()]}, r"builtins.object \(at \['a'\]\[1\]\)"),
        (lambda: None, r"builtins.function \(at the value itself\)"),
        ((torch.eye(2).to_sparse(),), r"a tensor of layout torch.sparse_coo \(at \[0\]\)"),
    ),
)
def test_what_cannot_be_sent_is_named(value: Any, what: str) -> None:
    with pytest.raises(PipelineError, match=what):
        describe(value)


def test_a_dataclass_can_be_made_known() -> None:
    with pytest.raises(PipelineError, match=r"Unknown \(at \['a'\]\).*register_dataclass"):
        describe({"a": Unknown(torch.ones(1))})


@pytest.mark.parametrize(
    "value",
    (
        None,
        (True, 1, 1.0, -0.0, float("inf"), 2**70, 1 - 2j, "\u00e9\ud800", b"\x00\xff", slice(1, None, 2)),
        [torch.bfloat16, torch.device("cuda", 1), Colour.RED],
        {1: (), (2, "b"): [], None: {}, Colour.RED: 0, Pair(1, 2): torch.int8},
        [OrderedDict(b=1, a=2), deque([1, 2], 3), defaultdict(list, a=[1]), defaultdict(None, b=2)],
        Sides(Pair(1, [Sides(None)]), 4),
        Point(1, {"z": Point(2, 3)}),
        torch.max(torch.arange(4.0), dim=0),
        BaseModelOutputWithPast(last_hidden_state=torch.ones(2), hidden_states=(torch.ones(3), torch.ones(1))),
    ),
)
def test_what_layers_give_arrives_as_it_was(value: Any) -> None:
    described, tensors = describe(value)
    found, rest = read_description(described), iter(tensors)
    leaves = [leaf if not hasattr(leaf, "wants_gradient") else next(rest) for leaf in found.leaves]
    arrived = _pytree.tree_unflatten(leaves, found.tree)
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)


class Evil:
    """Leaves ``trace`` where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


HOSTILE: tuple[Any, ...] = (
    [["subprocess", "Popen", None, [[]]], ["true"]],
    [["collections", "namedtuple", ["subprocess", "Popen"], [[]]], ["true"]],
    [["collections", "namedtuple", ["antigravity", "geohash"], [[]]], [1]],
    [["builtins", "list", None, [[], []]], [1]],
    [["builtins", "list", None], []],
    7,
)


@pytest.mark.parametrize("told", HOSTILE)
def test_a_message_makes_only_known_containers(told: Any) -> None:
    with pytest.raises(PipelineError, match="cannot be read"):
        read_description(encode(told))


def test_a_description_that_is_a_pickle_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="cannot be read"):
        read_description(pickle.dumps(Evil(tmp_path / "owned")))
    assert not list(tmp_path.iterdir())
