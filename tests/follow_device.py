"""What tests that were written for a CPU need where their ranks are on a GPU ($ZERORUN_TEST_DEVICE=cuda:0).

Inputs of an engine and targets of losses go to the device, as the loop of a user would send them; what is compared with
something on the CPU, and what a job returns, comes to host memory.
"""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from harness import tensor_of
from torch.utils import _pytree

from zerorun.engine.engine import Engine


def sent(given: Any, device: torch.device) -> Any:
    """``given`` with all its tensors on ``device``."""
    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), given)


def follow_the_device() -> None:
    """From here on in this process."""
    call = Engine.__call__

    def called(self: Engine, *inputs: Any, **kwargs: Any) -> Any:
        return call(self, *sent(inputs, self.device), **sent(kwargs, self.device))

    Engine.__call__ = called  # type: ignore[method-assign]
    for name in ("cross_entropy", "mse_loss", "nll_loss"):
        setattr(F, name, _with_targets(getattr(F, name)))
    for module, name in ((torch, "equal"), (torch, "allclose"), (torch.testing, "assert_close")):
        setattr(module, name, _on_the_host(getattr(module, name)))


def _with_targets(loss: Any) -> Any:
    @functools.wraps(loss)
    def computed(found: torch.Tensor, target: torch.Tensor, *more: Any, **how: Any) -> torch.Tensor:
        value: torch.Tensor = loss(found, target.to(found.device), *more, **how)
        return value

    return computed


def _on_the_host(compare: Any) -> Any:
    @functools.wraps(compare)
    def compared(*given: Any, **how: Any) -> Any:
        return compare(*sent(given, torch.device("cpu")), **how)

    return compared


class _InHostMemory(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.is_cuda:
            value = value.detach().cpu()
        plain = type(value) is torch.Tensor and value.layout == torch.strided and value.is_contiguous()
        if not plain or value.requires_grad or value.is_conj() or value.is_neg():
            return value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes()  # torch's own way takes seven times as long
        return tensor_of, (content, value.dtype, tuple(value.shape))


def packed(value: Any) -> bytes:
    """``value`` pickled, its tensors in host memory."""
    file = io.BytesIO()
    _InHostMemory(file, pickle.DEFAULT_PROTOCOL).dump(value)
    return file.getvalue()
