"""The process' generators of random numbers: what is tried out or thrown away leaves them as a plain loop finds them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .device import gpus_in_use


@contextmanager
def generators_as_before(*, gpus: bool = True) -> Iterator[None]:
    """Afterwards those of torch, Python and NumPy are as before. ``gpus``: also those of the GPU in use."""
    numpy, of_python = sys.modules.get("numpy"), random.getstate()
    of_numpy = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(gpus_in_use() if gpus else []):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)
