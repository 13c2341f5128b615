"""Measures how long each layer takes and how many bytes it keeps, for ``partition.Measured``."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..activations.checkpointed_call import map_tensors
from ..activations.checkpointing import kept_bytes
from ..distributed.device import gpus_in_use, synchronize
from .layer_spec import LayerSpec
from .pretrained_proof import examine

RUNS = 5  # the median of these counts; one warm-up run comes before them


@dataclass
class _Call:
    """One recorded call of a module, to be repeated."""

    module: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def measure_layers(layers: nn.Module | Sequence[Any], example: Any) -> tuple[list[float], list[int]]:
    """Return (seconds, bytes), two lists with one number per layer, for ``Measured``.

    layers: the list for a PipelineModule, an nn.Sequential, or a transformers model, which counts as its blocks + 2 (see
        ``split_pretrained``). They must be on the device where they will run; nothing is changed.
    example: inputs of one micro-batch, as the first layer gets them; for a transformers model a dict of its keywords.
    The seconds are those of a forward and a backward, the gradients of parameters included. The bytes are those of the
    layer's parameters plus what it keeps between forward and backward.
    """
    if isinstance(layers, nn.Module) and not isinstance(layers, (nn.Sequential, nn.ModuleList)):
        groups = _calls_of(layers, example)
    else:
        groups = _calls_along(list(layers), example)
    seconds, sizes = [], []
    for calls in groups:
        seconds.append(sum(_seconds(call) for call in calls))
        sizes.append(
            _parameter_bytes(calls)
            + sum(kept_bytes(call.module, *call.args, policy="none", **call.kwargs) for call in calls)
        )
    return seconds, sizes


def _calls_along(layers: list[Any], value: Any) -> list[list[_Call]]:
    calls = []
    for layer in layers:
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        forward_fn = getattr(layer, "forward_fn", None) if isinstance(layer, LayerSpec) else None
        run = module if forward_fn is None else _With(module, forward_fn)
        calls.append([_Call(run, (value,))])
        with torch.no_grad():
            value = run(value)
    return calls


class _With(nn.Module):
    """A tied layer that is called through its ``forward_fn``."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.module, self.forward_fn = module, forward_fn

    def forward(self, value: Any) -> Any:
        return self.forward_fn(self.module, value)


def _calls_of(model: nn.Module, example: dict[str, Any]) -> list[list[_Call]]:
    anatomy = examine(model)
    groups: list[list[_Call]] = [[] for _ in range(anatomy.count + 2)]
    blocks = [f"{anatomy.blocks}.{index}" for index in range(anatomy.count)]
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name in (*anatomy.before, *blocks, *anatomy.after):
            layer = anatomy.layer_of(name)
            assert layer is not None
            stack.enter_context(_recording(model.get_submodule(name), groups[layer]))
        # With a cache, the keys and values of past tokens would grow with every call.
        no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        model(**{key: value for key, value in example.items() if key != "labels"}, **no_cache)
    return groups


@contextlib.contextmanager
def _recording(module: nn.Module, calls: list[_Call]) -> Iterator[None]:
    def record(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(called, args, kwargs))

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _parameter_bytes(calls: list[_Call]) -> int:
    params = {id(p): p for call in calls if isinstance(call.module, nn.Module) for p in call.module.parameters()}
    return sum(param.numel() * param.element_size() for param in params.values())


def _seconds(call: _Call) -> float:
    return statistics.median([_once(call) for _ in range(RUNS + 1)][1:])


def _once(call: _Call) -> float:
    """Time one forward and backward in seconds, without touching the ``.grad`` of parameters."""
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.detach().requires_grad_(tensor.is_floating_point())
        leaves.append(made)
        return made

    args, kwargs = map_tensors((call.args, call.kwargs), leaf)
    params = list(call.module.parameters()) if isinstance(call.module, nn.Module) else []
    start = _now()
    with torch.enable_grad():
        output = call.module(*args, **kwargs)
    results: list[torch.Tensor] = []
    map_tensors(output, results.append)
    roots = [result for result in results if result.requires_grad]
    wanted = [tensor for tensor in (*leaves, *params) if tensor.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)
    return _now() - start


def _now() -> float:
    for device in gpus_in_use():
        synchronize(device)
    return time.perf_counter()
