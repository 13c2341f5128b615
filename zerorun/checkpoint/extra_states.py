"""Extra states: what modules return from ``get_extra_state``. Checkpoints have them; exports are weights alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..log import listed, warn_once
from ..plan.units import stored_name
from .json_values import decode
from .matching import Wanted, misfit
from .read import Reader

_SUFFIX = "_extra_state"


def names_in(model: nn.Module) -> list[str]:
    """The names that the extra states of ``model`` have in its state dict."""
    return [name for name, module in _modules(model) if type(module).get_extra_state is not nn.Module.get_extra_state]


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules by the names that their extra states have. A compiled one and the one inside it, the later, have one."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield stored_name(f"{name}.{_SUFFIX}" if name else _SUFFIX), module


def refuse_lacking(reader: Reader, names: Iterable[str], wanted: Wanted) -> None:
    """Raise CheckpointError if a checkpoint lacks the extra states ``names``. Files of weights alone have none."""
    stored = (reader.manifest.extra_state if reader.manifest else None) or {}
    lacking = [repr(name) for name in names if name not in stored and not wanted.allows(name)]
    if lacking and reader.manifest is not None and wanted.strict:
        remedy = "pass strict=False, or allow_missing=[...], if these modules may begin afresh."
        raise misfit(reader, "lacks", lacking, remedy)


def give_back(model: nn.Module, names: Iterable[str], reader: Reader, tensors: dict[str, torch.Tensor]) -> None:
    """Let the modules of ``model`` have their extra states ``names`` back. ``tensors``: what the manifest refers to.

    What a checkpoint lacks, or a class does not take back, stays as it is.
    """
    stored = (decode(reader.manifest.extra_state, tensors) if reader.manifest else None) or {}
    modules = dict(_modules(model))
    for name in (name for name in names if name in stored and name in modules):
        module = modules[name]
        if type(module).set_extra_state is nn.Module.set_extra_state:
            warn_once(f"{type(module).__name__} has no set_extra_state(), so it does not get back what it had returned.")
        else:
            module.set_extra_state(stored[name])


def left_out(extra: Mapping[str, Any] | None) -> str:
    """In words, which of the extra states of a manifest an export leaves out; "" if there are none."""
    names = sorted(repr(name) for name in extra or {} if name.endswith(_SUFFIX))
    return f"without what modules return from get_extra_state(), which is no weight: {listed(names)}" if names else ""
