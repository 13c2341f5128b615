"""Describes the layers of a pipeline without keeping them, and builds those that this stage keeps.

[Note: values do not depend on the cut]
Each layer is built with its own seed, derived from one number and the layer's index, and building it leaves the random
number generators as they were. So a layer gets the same values whether or not the layers before it are built in this
process. A stage that uses a tied parameter but does not hold its first user builds that user too, takes the parameter, and
drops the rest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..activations.random_streams import streams
from ..distributed.device import gpu_generator, gpus_in_use
from ..distributed.generators import generators_as_before
from ..errors import PipelineError
from ..log import logger
from .hidden_parameters import hidden_in, tensors_reached
from .layer_spec import LayerSpec, TiedLayerSpec
from .partition import LayerFacts

# An odd number whose bits look random: seeds of neighbouring layers differ in many bits (Steele et al. 2014, SplitMix).
SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Description:
    """One layer. ``params``: (name in the layer, identity of the parameter), one pair for each name of a parameter.

    ``hidden``: identities of those that it uses and does not have.
    """

    facts: LayerFacts
    params: tuple[tuple[str, Hashable], ...]
    hidden: frozenset[int] = frozenset()


def describe(layers: Sequence[Any]) -> list[Description]:
    """Describe the layers. Specs are built on the meta device, where parameters take no memory, or for real if that fails.

    Raises PipelineError for what is neither a spec nor callable, for a spec that cannot be built, and for tied parameters
    that do not exist or differ in shape.
    """
    shapes: dict[Hashable, torch.Size] = {}
    return [_describe(index, layer, shapes) for index, layer in enumerate(layers)]


def _describe(index: int, layer: Any, shapes: dict[Hashable, torch.Size]) -> Description:
    if isinstance(layer, LayerSpec):
        module = _build_to_count(index, layer)
        names: dict[int, Hashable] = {id(param): id(param) for _, param in tensors_reached(*_given_to(layer))}
        if isinstance(layer, TiedLayerSpec):
            names |= _tied_names(index, layer, module, shapes)
        return _description(module, lambda param, name: names.get(id(param), (index, name)))
    if isinstance(layer, nn.Module):
        return _description(layer, lambda param, name: id(param))
    if callable(layer):
        return Description(LayerFacts(getattr(layer, "__name__", type(layer).__name__), 0), ())
    raise PipelineError(
        f"layer {index} is {layer!r}, of type {type(layer).__name__}. Remedy: give an nn.Module, a LayerSpec or a callable."
    )


def _given_to(spec: LayerSpec) -> list[Any]:
    """What may hold parameters that other layers have, too, before the layer is built."""
    return [spec.typename.__init__, spec.module_args, spec.module_kwargs]


def _description(module: nn.Module, identify: Callable[[nn.Parameter, str], Hashable]) -> Description:
    first: dict[int, str] = {}
    params = []
    for name, param in module.named_parameters(remove_duplicate=False):
        params.append((name, identify(param, first.setdefault(id(param), name))))
    numel = sum(param.numel() for param in module.parameters() if param.requires_grad)
    return Description(LayerFacts(type(module).__name__, numel), tuple(params), hidden_in(module))


def _build_to_count(index: int, spec: LayerSpec) -> nn.Module:
    with _same_random_numbers_after():
        try:
            with torch.device("meta"):
                return spec.build()
        except Exception as error:
            logger.debug("layer %d, %r, is built for real to count it: on the meta device, %s", index, spec, error)
        return _build(index, spec)


def _build(index: int, spec: LayerSpec) -> nn.Module:
    try:
        return spec.build()
    except Exception as error:
        raise PipelineError(
            f"layer {index}, {spec!r}, cannot be built: {type(error).__name__}: {error}. Remedy: correct its arguments."
        ) from error


def _tied_names(
    index: int, spec: TiedLayerSpec, module: nn.Module, shapes: dict[Hashable, torch.Size]
) -> dict[int, Hashable]:
    """Map id(parameter) to the parameter's identity, for the tied parameters of a layer."""
    names: dict[int, Hashable] = {}
    number = shapes.setdefault(("number of tied parameters", spec.key), torch.Size([len(spec.tied_weight_attr)]))
    if number[0] != len(spec.tied_weight_attr):
        raise PipelineError(
            f"layer {index} ties {list(spec.tied_weight_attr)} under the key {spec.key!r}, but the first layer of that key "
            f"ties {number[0]} parameters. Remedy: give as many paths in the same order."
        )
    for position, param in enumerate(tied_parameters(index, spec, module)):
        identity = ("tied", spec.key, position)
        shape = shapes.setdefault(identity, param.shape)
        if shape != param.shape:
            raise PipelineError(
                f"layer {index} ties {spec.tied_weight_attr[position]!r} of shape {tuple(param.shape)} under the key "
                f"{spec.key!r}, whose first layer has the shape {tuple(shape)}. Remedy: tie parameters of one shape."
            )
        names[id(param)] = identity
    return names


def tied_parameters(index: int, spec: TiedLayerSpec, module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a built layer that its spec ties, in the order of ``tied_weight_attr``."""
    known = dict(module.named_parameters(remove_duplicate=False))
    own = {id(param): param for param in known.values()}
    found = [known.get(path, own.get(id(_value_at(path, module)))) for path in spec.tied_weight_attr]
    missing = [path for path, param in zip(spec.tied_weight_attr, found, strict=True) if param is None]
    if missing:
        raise PipelineError(
            f"layer {index}, {spec!r}, has no parameter {missing[0]!r} to tie under the key {spec.key!r}. It has "
            f"{', '.join(known) or 'none'}. Remedy: name one of these in tied_weight_attr, or a property that returns one."
        )
    return [param for param in found if param is not None]


def _value_at(path: str, module: nn.Module) -> Any:
    """Return what the dotted ``path`` leads to, which may be a property, as in Megatron's layers; None if nothing."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


class Builder:
    """Builds layers, each with its own seed; tied parameters are shared among those that it built."""

    def __init__(self, layers: Sequence[Any], seed_of: Callable[[int], int], seed_fn: Callable[[int], Any] | None) -> None:
        self._layers, self._seed_of, self._seed_fn = layers, seed_of, seed_fn
        self._built: dict[int, nn.Module] = {}
        self._tied: dict[str, list[nn.Parameter]] = {}

    def layer(self, index: int) -> nn.Module | None:
        """The module of layer ``index``; None for a plain function."""
        given = self._layers[index]
        if not isinstance(given, LayerSpec):
            return given if isinstance(given, nn.Module) else None
        if index not in self._built:
            self._built[index] = self._build(index, given)
        return self._built[index]

    def _build(self, index: int, spec: LayerSpec) -> nn.Module:
        with _same_random_numbers_after():
            (self._seed_fn or _seed_generators)(self._seed_of(index))
            module = _build(index, spec)
        if isinstance(spec, TiedLayerSpec):
            own = tied_parameters(index, spec, module)
            for param, shared in zip(own, self._shared(index, spec, own), strict=True):
                _replace(module, param, shared)
        return module

    def _shared(self, index: int, spec: TiedLayerSpec, own: list[nn.Parameter]) -> list[nn.Parameter]:
        if spec.key not in self._tied:
            same = (i for i, other in enumerate(self._layers) if isinstance(other, TiedLayerSpec) and other.key == spec.key)
            first = next(same)
            if first == index:
                self._tied[spec.key] = own
            else:
                self._build(first, self._layers[first])  # puts its parameters into self._tied
        return self._tied[spec.key]


def _replace(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for holder in module.modules():
        for name, param in holder._parameters.items():
            if param is old:
                holder._parameters[name] = new


def _seed_generators(seed: int) -> None:
    # Not torch.manual_seed: before CUDA is initialized, it would queue this layer's seed for CUDA's generators.
    torch.default_generator.manual_seed(seed)
    for device in gpus_in_use():
        gpu_generator(device).manual_seed(seed)
    streams.begin_anew(seed)


@contextlib.contextmanager
def _same_random_numbers_after() -> Iterator[None]:
    with generators_as_before(), streams.as_before():
        yield


def draw_seeds() -> Callable[[int], int]:
    """Return a function layer index -> seed, from one draw of the default generator: equal on ranks seeded alike."""
    base = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return lambda index: (base + SEED_STEP * (index + 1)) % 2**63
