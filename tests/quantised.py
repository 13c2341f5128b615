"""LoRA models whose frozen weights other packages have quantised, and their training without zerorun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from models import Case, Lora, LoraLinear, Place, reset
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows import to_nf4

LR = 2e-2


def _nf4(weight: torch.Tensor, storage: torch.dtype) -> nn.Module:
    layer = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], False, torch.float32, True, "nf4", storage)
    layer.weight = bnb.nn.Params4bit(weight, quant_type="nf4", quant_storage=storage, module=layer)
    layer.support_avx512bf16_for_cpu = False  # else evaluation on some CPUs repacks the weights, and ends all training
    return layer.to("cpu")  # which quantises


def _int8(weight: torch.Tensor) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(weight.shape[1], weight.shape[0], False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(weight, has_fp16_weights=False, requires_grad=False)
    return layer.to("cpu")


def _linear(weight: torch.Tensor) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _torchao_int8(weight: torch.Tensor) -> nn.Module:
    held = nn.Sequential(_linear(weight))
    quantize_(held, Int8WeightOnlyConfig())
    return held[0]


def _torchao_nf4(weight: torch.Tensor) -> nn.Module:
    return _linear(to_nf4(weight, 64, 4))


class Scaled(torch.Tensor):
    """Rows of int8 and a scale for each. ``data`` [out, in], or as it comes of a transposition; ``scale`` [out, 1]."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)
        return made

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes.detach(), args[0].scale.detach())
        wide = [one.codes * one.scale if isinstance(one, cls) else one for one in args]
        return func(*wide, **(kwargs or {}))


def _scaled(weight: torch.Tensor, *, transposed: bool = False) -> nn.Module:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return _linear(Scaled(codes.t().contiguous().t() if transposed else codes, scale))


class TorchLinear(nn.Module):
    """Keeps its weights as that of gptqmodel does, for which it stands here: integers and scales in buffers."""

    __module__ = "gptqmodel.nn_modules.qlinear.torch"

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scales).round().to(torch.int32))
        self.register_buffer("scales", scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


class Integers(nn.Module):
    """Rows of integers as a frozen parameter, with what they mean beside them, as HQQ has them."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        low, high = weight.amin(dim=1, keepdim=True), weight.amax(dim=1, keepdim=True)
        self.meta = {"scale": (high - low) / 255, "zero": low}
        codes = ((weight - low) / self.meta["scale"]).round().to(torch.uint8)
        self.W_q = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.W_q * self.meta["scale"].to(x.dtype) + self.meta["zero"].to(x.dtype))


class FP8Linear(nn.Module):
    """Rows of 8-bit floating-point numbers and their scales, both frozen parameters, as in transformers' models in fp8."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 448  # the largest number of the format
        self.weight = nn.Parameter((weight.float() / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.dtype == torch.float8_e4m3fn and self.weight_scale_inv.dtype == torch.float32
        return nn.functional.linear(x, (self.weight.float() * self.weight_scale_inv).to(x.dtype))


KINDS: dict[str, Callable[[torch.Tensor], nn.Module]] = {
    "nf4 in uint8": lambda weight: _nf4(weight, torch.uint8),
    "nf4 in fp16": lambda weight: _nf4(weight, torch.float16),
    "nf4 in bf16": lambda weight: _nf4(weight, torch.bfloat16),
    "nf4 in fp32": lambda weight: _nf4(weight, torch.float32),
    "int8": _int8,
    "torchao int8": _torchao_int8,
    "torchao nf4": _torchao_nf4,
    "wrapper": _scaled,
    "integers": Integers,
    "buffers": TorchLinear,
    "float8": FP8Linear,
    "transposed wrapper": lambda weight: _scaled(weight, transposed=True),
}
SHARDED = [kind for kind in KINDS if kind != "transposed wrapper"]


def build(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, times: int = 1) -> nn.Module:
    """A LoRA GPT whose frozen layers are of ``kind``, quantised from weights in ``dtype``.

    ``times``: how many times the rows of these layers there are; with more than 1 nothing can be computed.
    """
    module = reset(Lora(), seed)
    for layer in module.modules():
        if isinstance(layer, LoraLinear):
            layer.base = KINDS[kind](layer.base.weight.detach().to(dtype).repeat(times, 1))
    return module


def case(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    made = Case(kind, lambda: build(kind, dtype, seed))
    object.__setattr__(made, "build", lambda: made.make())
    return made


def plain_losses(kind: str, dtype: torch.dtype, world_size: int, steps: int) -> list[float]:
    """Mean losses of plain AdamW on fp32 masters, with the micro-batches of all ranks."""
    module, loss_of = build(kind, dtype), case(kind).loss
    as_they_are = {param for layer in module.modules() if isinstance(layer, FP8Linear) for param in layer.parameters()}
    for param in module.parameters():
        if type(param) is nn.Parameter and param not in as_they_are:
            param.data = param.data.to(dtype)
    trained = [param for param in module.parameters() if param.requires_grad]
    masters = [param.detach().float() for param in trained]
    for master, initial in zip(masters, (p for p in build(kind, dtype).parameters() if p.requires_grad), strict=True):
        master.copy_(initial.detach())
    stepper = torch.optim.AdamW(masters, lr=LR)
    losses = []
    for step in range(steps):
        values = [loss_of(module, Place(rank, step)) for rank in range(world_size)]
        sum(value / world_size for value in values).backward()  # type: ignore[union-attr]
        for master, param in zip(masters, trained, strict=True):
            master.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
        stepper.step()
        for master, param in zip(masters, trained, strict=True):
            param.data.copy_(master)
        losses.append(float(sum(value.item() for value in values)) / world_size)
    return losses
