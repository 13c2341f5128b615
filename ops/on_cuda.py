"""Chooses what updates tensors on GPUs in one pass: the Triton kernels if they work, which a small update finds out.

Triton comes with PyTorch for CUDA. It compiles at run time, which needs a GPU that it supports, a directory for its cache,
and in some versions a C compiler. If anything is missing, callers get None and use torch, and the process warns once.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading

import torch

from . import native
from .update_operands import Operands, Updates

_logger = logging.getLogger("zerorun")
_lock = threading.Lock()


def kernels(device: torch.device) -> Updates | None:
    """Return what updates tensors on ``device``; None if torch must be used. Compiles at the first call for a device."""
    with _lock:
        return _outcome(device)[0]


def status(device: torch.device) -> str:
    """Describe which kernels are used on ``device``, and why."""
    with _lock:
        return _outcome(device)[1]


@functools.cache
def _outcome(device: torch.device) -> tuple[Updates | None, str]:
    try:
        triton = importlib.import_module("triton")
        found: Updates = importlib.import_module(f"{__package__}.triton_kernels").Kernels()
        _try(found, device)
    except Exception as error:  # a compiler, a driver, a linker: it can be anything
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        _warn(reason)
        return None, f"torch's kernels, as Triton's cannot be used ({reason})"
    return found, f"one kernel of Triton {triton.__version__}, tried on {device}"


@functools.cache
def _warn(reason: str) -> None:
    _logger.warning(
        "the single-pass optimizer cannot be used on the GPU: %s. torch's kernels are used instead, which take "
        "longer. Remedy: install the Triton that comes with PyTorch for CUDA.",
        reason,
    )


def _try(found: Updates, device: torch.device) -> None:
    """Make one step of 0.5 down from 0. Raises RuntimeError if the result is wrong, and whatever Triton raises."""
    weight, gradient = torch.zeros(3, device=device), torch.ones(3, dtype=torch.bfloat16, device=device)
    out = torch.zeros_like(gradient)
    found.update(native.SGD, Operands(weight, gradient, (), out, 0.5), {"rate": 1.0, "blend": 1.0})
    if weight.tolist() != [-0.5] * 3 or out.tolist() != [-0.5] * 3:
        raise RuntimeError(f"a step of 0.5 from 0 went to {weight.tolist()}")
