"""Weights: which parameters are plain, so that they may be cast, flattened and cut, and how all others are treated.

[Note: three kinds]
A *plain* weight holds its values in its own memory: nn.Parameter, subclasses that only mark it, and subclasses that are
trained.
A *packed* weight is frozen memory that a class of another package reads in its own way, whatever its dtype says, and so
are frozen numbers of 8 bits, which mean nothing without the scales of their layer. Its bytes are gathered like those of a
plain weight, and never cast. Of a class, it cannot be seen from outside whether a class reads this memory
anew, through the parameter, in every forward, so the classes that are known to do so are listed here. Layers of some of
them keep a second reference to the memory, and are told before each forward where it is now (``follow_memory``).
A frozen *wrapper* has no memory of its own: it reads other tensors. These are its members, each of which is packed, and it
stays as it is. Some layers keep packed weights in buffers (``packed_buffers``). All other frozen parameters stay *apart*:
those to whose memory their layers keep other references, and wrappers whose members cannot be moved. They belong to no
unit, and every rank has them whole and unchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ModelError

PLAIN, PACKED, APART = "plain", "packed", "apart"

# What a layer of bitsandbytes has that would pack its frozen weight anew, once and for all, when it evaluates: it is true
# on CPUs with instructions for bf16.
_REPACKS = "support_avx512bf16_for_cpu"
# Classes of packed weights -> what to tell the user if a layer replaces its weight by another tensor.
_PACKED = {
    "bitsandbytes.nn.modules.Params4bit": (
        "on some CPUs layers of bitsandbytes repack their weights when they evaluate, unless each Linear4bit has "
        f"{_REPACKS} = False, as initialize() sets it"
    ),
    "bitsandbytes.nn.modules.Int8Params": (
        "a Linear8bitLt quantises its weight anew if its state was reset, as by state.reset_grads()"
    ),
}
# Classes of layers that keep frozen integers in a buffer -> its name. They read it anew in every forward.
_BUFFERS = dict.fromkeys(
    (
        "gptqmodel.nn_modules.qlinear.torch.TorchLinear",
        "gptqmodel.nn_modules.qlinear.tritonv2.TritonV2Linear",
        "gptqmodel.nn_modules.qlinear.torch_awq.AwqTorchLinear",
        "gptqmodel.nn_modules.qlinear.gemm_awq.AwqGEMMLinear",
    ),
    "qweight",
)
# Attributes of packed weights, of their states and of what these refer to: scales and tables of codes.
_SCALES, _NESTED = ("absmax", "code", "offset", "SCB"), ("quant_state", "state2")
# Class name of a wrapper -> what to do instead of training it.
_INSTEAD = {
    "WeightWithDynamicFloat8CastTensor": (
        "use Float8LinearConfig(enable_fsdp_float8_all_gather=False); the section fp8 of the configuration has this key, "
        "for gathers in fp8 at stage 3"
    ),
    "DTensor": "give initialize() the model before fully_shard() or parallelize_module(), in whose place zerorun works",
}
_TENSOR_METHODS = ("to", "__torch_function__")  # a class that overrides one reads, moves or casts values in its own way


def kind_of(param: torch.Tensor) -> str:
    """Return PLAIN, PACKED or APART: see [Note: three kinds]."""
    found = type(param)
    if found is nn.Parameter:  # asked hundreds of times for each engine
        return PACKED if is_scaled(param) else PLAIN
    if _is_wrapper(param):
        return APART
    if _packed_class(param) is not None or is_scaled(param):
        return PACKED
    own = any(getattr(found, name) is not getattr(nn.Parameter, name) for name in _TENSOR_METHODS)
    return APART if own and isinstance(param, nn.Parameter) and not param.requires_grad else PLAIN


def is_scaled(param: torch.Tensor) -> bool:
    """True for frozen floating-point numbers of 8 bits. Scales for them are in other parameters of the layer, if any."""
    return param.is_floating_point() and param.dtype.itemsize == 1 and not param.requires_grad


def scales_beside(model: nn.Module) -> set[int]:
    """The ids of the frozen parameters beside frozen numbers of 8 bits, by which their layer multiplies these."""
    layers = [list(layer.parameters(recurse=False)) for layer in model.modules()]
    return {id(param) for own in layers if any(map(is_scaled, own)) for param in own if not param.requires_grad}


def is_packed(param: torch.Tensor) -> bool:
    """True for a packed weight or a member of a wrapper, which is gathered as bytes: see [Note: three kinds]."""
    return not isinstance(param, nn.Parameter) or kind_of(param) == PACKED


def stays_apart(param: torch.Tensor) -> bool:
    """True for a parameter that every rank keeps whole: see [Note: three kinds]."""
    return kind_of(param) == APART and not members(param)


def members(param: torch.Tensor) -> list[tuple[str, nn.Parameter]]:
    """Return (path, tensor) of what units have of ``param``: itself, or the tensors inside a wrapper; [] if it stays apart.

    Members of wrappers are no parameters, but are treated as frozen ones.
    """
    if kind_of(param) != APART:
        return [("", cast(nn.Parameter, param))]
    if param.requires_grad or not is_traceable_wrapper_subclass(param):
        return []
    found = list(inside(param))
    again = inside(param)  # those that are made anew whenever they are asked for cannot be moved
    movable = all(_can_move(tensor) and tensor is same for (_, tensor), (_, same) in zip(found, again, strict=True))
    return [(path, cast(nn.Parameter, tensor)) for path, tensor in found] if movable else []


def _can_move(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or isinstance(tensor, nn.Parameter) or tensor.requires_grad:
        return False
    strides = zip(strides_of(tensor), tensor.shape, strict=True) if tensor.layout is torch.strided else [(1, 2)]
    return tensor.is_contiguous() or all(not stride or size == 1 for stride, size in strides)  # as placeholders are


def own_members(module: nn.Module) -> list[nn.Parameter]:
    """What units have of the parameters and buffers of ``module`` itself, without its children's."""
    found = [tensor for param in module.parameters(recurse=False) for _, tensor in members(param)]
    return [*found, *(buffer for _, buffer in _own_buffer(module))]


def named_members(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, tensor) once for all that ranks hold of parameters: their members, or themselves if they stay apart."""
    seen = set()
    for name, param in module.named_parameters():
        for path, tensor in members(param) or [("", param)]:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name + path, tensor
    for name, buffer in packed_buffers(module).items():
        if id(buffer) not in seen:
            seen.add(id(buffer))
            yield name, buffer


def _own_buffer(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    if not layer._buffers:
        return []
    name = _BUFFERS.get(f"{type(layer).__module__}.{type(layer).__qualname__}", "")
    buffer = layer._buffers.get(name)
    return [(name, cast(nn.Parameter, buffer))] if buffer is not None else []


def packed_buffers(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the buffers that hold packed weights. They are treated as frozen parameters."""
    found = ((prefix, *own) for prefix, layer in module.named_modules() for own in _own_buffer(layer))
    return {f"{prefix}.{name}" if prefix else name: buffer for prefix, name, buffer in found}


def other_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of ``module`` that every rank has whole."""
    packed = {id(buffer) for buffer in packed_buffers(module).values()}
    return [buffer for buffer in module.buffers() if id(buffer) not in packed]


def scale_bytes(model: nn.Module) -> int:
    """Return the bytes of the tensors by which layers of ``model`` read packed weights: every rank has all of them."""
    found = {}
    for layer in model.modules():
        weight = own_weight(layer)
        holders = [weight, getattr(layer, "state", None)] if weight is not None and is_packed(weight) else []
        for holder in holders:
            for name, value in vars(holder).items() if holder is not None else ():
                if name in _SCALES and isinstance(value, torch.Tensor):
                    found[id(value)] = value
                elif name in _NESTED:
                    holders.append(value)
    return sum(scale.numel() * scale.element_size() for scale in found.values())


def is_quantised(param: torch.Tensor) -> bool:
    """True for a packed weight that has its packed values: bitsandbytes packs when a weight is moved to a device."""
    return (
        is_packed(param) and not param.is_meta and (hasattr(param, "CB") or getattr(param, "quant_state", None) is not None)
    )


def repacking(param: torch.Tensor) -> str:
    """Return what is known about layers that replace the packed ``param`` by another tensor; "" if it is not packed."""
    found = _packed_class(param)
    return _PACKED[found] if found is not None else ""


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a subclass that carries out operations itself, usually on other tensors that it holds."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _packed_class(param: torch.Tensor) -> str | None:
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(param).__mro__)
    found = next((name for name in names if name in _PACKED), None)
    if found is not None and hasattr(param, "CB") and param.dtype != torch.int8:
        return None  # an Int8Params that holds what it is to quantise, or that is trained in 16 bits
    return found


def followers(model: nn.Module) -> list[nn.Module]:
    """The layers that keep a second reference to the memory of their packed weight, which ``follow_memory`` has to mend."""
    found = ((layer, own_weight(layer)) for layer in model.modules())
    return [layer for layer, w in found if w is not None and hasattr(w, "CB") and is_packed(w)]


def own_weight(layer: nn.Module) -> nn.Parameter | None:
    """The parameter ``weight`` of ``layer``. An attribute that is computed is None, and is not: that may change a state."""
    return layer._parameters.get("weight")


def keep_packing(model: nn.Module) -> None:
    """Let no layer of ``model`` pack its frozen weight anew: its bytes are divided and saved as they are."""
    for layer in model.modules():
        weight = own_weight(layer)
        if getattr(layer, _REPACKS, False) and weight is not None and is_packed(weight):
            setattr(layer, _REPACKS, False)


def follow_memory(layer: nn.Module, *unused: object) -> None:
    """Let one of ``followers`` read its weight where that is now: bitsandbytes' int8 layers read ``CB``, also backwards.

    It is an attribute of the weight before the first forward, and of the layer's state after it.
    """
    weight: Any = layer.weight
    for holder in (weight, layer.state):
        let_go_of_memory(holder, weight.data)


def let_go_of_memory(holder: Any, data: torch.Tensor) -> None:
    """Let ``holder``, a packed weight or what else keeps a reference to its memory, refer to ``data``."""
    if getattr(holder, "CB", None) is not None:
        setattr(holder, "CB", data)  # noqa: B010  an object of bitsandbytes


def refuse_unusable_weights(model: nn.Module, *, trains: bool) -> None:
    """Raise ModelError for a parameter that is to be trained and is complex or not plain, or cannot be counted and saved.

    ``trains``: there is an optimizer.
    """
    for name, param in model.named_parameters():
        if trains and param.requires_grad and param.is_complex():
            raise ModelError(
                f"parameter {name!r} has complex numbers ({param.dtype}) and requires a gradient, but the values that "
                "optimizers update are kept in fp32: it would lose its imaginary part. Remedy: let it be a real parameter, "
                "nn.Parameter(torch.view_as_real(values)), with two numbers in its last dimension, and take "
                "torch.view_as_complex(parameter) in forward; or freeze it with requires_grad_(False)."
            )
        if kind_of(param) == PLAIN:
            continue
        found = type(param)
        shown = f"parameter {name!r} is a {found.__module__}.{found.__qualname__}"
        instead = _INSTEAD.get(found.__name__)
        if trains and param.requires_grad:
            raise ModelError(
                f"{shown} and requires a gradient, but zerorun trains only weights whose memory holds their values: it "
                f"would not change. Remedy: {instead or 'freeze it with requires_grad_(False), or train a plain weight'}."
            )
        if found.__name__ == "DTensor":
            raise ModelError(f"{shown}, of which other ranks have other parts. Remedy: {instead}.")
        if _is_wrapper(param) and not is_traceable_wrapper_subclass(param):
            raise ModelError(
                f"{shown}, which does not say what tensors it consists of (it has no __tensor_flatten__), so that zerorun "
                "can neither count nor save it. Remedy: use a plain nn.Parameter, or a class that has it."
            )


def refuse_elsewhere(model: nn.Module, device: torch.device) -> None:
    """Raise ModelError for wrappers and what stays apart if not on ``device``: only their own classes can move them."""
    for name, param in model.named_parameters():
        for _, inner in inner_tensors(param) if kind_of(param) == APART else ():
            if inner.device != device:
                raise ModelError(
                    f"parameter {name!r}, a {type(param).__name__}, is on {inner.device}, and this rank trains on "
                    f"{device}. Remedy: move the model there, by model.to({str(device)!r}), before initialize()."
                )


# -- the tensors inside a weight ---------------------------------------------------------------------------------


def inside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for each tensor inside a wrapper, with paths like ".qdata"; ("", itself) for another tensor."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        yield "", tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        for path, inner in inside(getattr(tensor, attribute)):
            yield f".{attribute}{path}", inner


def inner_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``inside`` does, as plain tensors."""
    return ((path, inner.detach()) for path, inner in inside(tensor))


def rebuilt(tensor: torch.Tensor, value_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return ``value_of(tensor)``. Of a wrapper, one of the same class around the values of the tensors inside it."""
    if not is_traceable_wrapper_subclass(tensor):
        return value_of(tensor)
    attributes, context = tensor.__tensor_flatten__()
    inner = {name: rebuilt(getattr(tensor, name), value_of) for name in attributes}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), strides_of(tensor))
    return made


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor``, whose ``stride`` may be a number: Megatron's layers put one on parameters."""
    return torch.Tensor.stride(tensor)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that ``tensor`` occupies, whatever its dtype says."""
    return sum(inner.numel() * inner.element_size() for _, inner in inner_tensors(tensor))


def apart_from(module: nn.Module, taken: Iterable[torch.Tensor]) -> dict[str, nn.Parameter]:
    """Return what ``module`` has of parameters by name, without ``taken``, which is in units."""
    known = {id(param) for param in taken}
    return {name: param for name, param in named_members(module) if id(param) not in known}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous ``tensor`` as [bytes] uint8."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def scales(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in the state dict that are neither parameters nor buffers: mostly scales of packed weights."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found = module.state_dict(keep_vars=True)
    return {name: v for name, v in found.items() if isinstance(v, torch.Tensor) and id(v) not in known}


def sums_of_scales(module: nn.Module) -> list[str]:
    """Return one line with a checksum for each of ``scales``, for comparing ranks. Empty if all weights are plain."""
    if all(kind_of(param) == PLAIN for param in module.parameters()):
        return []
    lines = []
    for name, scale in scales(module).items():
        if not scale.is_meta:
            crc = zlib.crc32(as_bytes(scale.contiguous().cpu()).numpy().tobytes())
            lines.append(f"{name} {tuple(scale.shape)} {scale.dtype} {crc:08x}")
    return lines
