"""The state of every random number generator of a rank, as plain values and tensors."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ..activations.random_streams import streams
from ..distributed.device import gpu_generator, on_gpu
from ..errors import DamagedError


def capture(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of torch (CPU and ``device``), its streams, Python, and NumPy if it is used."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if on_gpu(device):
        found["cuda"] = gpu_generator(device).get_state()
    if states := streams.get_states():
        found["streams"] = states
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.tensor(keys.tolist(), dtype=torch.int64)
        found["numpy"] = {"kind": kind, "keys": words, "position": int(position), "gauss": [int(has_gauss), float(cached)]}
    return found


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what ``capture`` returned. Raises DamagedError for anything else; then none is changed."""
    before = capture(device)
    try:
        _restore(state, device)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        _restore(before, device)
        raise DamagedError(f"the stored state of the random number generators is invalid ({error!s:.200}).") from error


def _restore(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if on_gpu(device) and "cuda" in state:
        gpu_generator(device).set_state(state["cuda"])
    if "streams" in state and on_gpu(device) == ("cuda" in state):  # a state is of its kind of device
        streams.set_states({**streams.get_states(), **state["streams"]})
    if "numpy" in state:
        import numpy

        kept = state["numpy"]
        keys = numpy.array(kept["keys"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((kept["kind"], keys, kept["position"], *kept["gauss"]))
