"""What ranks tell each other: data that arrives as it was, and never code, whoever sends it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import pickle
import random
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_layering import sources

from zerorun.checkpoint.ranks import Problem
from zerorun.distributed.wire import decode, encode
from zerorun.errors import MessageError
from zerorun.memory.fitting import Demand
from zerorun.pipeline.schedule.actions import Action, ActionKind
from zerorun.pipeline.schedule.simulate import Span

VALUES: tuple[Any, ...] = (
    [None, True, 0, -5, 2**70, 0.1, -0.0, float("nan"), "text\udc80", "$", {}],
    (1, (2, [3, ()]), {4, "five"}, frozenset({(6,)})),
    {"a": 1, 2: "b", None: {"list": []}, (3, 4): b"\x00\xff", ActionKind.FORWARD: bytearray(b"x")},
    OrderedDict(z=1, a=2),
    [torch.float16, torch.device("cpu"), torch.Size([1, 2]), slice(None, 3), 1 + 2j, numpy.float64(0.3), numpy.int8(-3)],
    [Demand(1, 2, 3, "node"), Problem("wrong", True), (Span(Action(ActionKind.FORWARD, 1, 0), 0.5, 1.5),)],
)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_arrive_as_they_were(value: Any) -> None:
    found = decode(encode(value))
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def test_integers_may_be_longer_than_python_prints() -> None:
    assert decode(encode([2**20_000, -(2**20_000)])) == [2**20_000, -(2**20_000)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.complex64, torch.uint8])
def test_tensors_arrive_with_their_bits(dtype: torch.dtype) -> None:
    number = torch.tensor(1).to(dtype)
    given = [torch.arange(6).to(dtype).view(2, 3).t(), b"between", torch.empty(0, 4, dtype=dtype), number]
    for mine, theirs in zip(given, decode(encode(given)), strict=True):
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine, theirs)


class Mine:
    pass


class Text(str):
    def __str__(self) -> str:
        return "another"


def test_of_classes_made_from_plain_ones_the_plain_value_arrives() -> None:
    class Number(int):
        pass

    class Real(float):
        pass

    found = decode(encode([Text("text"), Number(3), Real(0.5), torch.__version__]))
    assert found == ["text", 3, 0.5, str(torch.__version__)]
    assert [type(value) for value in found] == [str, int, float, str]


@dataclasses.dataclass
class NotOurs:
    x: int = 1


SPARSE = torch.eye(2).to_sparse()


@pytest.mark.parametrize("value", [Mine(), Mine, NotOurs(), lambda: 0, numpy.zeros(2, dtype=object), SPARSE])
def test_what_cannot_be_sent_is_named(value: Any) -> None:
    kind = type(value).__qualname__ if not isinstance(value, torch.Tensor) else "layout torch.sparse_coo"
    with pytest.raises(MessageError, match=kind):
        encode([{"a": value}])


def test_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(MessageError, match="contains itself"):
        encode(value)


def told(text: str, rest: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + rest


HOSTILE = (
    '{"data":["subprocess","Popen",{"args":["true"]}]}',
    '{"data":["test_wire","NotOurs",{"x":1}]}',
    '{"data":["zerorun.memory.fitting","os.system",{}]}',
    '{"data":["zerorun.memory.fitting","Demand",{"__class__":1}]}',
    '{"data":["zerorun.memory.fitting","Fitting",{}]}',
    '{"named":["subprocess","Popen",[1]]}',
    '{"named":["antigravity","geohash",[1]]}',
    '{"member":["enum","Enum","__class__"]}',
    '{"member":["os","system","x"]}',
    '{"type":"eval"}',
    '{"dtype":"load"}',
    '{"number":["O",8]}',
    '{"number":["<f8",8]}',
    '{"tensor":["float32",[1000000,1000000]]}',
    '{"tensor":["float32",[-1,-1]]}',
    '{"bytes":9223372036854775807}',
    '{"bytes":-1}',
    '{"set":[[]]}',
    '{"dict":[[[],1]]}',
    '{"dict":[1]}',
    "{}",
    '{"unknown":1}',
    "[" * 100_000,
    "",
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:40])
def test_hostile_messages_give_one_error(text: str) -> None:
    loaded = set(sys.modules)
    with pytest.raises(MessageError, match="cannot be read"):
        decode(told(text))
    assert "antigravity" not in set(sys.modules) - loaded


def test_any_bytes_give_a_value_or_one_error() -> None:
    """Messages with bits turned over, cut short and lengthened."""
    rng, whole = random.Random(0), encode([*VALUES, torch.ones(3)])
    for _ in range(500):
        content = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(4)):
            if content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        with contextlib.suppress(MessageError):
            decode(bytes(content))
    with pytest.raises(MessageError, match="longer than it says"):
        decode(told("1", b"more"))


class Evil:
    """Leaves ``trace`` where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(MessageError):
        decode(pickle.dumps(Evil(tmp_path / "owned")))
    assert not list(tmp_path.iterdir())


_PICKLING = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
_PICKLING |= {"send_object_list", "recv_object_list"}
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FOREIGN = {f"checkpoint.{name}" for name in ("foreign", "importers.from_dcp", "importers.pickles", "importers.torch_files")}
"""They read what others wrote, with unpicklers that refuse what is not data."""


def test_nothing_of_ours_is_pickled() -> None:
    """No message, file or socket of zerorun's own goes through pickle, or through what torch.distributed pickles."""
    found = []
    texts = {name: path.read_text() for name, path in sources().items()}
    for name in (name for name, text in texts.items() if any(word in text for word in _MODULES | _PICKLING)):
        for node in ast.walk(ast.parse(texts[name])):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            called = node.attr if isinstance(node, ast.Attribute) else ""
            if _MODULES & set(modules) and name not in FOREIGN:
                found.append(f"{name} imports {modules}")
            if called in _PICKLING:
                found.append(f"{name} calls {called}")
    assert not found
