"""The single-pass updates on GPUs: one Triton kernel, which computes what csrc/optimizer.cpp does.

Importing this file imports Triton; on_cuda.py does so when the first CUDA tensor is updated. With ``TRITON_INTERPRET=1`` at
that time, the same code runs on CPU tensors, in numpy.

The kernel gives the bits of the native library (signs and payloads of NaN aside): nothing is contracted to fused
multiply-adds, divisions and square roots are rounded correctly, and the conversion to bf16 is the same integer arithmetic.
Constants that change from step to step are plain arguments, so that nothing is compiled again. Nothing waits for the GPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (Triton reads the annotations of a kernel as its own.)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from . import native
from .state_format import BLOCK, Blocks, State, cell_table, codes_map
from .update_operands import Operands

_ADAM, _ADAGRAD, _LION = tl.constexpr(native.ADAM), tl.constexpr(native.ADAGRAD), tl.constexpr(native.LION)
_ADAM_SAGE, _SOPHIA = tl.constexpr(native.ADAM_SAGE), tl.constexpr(native.SOPHIA)
_CURVATURE = tl.constexpr(native.CURVATURE)
_BLOCK = 1024  # elements per program: with 4 warps, 8 per thread, which accesses 4 of them at a time
_SCALED = tl.constexpr(BLOCK)
# The first cell of each table, and the number of cells.
_SIGNED_FIRST, _UNSIGNED_FIRST = tl.constexpr(cell_table(True).first), tl.constexpr(cell_table(False).first)
_SIGNED_CELLS = tl.constexpr(cell_table(True).words.numel())
_UNSIGNED_CELLS = tl.constexpr(cell_table(False).words.numel())
_PARTS = ("keep", "keep_low", "decay", "decay_low", "rate", "rate_low")
_OF_THIRD = ("third_keep", "third_keep_low", "third_past", "third_past_low", "third_eps", "third_eps_low")
_KEYS = tuple(f"{tensor}_key{half}" for tensor in ("weight", "first", "second", "third") for half in (1, 2))
_CONSTANTS = (*_PARTS, "momentum", "blend", "second_keep", "second_blend", "eps", *_OF_THIRD)


class Kernels:
    """The counterpart of :class:`native.Library` for tensors on GPUs."""

    def update(self, rule: int, operands: Operands, constants: dict[str, float]) -> None:
        """Queue ``rule`` on the current stream. ``constants``: as :meth:`native.Library.update` gets them."""
        weight, out = operands.weight, operands.out
        first, second, third = states = (*operands.states, None, None, None)[: native.STATES]
        in_blocks = any(isinstance(state, Blocks) for state in operands.states)
        maps, words = _tables(weight.device) if in_blocks else (None, None)
        nesterov, rest, noise = bool(constants.get("nesterov")), operands.rounding.rest, operands.rounding.noise
        # As signed numbers: a type that changed with the value would be compiled anew.
        keys = [key - (key >> 31 << 32) for key in noise.keys] if noise is not None else [None] * 2 * (1 + native.STATES)
        parts = native.in_two_parts(constants)
        floats = {name: float(parts.get(name, 0.0)) for name in _CONSTANTS}  # an int would be compiled in
        if weight.numel():
            coefficient = operands.coefficient
            if not isinstance(coefficient, torch.Tensor):
                coefficient = torch.full((), coefficient, dtype=torch.float32, device=weight.device)
            with torch.cuda.device_of(weight):
                _update[(triton.cdiv(weight.numel(), _BLOCK),)](
                    _bits(weight),
                    _bits(operands.gradient),
                    _data(first),
                    _data(second),
                    _data(third),
                    None if out is None else _bits(out),
                    *(state.scale if isinstance(state, Blocks) else None for state in states),
                    maps,
                    words,
                    None if rest is None else _bits(rest),
                    *keys,
                    *((0, 0, 0, 0) if noise is None else (noise.start, noise.row, noise.whole_row, noise.column)),
                    weight.numel(),
                    coefficient,
                    **floats,
                    RULE=rule,
                    FIRST_SIGNED=_is_signed(first),
                    SECOND_SIGNED=_is_signed(second),
                    THIRD_SIGNED=_is_signed(third),
                    NESTEROV=nesterov,
                    COUPLED=floats["decay"] != 0.0,
                    ROUGH=weight.dtype == torch.bfloat16 and rest is None,
                    ADDED=rest is not None and rest.dtype == torch.bfloat16,
                    IN_ROWS=noise is not None and noise.row > 0,
                    BLOCK=_BLOCK,
                    num_warps=4,
                    enable_fp_fusion=False,
                )
        # Autograd must know that these tensors have changed, although torch did not change them.
        torch.autograd.graph.increment_version(operands.written)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a bf16 tensor as int16, which the kernel converts itself; others as they are."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _data(state: State | None) -> torch.Tensor | None:
    """Return the tensor with one item per element."""
    return state.codes if isinstance(state, Blocks) else None if state is None else _bits(state)


def _is_signed(state: State | None) -> bool:
    return not isinstance(state, Blocks) or state.signed


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (maps, words of cells) on ``device``: those of signed states, then those of the others."""
    maps = torch.cat([codes_map(signed) for signed in (True, False)])
    return maps.to(device), torch.cat([cell_table(signed).words for signed in (True, False)]).to(device)


# -- one program: BLOCK elements ---------------------------------------------------------------------------------------
#
# ``coefficient`` is the address of one fp32 number; nothing is written if it is not finite. The arguments from ``keep`` to
# ``third_eps_low`` are fields of struct Step in optimizer.cpp, which says what they mean. Whole blocks are accessed without
# a mask, so that accesses are 16 bytes wide whatever the length of the tensor is.


@triton.jit(do_not_specialize=["numel", *_KEYS, "start", "row", "whole_row", "column"])
def _update(
    weight,
    gradient,
    first,
    second,
    third,
    out,
    first_scale,
    second_scale,
    third_scale,
    maps,
    words,
    rest,
    weight_key1,
    weight_key2,
    first_key1,
    first_key2,
    second_key1,
    second_key2,
    third_key1,
    third_key2,
    start,
    row,
    whole_row,
    column,
    numel,
    coefficient,
    keep,
    keep_low,
    decay,
    decay_low,
    rate,
    rate_low,
    momentum,
    blend,
    second_keep,
    second_blend,
    eps,
    third_keep,
    third_keep_low,
    third_past,
    third_past_low,
    third_eps,
    third_eps_low,
    RULE: tl.constexpr,
    FIRST_SIGNED: tl.constexpr,
    SECOND_SIGNED: tl.constexpr,
    THIRD_SIGNED: tl.constexpr,
    NESTEROV: tl.constexpr,
    COUPLED: tl.constexpr,
    ROUGH: tl.constexpr,
    ADDED: tl.constexpr,
    IN_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.load(coefficient)
    writes = tl.abs(scale) < float("inf")  # False for NaN, too
    begin = tl.program_id(0).to(tl.int64) * BLOCK  # tensors may have more than 2^31 elements
    at = tl.max_contiguous(begin + tl.arange(0, BLOCK), 4)  # a thread's share, the same for all dtypes
    place = _place(begin, start, row, whole_row, column, IN_ROWS, BLOCK)
    weight_keys, first_keys = (weight_key1, weight_key2), (first_key1, first_key2)
    second_keys, third_keys = (second_key1, second_key2), (third_key1, third_key2)
    parts = (keep, keep_low, decay, decay_low, rate, rate_low)
    of_third = (third_keep, third_keep_low, third_past, third_past_low, third_eps, third_eps_low)
    constants = (momentum, blend, second_keep, second_blend, eps, of_third)
    if writes & (begin + BLOCK <= numel):
        g = _to_fp32(tl.load(gradient + at)) * scale
        w = _weight(weight, rest, at, None, ADDED)
        m = _widen(first, first_scale, maps, w, at, None, FIRST_SIGNED)
        v = _widen(second, second_scale, maps, w, at, None, SECOND_SIGNED)
        s = _widen(third, third_scale, maps, w, at, None, THIRD_SIGNED)
        w, m, v, s = _updated(first, w, g, m, v, s, parts, constants, RULE, NESTEROV, COUPLED, ROUGH)
        w = _keep_weight(None if RULE == _CURVATURE else weight, rest, w, at, None, place, weight_keys, ADDED)
        _narrow(first, first_scale, words, m, at, None, begin, numel, place, first_keys, FIRST_SIGNED, BLOCK)
        _narrow(second, second_scale, words, v, at, None, begin, numel, place, second_keys, SECOND_SIGNED, BLOCK)
        _narrow(third, third_scale, words, s, at, None, begin, numel, place, third_keys, THIRD_SIGNED, BLOCK)
        _store(out, w, at, None)
    elif writes:
        mask = at < numel
        g = _to_fp32(tl.load(gradient + at, mask=mask)) * scale
        w = _weight(weight, rest, at, mask, ADDED)
        m = _widen(first, first_scale, maps, w, at, mask, FIRST_SIGNED)
        v = _widen(second, second_scale, maps, w, at, mask, SECOND_SIGNED)
        s = _widen(third, third_scale, maps, w, at, mask, THIRD_SIGNED)
        w, m, v, s = _updated(first, w, g, m, v, s, parts, constants, RULE, NESTEROV, COUPLED, ROUGH)
        w = _keep_weight(None if RULE == _CURVATURE else weight, rest, w, at, mask, place, weight_keys, ADDED)
        _narrow(first, first_scale, words, m, at, mask, begin, numel, place, first_keys, FIRST_SIGNED, BLOCK)
        _narrow(second, second_scale, words, v, at, mask, begin, numel, place, second_keys, SECOND_SIGNED, BLOCK)
        _narrow(third, third_scale, words, s, at, mask, begin, numel, place, third_keys, THIRD_SIGNED, BLOCK)
        _store(out, w, at, mask)


@triton.jit
def _updated(
    first,
    w,
    g,
    m,
    v,
    s,
    parts,
    constants,
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    COUPLED: tl.constexpr,
    ROUGH: tl.constexpr,
):
    """Return new weight and states."""
    keep, keep_low, decay, decay_low, rate, rate_low = parts
    momentum, blend, second_keep, second_blend, eps, of_third = constants
    if RULE == _ADAM:
        k, d, r = _whole(keep, keep_low), _whole(decay, decay_low), _whole(rate, rate_low)
        w, m, v = _adam(w, g, m, v, k, d, r, rate, blend, second_keep, second_blend, eps, COUPLED, ROUGH)
    elif RULE == _ADAGRAD:
        w, m = _adagrad(w, g, m, _whole(decay, decay_low), _whole(rate, rate_low), eps, COUPLED)
    elif RULE == _LION:
        w, m = _lion(w, g, m, keep, rate, momentum, blend, second_keep, second_blend)
    elif RULE == _ADAM_SAGE:
        k, r = _whole(keep, keep_low), _whole(rate, rate_low)
        w, m, v, s = _adam_sage(w, g, m, v, s, k, r, blend, second_keep, second_blend, eps, of_third)
    elif RULE == _SOPHIA:
        w, m = _sophia(w, g, m, v, _whole(keep, keep_low), _whole(rate, rate_low), blend, second_keep, eps)
    elif RULE == _CURVATURE:
        m = second_keep * m + (second_blend * g) * g
    elif first is None:
        w = w - rate * _decayed(w, g, decay, COUPLED)
    else:
        w, m = _sgd(w, g, m, decay, rate, momentum, blend, NESTEROV, COUPLED)
    return w, m, v, s


@triton.jit
def _widen(state, scale, maps, w, at, mask, SIGNED: tl.constexpr):
    """Return the values of a state in fp32. The weight stands for a state that does not exist."""
    if state is None:
        value = w
    elif scale is None:
        value = _to_fp32(tl.load(state + at, mask=mask))
    else:
        code = tl.load(state + at, mask=mask).to(tl.int32)
        number = tl.load(maps + (code if SIGNED else code + 256), mask=mask)
        value = number * tl.load(scale + at // _SCALED, mask=mask)
    return value


@triton.jit
def _narrow(state, scale, words, value, at, mask, start, numel, place, keys, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the values of a state in its format."""
    if scale is not None:
        _quantise(state, scale, words, value, at, mask, start, numel, SIGNED, BLOCK)
    elif state is not None:
        _keep(state, value, at, mask, place, keys)


@triton.jit
def _keep(to, value, at, mask, place, keys):
    """Write fp32 values in the type of ``to``: in bf16 rounded by chance, if there are keys."""
    if keys[0] is None or to.dtype.element_ty != tl.int16:
        _store(to, value, at, mask)
    else:
        tl.store(to + at, _by_chance(value, place, keys), mask=mask)


@triton.jit
def _weight(weight, rest, at, mask, ADDED: tl.constexpr):
    """Return the values of the weight in fp32."""
    value = _to_fp32(tl.load(weight + at, mask=mask))
    if rest is not None:
        left_out = tl.load(rest + at, mask=mask)
        if ADDED:
            value += _to_fp32(left_out)
        else:
            value = (value.to(tl.int32, bitcast=True) + left_out.to(tl.int32)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _keep_weight(weight, rest, value, at, mask, place, keys, ADDED: tl.constexpr):
    """Write the weight in its type, and return the values that ``out`` gets. Without a weight nothing is written."""
    if weight is None:
        result = value
    elif rest is None:
        _keep(weight, value, at, mask, place, keys)
        result = value
        if weight.dtype.element_ty == tl.int16 and keys[0] is not None:
            result = _to_fp32(_by_chance(value, place, keys))
    elif ADDED:
        upper = _to_bf16(value)
        result = _to_fp32(upper)
        tl.store(weight + at, upper, mask=mask)
        left = _to_bf16(value - result)
        tl.store(rest + at, left - (_to_bf16(result + _to_fp32(left)) != upper).to(tl.int16), mask=mask)
    else:
        bits = value.to(tl.uint32, bitcast=True)
        upper = tl.where(value != value, (bits >> 16) | 0x40, (bits + 0x8000) >> 16).to(tl.int16)
        result = _to_fp32(upper)
        tl.store(weight + at, upper, mask=mask)
        tl.store(rest + at, tl.where(value != value, 0, bits).to(tl.int16), mask=mask)
    return result


@triton.jit
def _place(begin, start, row, whole_row, column, IN_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the positions in the whole parameter of the elements of this program: see rounding.py."""
    place = tl.cast(start, tl.int64) + begin + tl.arange(0, BLOCK)
    if IN_ROWS:
        number = place // tl.cast(row, tl.int64)
        inside = place - number * tl.cast(row, tl.int64)
        place = number * tl.cast(whole_row, tl.int64) + inside + tl.cast(column, tl.int64)
    return place


@triton.jit
def _by_chance(value, place, keys):
    """Rounded away from zero where the noise of an element says so, as the bits of a bf16. ``keys``: two numbers."""
    first, second = tl.cast(keys[0], tl.int32), tl.cast(keys[1], tl.int32)
    pair = place >> 1
    high = (pair >> 32).to(tl.uint32) * 0x9E3779B9
    mixed = pair.to(tl.uint32) ^ high ^ first.to(tl.uint32, bitcast=True)
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = ((mixed ^ (mixed >> 15)) + second.to(tl.uint32, bitcast=True)) * 0x846CA68B
    mixed ^= mixed >> 16
    noise = tl.where((place & 1) == 0, mixed & 0xFFFF, mixed >> 16)
    bits = value.to(tl.uint32, bitcast=True)
    quiet = (bits >> 16) | 0x40
    return tl.where(value != value, quiet, (bits + noise) >> 16).to(tl.int16)


@triton.jit
def _quantise(state, scale, words, value, at, mask, start, numel, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    if mask is not None:
        value = tl.where(mask, value, 0.0)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(tl.reshape(magnitude, (BLOCK // _SCALED, _SCALED)), axis=1)
    place = start // _SCALED + tl.arange(0, BLOCK // _SCALED)
    largest = tl.where(top < 0x7F800000, top, 0x7FC00000).to(tl.float32, bitcast=True)
    tl.store(scale + place, largest, mask=place * _SCALED < numel)
    tops = tl.reshape(tl.broadcast_to(top[:, None], (BLOCK // _SCALED, _SCALED)), (BLOCK,))
    finite = tops < 0x7F800000
    divisor = tl.where(finite & (tops > 0), tops, 0x3F800000).to(tl.float32, bitcast=True)
    magnitude = tl.where(finite, tl.div_rn(value, divisor).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    if SIGNED:
        cell = tl.minimum(tl.maximum((magnitude >> 16) - _SIGNED_FIRST, 0), _SIGNED_CELLS - 1)
    else:
        cell = tl.minimum(tl.maximum((magnitude >> 16) - _UNSIGNED_FIRST, 0), _UNSIGNED_CELLS - 1) + _SIGNED_CELLS
    word = tl.load(words + cell)
    code = (word >> 16) + ((magnitude & 0xFFFF) > (word & 0xFFFF)).to(tl.int32)
    if SIGNED:
        negative = finite & (value.to(tl.int32, bitcast=True) < 0)
        code = tl.where(negative, 127 - tl.minimum(code, 127), 127 + code)
    tl.store(state + at, code.to(tl.uint8), mask=mask)


@triton.jit
def _store(to, value, at, mask):
    """Write fp32 values in the type of ``to``, if there is such a tensor."""
    if to is not None:
        if to.dtype.element_ty == tl.int16:
            tl.store(to + at, _to_bf16(value), mask=mask)
        else:
            tl.store(to + at, value.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _to_fp32(value):
    if value.dtype == tl.int16:  # a bf16
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _to_bf16(value):
    """Rounded to nearest even, as the bits of a bf16."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding could carry a NaN's mantissa away
    return tl.where(value != value, quiet, rounded).to(tl.int16)


# -- the rules: new weight and states of elements, from weight, gradient and states ------------------------------------


@triton.jit
def _double(constant):
    return tl.cast(constant, tl.float32).to(tl.float64)  # in the interpreter it is a Python number, not rounded yet


@triton.jit
def _whole(high, low):
    return _double(high) + _double(low)


@triton.jit
def _decayed(w, g, decay, COUPLED: tl.constexpr):
    return g + decay * w if COUPLED else g


@triton.jit
def _adam(
    w,
    g,
    m,
    v,
    keep,
    decay,
    rate,
    rough_rate,
    blend,
    second_keep,
    second_blend,
    eps,
    COUPLED: tl.constexpr,
    ROUGH: tl.constexpr,
):
    wide = w.to(tl.float64)
    if COUPLED:
        decayed = g.to(tl.float64) + decay * wide
        g = decayed.to(tl.float32)
        kept = _double(second_keep) * v.to(tl.float64)
        v = (kept + _double(second_blend) * (decayed * decayed)).to(tl.float32)
    else:
        v = second_keep * v + (second_blend * g) * g
    m = _lerp(m, g, blend)
    quotient = tl.div_rn(m, tl.sqrt_rn(v) + eps)
    if ROUGH:
        shrink = (1.0 - keep).to(tl.float32)
        return w - (shrink * w + tl.cast(rough_rate, tl.float32) * quotient), m, v
    return (keep * wide - rate * quotient.to(tl.float64)).to(tl.float32), m, v


@triton.jit
def _lerp(m, g, blend):
    return tl.where(blend > 0.0, m, g) + blend * (g - m)


@triton.jit
def _adam_sage(w, g, m, v, s, keep, rate, blend, second_keep, second_blend, eps, of_third):
    keep_high, keep_low, past_high, past_low, eps_high, eps_low = of_third
    third_keep, past, third_eps = _whole(keep_high, keep_low), _whole(past_high, past_low), _whole(eps_high, eps_low)
    wide, before = w.to(tl.float64), s.to(tl.float64)
    m = _lerp(m, g, blend)
    v = second_keep * v + (second_blend * g) * g
    sensitivity = tl.abs(wide * g.to(tl.float64))
    average = third_keep * before + (1.0 - third_keep) * sensitivity
    apart = third_keep * tl.abs(past * sensitivity - before)
    root = tl.sqrt_rn(v) + eps
    step = m.to(tl.float64) * apart / (root.to(tl.float64) * (average + third_eps * third_eps))
    return (keep * wide - rate * step).to(tl.float32), m, v, average.to(tl.float32)


@triton.jit
def _sophia(w, g, m, v, keep, rate, blend, second_keep, eps):
    m = _lerp(m, g, blend)
    quotient = m.to(tl.float64) / (_double(second_keep) * v.to(tl.float64) + _double(eps))
    below = tl.where(quotient > 1.0, 1.0, quotient)  # a NaN stays
    clipped = tl.where(below < -1.0, -1.0, below)
    return (keep * w.to(tl.float64) - rate * clipped).to(tl.float32), m


@triton.jit
def _adagrad(w, g, m, decay, rate, eps, COUPLED: tl.constexpr):
    wide = w.to(tl.float64)
    g = _decayed(wide, g.to(tl.float64), decay, COUPLED)
    m = (m.to(tl.float64) + g * g).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(m) + eps)
    return (wide - rate * g * inverse.to(tl.float64)).to(tl.float32), m


@triton.jit
def _lion(w, g, m, keep, rate, momentum, blend, second_keep, second_blend):
    direction = momentum * m + blend * g
    sign_rate = tl.where(direction > 0.0, rate, 0.0) - tl.where(direction < 0.0, rate, 0.0)
    return keep * w - sign_rate, second_keep * m + second_blend * g


@triton.jit
def _sgd(w, g, m, decay, rate, momentum, blend, NESTEROV: tl.constexpr, COUPLED: tl.constexpr):
    g = _decayed(w, g, decay, COUPLED)
    m = momentum * m + blend * g
    ahead = g + momentum * m if NESTEROV else m
    return w - rate * ahead, m
