"""Kernels: the time of matrix products, attention and everything between them, by shape, on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .calibration import Constants
from .candidate import KernelGeneration, RunCandidate
from .hardware import Gpu
from .model_shape import ModelShape

_TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75))  # rows, columns, and the speed of a kernel with such tiles
HBM = 0.85  # of the data sheet, which kernels reach
_FUSED = 0.6  # of the traffic beside products, if kernels are fused
_LOGITS = 24.0  # bytes of traffic for each logit, in the forward, and as many in the backward
_UNFUSED_ATTENTION = 0.6  # of the speed of other products
_BACKWARD = 2.5  # the products of fused attention's backward, for each of its forward: it computes scores again
# Of the activations of a block, tensor ranks divide 24 of 34 parts, and all if they divide rows, too (arXiv:2205.05198).
_NOT_DIVIDED, _DIVIDED = 10 / 34, 24 / 34


@dataclass(frozen=True)
class Work:
    """Seconds of one forward or backward on a GPU, by cause."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.traffic

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.attention + other.attention, self.traffic + other.traffic)

    def times(self, factor: float) -> Work:
        return Work(self.products * factor, self.attention * factor, self.traffic * factor)


@lru_cache(maxsize=1 << 16)
def product_seconds(gpu: Gpu, rate: float, depth: float, m: int, n: int, k: int) -> float:
    """Return the seconds of a product of (m, k) by (k, n), with 2-byte elements, at ``rate`` FLOPs per second.

    Tiles fill whole waves of multiprocessors. ``depth``: the ``k`` at which a product runs at half speed.
    """
    best = 0.0
    for rows, columns, speed in _TILES:
        tiles = -(-m // rows) * -(-n // columns)
        places = -(-tiles // gpu.multiprocessors) * gpu.multiprocessors
        best = max(best, m * n / (rows * columns * places) * speed)
    on_cores = 2.0 * m * n * k * (1 + depth / k) / (rate * best)
    return max(on_cores, 2.0 * (m * k + k * n + m * n) / (gpu.hbm * HBM))


class KernelModel:
    """Times of the kernels of one GPU and generation. ``efficiency``: of the best matrix product that was measured."""

    def __init__(self, gpu: Gpu, kernels: KernelGeneration, efficiency: float, constants: Constants) -> None:
        self.gpu, self.kernels, self.constants = gpu, kernels, constants
        self.rate = gpu.matmul * efficiency
        self.bandwidth = gpu.hbm * HBM
        self._fused = _FUSED if kernels is KernelGeneration.FUSED else 1.0

    def block(self, shape: ModelShape, candidate: RunCandidate) -> tuple[Work, Work]:
        """Return the work of a block's forward and backward for a micro-batch, on one of its ranks."""
        t, tokens = candidate.tensor, candidate.tokens
        forward, backward = self._products(_products(shape, tokens, t), candidate.precision)
        attention, attention_backward = self._attention(shape, candidate)
        divided = 1 / t if candidate.sequence_parallel else _NOT_DIVIDED + _DIVIDED / t
        traffic = self.constants.traffic * self._fused * shape.hidden * tokens * divided / self.bandwidth
        return Work(forward, attention, 0.4 * traffic), Work(backward, attention_backward, 0.6 * traffic)

    def head(self, shape: ModelShape, candidate: RunCandidate) -> tuple[Work, Work]:
        """Return the work of the head and the loss, forward and backward."""
        vocab = -(-shape.vocab // candidate.tensor)
        precision = "fp32" if candidate.precision == "fp32" else "bf16"  # also where blocks compute in fp8
        forward, backward = self._products([(candidate.tokens, vocab, shape.hidden)], precision)
        traffic = _LOGITS * self._fused * candidate.tokens * vocab / self.bandwidth
        return Work(forward, 0.0, traffic), Work(backward, 0.0, traffic)

    def _attention(self, shape: ModelShape, candidate: RunCandidate) -> tuple[float, float]:
        """Return the seconds of causal attention, forward and backward."""
        pairs = 1.0 * candidate.tokens * candidate.sequence / candidate.tensor * shape.heads  # half of them count
        flops = 2.0 * pairs * shape.head_dim
        if self.kernels is KernelGeneration.UNFUSED:  # which computes the other half, too
            written = pairs * self.constants.scores / self.bandwidth
            forward = 2 * flops / (self.rate * _UNFUSED_ATTENTION) + written
            return forward, 2 * forward
        rate = self.gpu.peak * self.gpu.attention[self.kernels is KernelGeneration.FUSED]
        return flops / rate, _BACKWARD * flops / rate

    def _products(self, products: list[tuple[int, int, int]], precision: str) -> tuple[float, float]:
        """Return the seconds of matrix products: forward, and the two of the backward for each."""
        rate = self.rate
        if "fp8" in precision:
            rate *= max(self.constants.fp8 * self.gpu.fp8, 1.0)
        elif precision == "fp32":
            rate /= 2
        seconds = [
            [product_seconds(self.gpu, rate, self.constants.depth, *sizes) for sizes in ((m, n, k), (m, k, n), (k, n, m))]
            for m, n, k in products
        ]
        return sum(own[0] for own in seconds), sum(own[1] + own[2] for own in seconds)


def _products(shape: ModelShape, tokens: int, t: int) -> list[tuple[int, int, int]]:
    """Return the products of a block as (rows, columns, inner size): queries and keys, output, up, down."""
    hidden, queries, inner = shape.hidden, -(-shape.heads * shape.head_dim // t), -(-shape.ffn // t)
    keys = int(2 * max(shape.kv_heads / t, 1) * shape.head_dim)
    used = shape.used_experts
    return [
        (tokens, queries + keys, hidden),
        (tokens, hidden, queries),
        (tokens * used, (shape.matrices - 1) * inner, hidden),
        (tokens * used, hidden, inner),
    ]
