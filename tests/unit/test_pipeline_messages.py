"""Messages between stages: what they say of a value, and what cannot be sent. Sending itself is in tests/ranks."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch

from zerorun.errors import PipelineError
from zerorun.pipeline.messages import describe, tensors_of

Pair = namedtuple("Pair", "left right")


def test_a_description_is_all_but_the_elements() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    value = {"x": x, "more": [Pair(torch.ones(2, dtype=torch.bool), None), (1, 2.5, "text", True)]}
    described, tensors = describe(value)
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in tensors_of(value)]
    skeleton = pickle.loads(described)
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
