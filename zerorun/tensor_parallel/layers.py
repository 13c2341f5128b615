"""Layers whose weights are divided over the tensor axis: column- and row-parallel linear, vocabulary-parallel embedding.

[Note: made or converted]
A new layer is made like its counterpart in torch, plus the region. It draws the whole initial weight, as torch's would, and
keeps its part. An existing layer is converted in place: its class becomes a subclass of the class that it had, so its name
and hooks stay, and ``isinstance`` still holds. ``restore`` gives it back its class and its whole weight. A Hugging Face
``Conv1D`` is a linear layer with a transposed weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..distributed.tensor_shard import Ranges, TensorShard, even_bounds, even_range
from ..errors import ModelError
from ..plan.float8_layers import float8_product, is_float8
from ..plan.parameter_kinds import PLAIN, kind_of
from ..zero.init import part_of, refuse_partitioned
from .axis import Axis
from .collectives import Region, gather_columns, split_columns
from .vocabulary import check_inside


class Parallel:
    """Base class of the layers in this file. ``region``: that of the axis; the layers of one model share it."""

    region: Region
    tensor_shards: dict[str, TensorShard]
    partial_gradients: tuple[str, ...]
    ordinary: type[nn.Module]  # the class that a converted layer had
    whole_sizes: dict[str, int]  # attributes that were made smaller
    weight_gradients: Any = None  # the WeightGradients that takes them for later, if any: see pipeline/split_backward.py

    @property
    def axis(self) -> Axis:
        return self.region.axis


class ColumnParallelLinear(Parallel, nn.Linear):
    """y = x W^T + b with the rows of W, and so the columns of y, divided over the axis.

    x [..., in_features] is whole; y is [..., own columns], or whole with ``gather_output``.
    """

    enters = True  # False: a module around it has entered the region
    own_stream = True  # False: nothing leaves the region that it enters
    gather_output = False
    around: tuple[nn.Module, ...] = ()  # the module that uses the columns, if it is known
    used: tuple[int, int] | None = None  # if set, the weight is whole, and only these rows of it are used

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        region: Region,
        gather_output: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        own = even_range(out_features, region.axis.rank, region.axis.size)
        make_column_parallel(self, region, (own,), gather_output=gather_output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enters:
            x = self.region.enter(x, drawing=self.drawing if self.own_stream and not self.gather_output else ())
        y = _product(self, x, *self._weights())
        if self.gather_output:
            self.region.forget()
            y = gather_columns(y, self.axis, even_bounds(self.whole_sizes["out_features"], self.axis.size))
        return y

    @property
    def drawing(self) -> tuple[nn.Module, ...]:
        """What may draw random numbers on columns: such a dropout may be in another mode than this layer."""
        return (self, *self.around)

    @contextmanager
    def keeping_columns(self) -> Iterator[None]:
        """While this rank needs its own columns only, of a layer that gathers its output otherwise."""
        gathers, self.gather_output = self.gather_output, False
        try:
            yield
        finally:
            self.gather_output = gathers

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.used is None:
            return self.weight, self.bias
        dim, (low, high) = 1 if is_transposed(self) else 0, self.used
        bias = None if self.bias is None else self.bias[low:high]
        return self.weight.narrow(dim, low, high - low), bias


class RowParallelLinear(Parallel, nn.Linear):
    """y = x W^T + b with the columns of W, and so those of x, divided over the axis.

    x is [..., own columns], or whole with ``split_input``; y [..., out_features] is whole.
    """

    split_input = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        region: Region,
        split_input: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        own = even_range(in_features, region.axis.rank, region.axis.size)
        make_row_parallel(self, region, (own,), split_input=split_input)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.split_input:
            x = split_columns(x, self.axis, even_bounds(self.whole_sizes["in_features"], self.axis.size))
        y = self.region.leave(_product(self, x, self.weight, None))
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(Parallel, nn.Embedding):
    """An embedding with the rows of its table divided over the axis. Indices and result are whole."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        region: Region,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        nn.Embedding.__init__(self, num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        make_vocab_parallel(self, region)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        check_inside(indices, self.whole_sizes["num_embeddings"], "token ids")
        low, high = self.tensor_shards["weight"].ranges[0]
        elsewhere = (indices < low) | (indices >= high)
        own = (indices - low).masked_fill(elsewhere, 0)
        padding = self.padding_idx - low if self.padding_idx is not None and low <= self.padding_idx < high else None
        found = functional.embedding(own, self.weight, padding)
        return self.region.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0))


# -- conversion --------------------------------------------------------------------------------------------------


def make_column_parallel(layer: nn.Module, region: Region, own: Ranges, *, gather_output: bool = False) -> None:
    """Let ``layer`` keep only the output columns ``own``. Raises ModelError if it is not a linear layer."""
    dim = _output_dim(layer)
    _convert(layer, ColumnParallelLinear, region, {"weight": (dim, own), "bias": (0, own)}, ("out_features", "nf"))
    layer.gather_output = gather_output  # type: ignore[assignment]


def use_columns(layer: nn.Module, region: Region, used: tuple[int, int]) -> None:
    """Let a linear ``layer`` keep its whole weight, but compute only the output columns ``used``, which ranks may share."""
    _output_dim(layer)
    _convert(layer, ColumnParallelLinear, region, {}, ())
    layer.used = used  # type: ignore[assignment]
    layer.partial_gradients = ("weight", "bias")  # type: ignore[assignment]


def make_row_parallel(layer: nn.Module, region: Region, own: Ranges, *, split_input: bool = False) -> None:
    """Let ``layer`` keep only the input columns ``own``. Raises ModelError if it is not a linear layer."""
    _convert(layer, RowParallelLinear, region, {"weight": (1 - _output_dim(layer), own)}, ("in_features", "nx"))
    layer.split_input = split_input  # type: ignore[assignment]


def make_vocab_parallel(layer: nn.Module, region: Region) -> None:
    """Let ``layer`` keep only its part of the table. Raises ModelError unless it is an nn.Embedding, and a plain one."""
    if not isinstance(layer, nn.Embedding):
        raise ModelError(f"an nn.Embedding is needed for a vocabulary-parallel embedding, got {type(layer).__name__}.")
    if not is_plain_embedding(layer):
        raise ModelError(
            "an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be divided over tensor-parallel "
            "ranks. Remedy: leave it out of the plan, or make it without these."
        )
    own = (even_range(layer.num_embeddings, region.axis.rank, region.axis.size),)
    _convert(layer, VocabParallelEmbedding, region, {"weight": (0, own)}, ("num_embeddings",))


def is_plain_embedding(layer: nn.Module) -> bool:
    """True for an embedding whose rows can be divided: nothing is done to rows, or with the number of their uses."""
    return isinstance(layer, nn.Embedding) and not (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse)


def restore(layer: nn.Module) -> None:
    """Turn a layer of this file back into the ordinary one, with whole weights. All tensor ranks must call this."""
    assert isinstance(layer, Parallel)
    join(layer, layer.axis)
    for name, size in layer.whole_sizes.items():
        setattr(layer, name, size)
    layer.__class__ = layer.ordinary  # type: ignore[assignment]
    for name in ("region", "tensor_shards", "partial_gradients", "ordinary", "whole_sizes", "used", "gather_output"):
        layer.__dict__.pop(name, None)
    for name in ("split_input", "enters", "own_stream", "around"):
        layer.__dict__.pop(name, None)


def join(module: nn.Module, axis: Axis) -> None:
    """Make the divided parameters of ``module`` itself whole, and drop their gradients. All tensor ranks must call this.

    A parameter that two layers share becomes whole with the first of them, and is skipped for the second.
    """
    for name, shard in getattr(module, "tensor_shards", {}).items():
        param = module._parameters.get(name)
        if param is None or tuple(param.shape) != shard.local_shape:
            continue
        _put(param, whole_of(param.data, shard, axis) if part_of(param) is None else _unfilled(param, shard.shape))


def take_part(param: nn.Parameter, shard: TensorShard) -> None:
    """Reduce a whole ``param`` to what ``shard`` says is this rank's."""
    _put(param, shard.cut(param.data) if part_of(param) is None else _unfilled(param, shard.local_shape))


def _put(param: nn.Parameter, value: torch.Tensor) -> None:
    """Give ``param`` a value of another shape, and no gradient.

    While somebody keeps the graph of an earlier forward, autograd expects gradients of the old shape. It forgets the shape
    if the dtype changes, so another dtype is set in between.
    """
    param.grad = None
    if param.is_floating_point():
        other = torch.float32 if param.dtype == torch.float64 else torch.float64
        param.data = torch.empty(0, dtype=other, device=param.device)
    param.data = value


def _unfilled(param: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
    """Return, in another shape, what a parameter that zero.Init partitioned shows until it gets values."""
    return param.data.flatten()[:1].view([1] * len(shape)).expand(shape)


def whole_of(part: torch.Tensor, shard: TensorShard, axis: Axis) -> torch.Tensor:
    """Return the whole tensor, of which each rank of ``axis`` has a ``part``. All of them must call this."""
    summand = torch.zeros(shard.shape, dtype=part.dtype, device=part.device)
    if part.is_meta:
        return summand
    shard.put(part, summand)
    return axis.all_reduce(summand, f"{shard.axis}: whole weights")


def _convert(
    layer: nn.Module,
    kind: type[nn.Module],
    region: Region,
    divided: dict[str, tuple[int, Ranges]],
    sizes: tuple[str, ...],
) -> None:
    """Give ``layer`` the class ``kind``, and its part of each parameter in ``divided``: name -> (dimension, ranges).

    A parameter that a tied layer has divided already is not divided again.
    """
    converted: Any = layer
    converted.region, converted.partial_gradients = region, ()
    converted.whole_sizes = {name: getattr(layer, name) for name in sizes if hasattr(layer, name)}
    converted.tensor_shards = {}
    for name, (dim, own) in divided.items():
        param = layer._parameters.get(name)
        if param is not None:
            converted.tensor_shards[name] = divide(param, dim, own, region)
    length = sum(high - low for low, high in next(iter(divided.values()), (0, ()))[1])
    for name in converted.whole_sizes:
        setattr(layer, name, length)
    if not isinstance(layer, kind):
        converted.ordinary = type(layer)
        converted.__class__ = _subclass(type(layer), kind)
    else:
        converted.ordinary = nn.Embedding if isinstance(layer, nn.Embedding) else nn.Linear


def divide(param: nn.Parameter, dim: int, own: Ranges, region: Region) -> TensorShard:
    """Reduce ``param`` to this rank's part, ``own`` along ``dim``. Raises ModelError if it is divided in another way."""
    known = region.divided.get(param)
    refuse_partitioned((), "a layer that is divided over tensor-parallel ranks")
    if known is None:
        known = region.divided[param] = TensorShard(tuple(param.shape), dim, own)
        take_part(param, known)
    elif (known.dim, known.ranges) != (dim, own):
        raise ModelError(
            f"two layers share a parameter of shape {known.shape}, and the plan divides it in two ways. Remedy: let the "
            "plan divide both along the same dimension, or untie them."
        )
    return known


def _subclass(ordinary: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class that computes as ``kind`` does, and is a subclass of ``ordinary``."""
    if ordinary in (nn.Linear, nn.Embedding):
        return kind
    if ordinary.forward is not nn.Linear.forward and issubclass(ordinary, nn.Linear):  # fp8, which ``_product`` knows
        return type(f"{kind.__name__}{ordinary.__name__}", (kind, ordinary), {})
    if issubclass(ordinary, nn.Linear | nn.Embedding):  # an embedding may still change the result of super().forward()
        return type(f"{kind.__name__}{ordinary.__name__}", (ordinary, kind), {})
    members = {name: value for base in (Parallel, kind) for name, value in vars(base).items() if name not in _NOT_COPIED}
    return type(f"{kind.__name__}{ordinary.__name__}", (Parallel, ordinary), members)


_NOT_COPIED = ("__init__", "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__")


def is_transposed(layer: nn.Module) -> bool:
    """True for a Hugging Face Conv1D: its weight is [in, out]."""
    return any(kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(layer).__mro__)


def computes_by_itself(layer: nn.Module) -> bool:
    """True if ``layer`` is a linear layer or embedding whose class computes in its own way, so that it cannot be divided.

    An embedding may change the result of ``super().forward``, which is whole, for example scale it. A weight that is not
    plain also counts, because its class takes part in the computation.
    """
    weight = getattr(layer, "weight", None)
    if isinstance(weight, torch.Tensor) and kind_of(weight) != PLAIN:
        return True
    forward: Any = type(layer).forward
    if isinstance(layer, nn.Embedding):
        return forward is not nn.Embedding.forward and "__class__" not in forward.__code__.co_freevars
    if isinstance(layer, nn.Linear):
        return forward is not nn.Linear.forward and not isinstance(layer, Parallel) and not is_float8(layer)
    return not forward.__module__.startswith("transformers.")


def _output_dim(layer: nn.Module) -> int:
    """Return the weight's dimension that belongs to the output. Raises ModelError if ``layer`` is not a linear layer."""
    if is_transposed(layer) and not computes_by_itself(layer):
        return 1
    if isinstance(layer, nn.Linear) and not computes_by_itself(layer):
        return 0
    raise ModelError(f"an nn.Linear or Conv1D with their own forward is needed, got {type(layer).__name__}.")


def _product(layer: Parallel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(layer, nn.Module)
    if is_float8(layer):
        return float8_product(layer, x, weight, bias)
    later = layer.weight_gradients
    if later is not None and weight is layer.weight and later.takes(weight):
        return later.product(x, weight, bias, transposed=is_transposed(layer))  # type: ignore[no-any-return]
    if not is_transposed(layer):
        return functional.linear(x, weight, bias)
    if bias is None:
        return x @ weight
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])
