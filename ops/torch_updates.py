"""The updates of single_pass.py by torch's own kernels, for use without the native library and Triton.

Tensors are updated in chunks, whose gradients are copied to an fp32 buffer, and so are weights and states of other dtypes.
So gradients are not changed, and no temporary is as large as a tensor. On a CPU a chunk stays in the cache. Results differ
from the native ones by rounding: torch's kernels contract multiplications and additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .rounding import Rounding, by_chance, join, split
from .state_format import BLOCK, Blocks, State
from .update_operands import Operands

_CPU_CHUNK = 1 << 18  # elements: 1 MiB of fp32
_Draw = Callable[[int], Tensor]  # the noise of a tensor of a chunk: of the weight, 0, or of a state, from 1 on
_DEVICE_CHUNK = 1 << 24  # elements: 64 MiB of fp32; enough work per kernel to hide the cost of its launch


def adam(
    operands: Operands,
    *,
    step: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """States: exp_avg, exp_avg_sq. Here and below, the other arguments are those of single_pass.py."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    count = torch.full((), float(step), dtype=torch.float32, device=operands.weight.device)

    def update(weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
        kernel(
            [weight],
            [gradient],
            [states[0]],
            [states[1]],
            [],
            [count],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )

    _by_chunks(operands, update)


def adagrad(
    operands: Operands,
    *,
    rate: float,
    eps: float,
    weight_decay: float,
) -> None:
    """State: sum. ``rate``: the learning rate after its own decay."""

    def update(weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
        if weight_decay:
            gradient.add_(weight, alpha=weight_decay)
        states[0].addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, states[0].sqrt().add_(eps), value=-rate)

    _by_chunks(operands, update)


def lion(
    operands: Operands,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """State: exp_avg."""

    def update(weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
        direction = states[0].mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        weight.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
        states[0].mul_(beta2).add_(gradient, alpha=1 - beta2)

    _by_chunks(operands, update)


def sgd(
    operands: Operands,
    *,
    lr: float,
    momentum: float,
    blend: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """State: momentum_buffer, or none. ``blend``: the gradient's weight in the buffer."""

    def update(weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
        if weight_decay:
            gradient.add_(weight, alpha=weight_decay)
        direction = gradient
        for buffer in states:
            buffer.mul_(momentum).add_(gradient, alpha=blend)
            direction = gradient.add_(buffer, alpha=momentum) if nesterov else buffer
        weight.add_(direction, alpha=-lr)

    _by_chunks(operands, update)


def adam_sage(
    operands: Operands,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    beta3: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """States: exp_avg, exp_avg_sq, exp_avg_sensitivity. What follows the root is in fp64, as in the native library."""
    root = (1 - beta2**step) ** 0.5
    past, least = 1 - beta3 ** (step - 1), eps**2 * (1 - beta3**step)

    def update(weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
        exp_avg, exp_avg_sq, average = states
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        sensitivity, before = weight.double().mul_(gradient).abs_(), average.double()
        apart = sensitivity.mul(past).sub_(before).abs_().mul_(beta3)
        before.mul_(beta3).add_(sensitivity, alpha=1 - beta3)
        average.copy_(before)
        moved = apart.mul_(exp_avg).div_(exp_avg_sq.sqrt().add_(eps * root).double().mul_(before.add_(least)))
        weight.copy_(weight.double().mul_(1 - lr * weight_decay).sub_(moved, alpha=lr * root / (1 - beta1**step)))

    _by_chunks(operands, update)


def sophia(operands: Operands, *, lr: float, beta1: float, scale: float, eps: float, weight_decay: float) -> None:
    """States: exp_avg, hessian. ``scale``: of the hessian."""

    def update(weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
        exp_avg, hessian = states
        exp_avg.lerp_(gradient, 1 - beta1)
        ratio = exp_avg.double().div_(hessian.double().mul_(scale).add_(eps)).clamp_(-1, 1)
        weight.copy_(weight.double().mul_(1 - lr * weight_decay).sub_(ratio, alpha=lr))

    _by_chunks(operands, update)


def curvature(operands: Operands, *, beta2: float) -> None:
    """State: hessian. The weight stays."""

    def update(weight: Tensor, gradient: Tensor, states: tuple[Tensor, ...]) -> None:
        states[0].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    _by_chunks(operands, update)


def _by_chunks(
    operands: Operands,
    update: Callable[[Tensor, Tensor, tuple[Tensor, ...]], None],
) -> None:
    """Run ``update`` on chunks of weight, scaled gradient (fp32, which it may change) and states, and fill ``out``."""
    weight, out, coefficient = operands.weight, operands.out, operands.coefficient
    applies = torch.isfinite(coefficient) if isinstance(coefficient, Tensor) else None
    size = _CPU_CHUNK if weight.device.type == "cpu" else _DEVICE_CHUNK
    buffer = torch.empty(min(size, weight.numel()), dtype=torch.float32, device=weight.device)
    for low, high in _bounds(weight.numel(), size):
        scaled = buffer[: high - low].copy_(operands.gradient[low:high])
        if applies is not None or coefficient != 1.0:
            scaled.mul_(coefficient)
        chunk = Operands(
            weight[low:high],
            operands.gradient[low:high],
            tuple(_chunk(state, low, high) for state in operands.states),
            None if out is None else out[low:high],
            coefficient,
            Rounding(None if operands.rounding.rest is None else operands.rounding.rest[low:high]),
        )
        before = [] if applies is None else [tensor.clone() for tensor in chunk.written]
        kept, states = join(chunk.weight, chunk.rounding.rest), tuple(_wide(state) for state in chunk.states)
        update(kept, scaled, states)
        noise = operands.rounding.noise
        draw = None if noise is None else partial(noise.of, low=low, high=high, device=weight.device)
        _keep_weight(chunk, kept, draw)
        for number, (state, new) in enumerate(zip(chunk.states, states, strict=True)):
            _keep(state, new, number, draw)
        if chunk.out is not None:
            chunk.out.copy_(chunk.weight)
        if applies is not None:
            for tensor, kept in zip(chunk.written, before, strict=True):
                torch.where(applies, tensor, kept, out=tensor)


def _chunk(state: State, low: int, high: int) -> State:
    if isinstance(state, Blocks):
        return Blocks(state.codes[low:high], state.scale[low // BLOCK : -(-high // BLOCK)], state.signed)
    return state[low:high]


def _wide(state: State) -> Tensor:
    """Return the values in fp32: the state itself if it is that."""
    return state.wide() if isinstance(state, Blocks) else state.float()


def _keep_weight(chunk: Operands, values: Tensor, draw: _Draw | None) -> None:
    """Write the new weights ``values`` [n] fp32 where they are kept in bf16."""
    rest = chunk.rounding.rest
    if rest is not None:
        for kept, new in zip((chunk.weight, rest), split(values, rest.dtype), strict=True):
            kept.copy_(new)
    elif chunk.weight.dtype != torch.float32:
        chunk.weight.copy_(values if draw is None else by_chance(values, draw(0)))


def _keep(state: State, values: Tensor, number: int, draw: _Draw | None) -> None:
    if isinstance(state, Blocks):
        state.keep(values)
    elif state is not values:
        state.copy_(values if draw is None else by_chance(values, draw(1 + number)))


def _bounds(numel: int, size: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + size, numel)) for low in range(0, numel, size))
