"""The operands of one single-pass update, with their checks, and the interface of what runs updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .rounding import NEAREST, Rounding
from .state_format import BLOCK, Blocks, State

_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operands:
    """1-D contiguous tensors of one length on one device, none of which overlaps another.

    Raises TypeError for another dtype, and ValueError for another shape, stride or device.
    """

    weight: Tensor  # [numel] fp32 or bf16, updated
    gradient: Tensor  # [numel] fp32, bf16 or fp16, read only
    states: tuple[State, ...]  # [numel] fp32 or bf16 each, or in blocks that begin where the weight begins; updated
    # [numel] fp32, bf16 or fp16: receives the new weight, rounded to nearest even if it is fp32
    out: Tensor | None
    # Multiplies the gradient. A tensor is an fp32 scalar that only the device reads: if it is not finite, the update writes
    # nothing.
    coefficient: float | Tensor
    rounding: Rounding = NEAREST  # of a weight and of states in bf16

    def __post_init__(self) -> None:
        _check("weight", self.weight, self.weight, (torch.float32, torch.bfloat16))
        if self.rounding.rest is not None:
            _check("weight", self.weight, self.weight, (torch.bfloat16,))
            _check("rest", self.rounding.rest, self.weight, (torch.int16, torch.bfloat16))
        _check("gradient", self.gradient, self.weight, _ROUNDED)
        for state in self.states:
            if isinstance(state, Blocks):
                _check("state", state.codes, self.weight, (torch.uint8,))
                _check("scale", state.scale, self.weight, (torch.float32,), -(-self.weight.numel() // BLOCK))
            else:
                _check("state", state, self.weight, (torch.float32, torch.bfloat16))
        if self.out is not None:
            _check("out", self.out, self.weight, _ROUNDED)
        if isinstance(self.coefficient, Tensor) and (self.coefficient.dtype, self.coefficient.dim()) != (torch.float32, 0):
            raise TypeError(f"the coefficient is {self.coefficient}; it must be a number, or an fp32 scalar on the device")

    @property
    def written(self) -> list[Tensor]:
        """All tensors that the update writes to: the weight first, and ``out`` last."""
        parts = [[s.codes, s.scale] if isinstance(s, Blocks) else [s] for s in self.states]
        beside = [tensor for tensor in (self.rounding.rest, self.out) if tensor is not None]
        return [self.weight, *(tensor for part in parts for tensor in part), *beside]


class Updates(Protocol):
    """Runs updates on one kind of device: the interface of the native library and of the Triton kernels."""

    def update(self, rule: int, operands: Operands, constants: dict[str, float]) -> None:
        """Run ``rule``, one of the numbers in native.py. ``constants``: the fields of its ``Step`` that the rule reads.

        ``keep``, ``decay`` and ``rate`` are given whole; this method splits them into their two parts.
        """


def _check(name: str, tensor: Tensor, weight: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None) -> None:
    """``numel``: if it has another number of elements than the weight."""
    numel = weight.numel() if numel is None else numel
    if tensor.layout is not torch.strided:
        raise TypeError(f"the {name} is {tensor.layout}; a single-pass update needs dense tensors")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"the {name} is {tensor.dtype}; it must be {names}")
    if tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(
            f"the {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            f"it must be 1-D and contiguous, with {numel} elements, as the weight has {weight.numel()}"
        )
    if tensor.device != weight.device:
        raise ValueError(f"the {name} is on {tensor.device}, the weight on {weight.device}")
