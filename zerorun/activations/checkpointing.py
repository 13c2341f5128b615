"""Gradient checkpointing for models that call it themselves, under the names of ``deepspeed.checkpointing``.

    x = zerorun.checkpointing.checkpoint(block, x, mask=mask)

works without an engine. While an engine exists, ``cpu_checkpointing`` and ``policy: "selective"`` of its section
``activation_checkpointing`` apply to these calls as well; ``configure`` sets both without an engine.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..config.parse import load_config
from ..distributed.device import default_device
from ..plan.replaced_forwards import uncompiled
from .blocks import Recompute
from .checkpointed_call import Selection, map_tensors, run
from .host_pool import HostPool
from .selective import OperationWatch, storages


class _Current:
    """The settings of ``checkpoint``. DeepSpeed's functions have no object to keep them in."""

    def __init__(self) -> None:
        self.layers = [Recompute()]  # what applies, below it that of engines that still exist, and the first
        self.configured = False
        self.selections: weakref.WeakKeyDictionary[Any, Selection] = weakref.WeakKeyDictionary()  # by _kind

    @property
    def settings(self) -> Recompute:
        """What applies."""
        return self.layers[-1]


_current = _Current()


class Adopted:
    """Applies the settings of an engine to ``checkpoint`` until ``remove`` is called."""

    def __init__(self, settings: Recompute) -> None:
        self._settings = settings
        _use([*_current.layers, settings])

    def remove(self) -> None:
        """Let those settings apply that did so before, or have been applied since; none of a removed one come back."""
        _use([layer for layer in _current.layers if layer is not self._settings])


def _use(layers: list[Recompute]) -> None:
    before, _current.layers = _current.settings, layers
    if _current.settings is not before:
        _current.selections.clear()


@uncompiled
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` and keep only its inputs for backward, which runs it again.

    Arguments and results may be anything. The second run repeats the random numbers of the first. With gradients disabled,
    this is a plain call. Raises ModelError if ``function`` changes an input in place.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    selection = None
    if _current.settings.policy == "selective":
        selection = _current.selections.setdefault(_kind(function), Selection())
    return run(function, args, kwargs, _current.settings.pool, selection)


def _kind(function: Any) -> Any:
    """Return what identifies ``function`` from call to call: a module, or the code of functions that a loop makes anew."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if isinstance(function, nn.Module) else getattr(function, "__code__", type(function))


non_reentrant_checkpoint = checkpoint


def configure(
    mpu_: Any = None,
    deepspeed_config: str | Path | dict[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set up ``checkpoint``, in DeepSpeed's way. ``checkpoint_in_cpu`` overrides the section of ``deepspeed_config``.

    The other arguments have no effect, for the reasons given in the notes of the configuration. Raises ConfigError.
    """
    section = load_config(deepspeed_config).activation_checkpointing if deepspeed_config is not None else None
    in_cpu = checkpoint_in_cpu if checkpoint_in_cpu is not None else section is not None and section.cpu_checkpointing
    policy = section.policy if section is not None else _current.settings.policy
    _use([Recompute(policy, pool=HostPool(default_device()) if in_cpu else None)])
    _current.configured = True


def is_configured() -> bool:
    """True after ``configure``, or while an engine exists whose file turns on ``activation_checkpointing``."""
    return _current.configured or _current.settings != Recompute()


def reset() -> None:
    """Do nothing: a forward without backward leaves nothing behind. This exists for training loops that call it."""


def kept_bytes(function: Callable[..., Any], *args: Any, policy: str = "full", **kwargs: Any) -> int:
    """Return the bytes that ``function(*args, **kwargs)``, usually a block, keeps between forward and backward.

    ``policy``: "none", "full" or "selective", as in the configuration. Inputs count, parameters do not. The output counts
    only if it is kept as well. Nothing is computed: the call runs on tensors without contents. Raises ValueError for
    another policy.
    """
    if policy not in ("none", "full", "selective"):
        raise ValueError(f"policy must be 'none', 'full' or 'selective', got {policy!r}")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        inputs: dict[int, int] = {}

        def imitate(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, nn.Parameter):
                return tensor
            fake = mode.from_tensor(tensor)
            with torch._C._DisableTorchDispatch():  # without contents, a sparse tensor has no size
                sizes = [storage.nbytes() for storage in storages(tensor).values()]
            inputs.update(zip(storages(fake), sizes, strict=True))
            return fake

        given = map_tensors((args, kwargs), imitate)
        with OperationWatch() as watch:
            output = function(*given[0], **given[1])
        record = watch.record
        del output
    if policy == "none":
        return sum(size for storage, size in record.saved.items() if storage in record.made or storage in inputs)
    kept = dict(inputs)
    if policy == "selective":
        for position in record.choose():
            kept.update(record.results[position].storages)
    return sum(kept.values())
