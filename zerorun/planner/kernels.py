"""Kernels: the time of matrix products, attention and everything between them, by shape, on one GPU.

[Note: rows of experts]
A token goes to ``used_experts`` experts. Rows are taken to go to all experts equally: where a rank gets more, the others
wait for it, and how much more depends on the router. A rank has the rows of as many tokens as without ``expert``, because
it sends as many away as come to it; but they meet fewer experts, so that the products are larger, and fewer weights are
read. With tensor ranks among those with different experts, each sends a part of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .calibration import Constants
from .candidate import KernelGeneration, RunCandidate
from .hardware import Gpu
from .model_shape import LatentAttention, ModelShape

Sizes = tuple[int, int, int, int]
"""Of a product: rows, columns, inner size, and how many such products one kernel has."""

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
def product_seconds(gpu: Gpu, rate: float, depth: float, m: int, n: int, k: int, count: int = 1) -> float:
    """Return the seconds of ``count`` products of (m, k) by (k, n), with 2-byte elements, at ``rate`` FLOPs per second.

    Tiles of all of them fill whole waves of multiprocessors. ``depth``: the ``k`` at which a product runs at half speed.
    """
    best = 0.0
    for rows, columns, speed in _TILES:
        tiles = count * -(-m // rows) * -(-n // columns)
        places = -(-tiles // gpu.multiprocessors) * gpu.multiprocessors
        best = max(best, count * m * n / (rows * columns * places) * speed)
    on_cores = 2.0 * count * m * n * k * (1 + depth / k) / (rate * best)
    return max(on_cores, 2.0 * count * (m * k + k * n + m * n) / (gpu.hbm * HBM))


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
        forward, backward = self._products(_products(shape, candidate), candidate.precision)
        if shape.experts > 1:
            precision = candidate.precision if candidate.narrow_experts or "fp8" not in candidate.precision else "bf16"
            of_experts = self._products(_expert_products(shape, candidate), precision)
            forward, backward = forward + of_experts[0], backward + of_experts[1]
        attention, attention_backward = self._attention(shape, candidate)
        divided = 1 / t if candidate.sequence_parallel else _NOT_DIVIDED + _DIVIDED / t
        traffic = self.constants.traffic * self._fused * shape.hidden * tokens * divided / self.bandwidth
        traffic += self._row_traffic(shape, candidate)
        return Work(forward, attention, 0.4 * traffic), Work(backward, attention_backward, 0.6 * traffic)

    def shared(self, shape: ModelShape, candidate: RunCandidate) -> tuple[float, float]:
        """Return the seconds of shared experts, forward and backward, behind which rows are on their way."""
        if not shape.shared_ffn:
            return 0.0, 0.0
        own = _mlp_products(candidate.tokens, shape, -(-shape.shared_ffn // candidate.tensor))
        return self._products(own, candidate.precision)

    def _row_traffic(self, shape: ModelShape, candidate: RunCandidate) -> float:
        """Return the seconds in which rows are put in the order of experts and added up again, forward and backward.

        For each expert of a token: read and written, read again; and the sum is written.
        """
        if shape.experts == 1:
            return 0.0
        moved = 2 * (3 * shape.used_experts + 1) * shape.hidden * candidate.element * self._fused
        return moved * candidate.tokens / (candidate.tensor if candidate.expert > 1 else 1) / self.bandwidth

    def head(self, shape: ModelShape, candidate: RunCandidate) -> tuple[Work, Work]:
        """Return the work of the head and the loss, forward and backward."""
        vocab = -(-shape.vocab // candidate.tensor)
        precision = "fp32" if candidate.precision == "fp32" else "bf16"  # also where blocks compute in fp8
        forward, backward = self._products([(candidate.tokens, vocab, shape.hidden, 1)], precision)
        traffic = _LOGITS * self._fused * candidate.tokens * vocab / self.bandwidth
        return Work(forward, 0.0, traffic), Work(backward, 0.0, traffic)

    def _attention(self, shape: ModelShape, candidate: RunCandidate) -> tuple[float, float]:
        """Return the seconds of causal attention, forward and backward."""
        pairs = 1.0 * candidate.tokens * candidate.sequence / candidate.tensor * shape.heads  # half of them count
        flops = 2.0 * pairs * shape.attended
        if self.kernels is KernelGeneration.UNFUSED:  # which computes the other half, too
            written = pairs * self.constants.scores / self.bandwidth
            forward = 2 * flops / (self.rate * _UNFUSED_ATTENTION) + written
            return forward, 2 * forward
        rate = self.gpu.peak * self.gpu.attention[self.kernels is KernelGeneration.FUSED]
        return flops / rate, _BACKWARD * flops / rate

    def _products(self, products: list[Sizes], precision: str) -> tuple[float, float]:
        """Return the seconds of matrix products: forward, and the two of the backward for each."""
        rate = self.rate
        if "fp8" in precision:
            rate *= max(self.constants.fp8 * self.gpu.fp8, 1.0)
        elif precision == "fp32":
            rate /= 2
        seconds = [
            [
                product_seconds(self.gpu, rate, self.constants.depth, *sizes, count)
                for sizes in ((m, n, k), (m, k, n), (k, n, m))
            ]
            for m, n, k, count in products
        ]
        return sum(own[0] for own in seconds), sum(own[1] + own[2] for own in seconds)


def _products(shape: ModelShape, candidate: RunCandidate) -> list[Sizes]:
    """Return the products of a block, without those of its experts: queries and keys, output, up, down."""
    hidden, t, tokens = shape.hidden, candidate.tensor, candidate.tokens
    inner = shape.shared_ffn if shape.experts > 1 else shape.ffn
    mlp = _mlp_products(tokens, shape, -(-inner // t)) if inner else []
    if shape.latent is not None:
        return [*_latent_products(shape, shape.latent, candidate), *mlp]
    queries, keys = -(-shape.heads * shape.head_dim // t), int(2 * max(shape.kv_heads / t, 1) * shape.head_dim)
    return [(tokens, queries + keys, hidden, 1), (tokens, hidden, queries, 1), *mlp]


def _latent_products(shape: ModelShape, latent: LatentAttention, candidate: RunCandidate) -> list[Sizes]:
    hidden, t, tokens = shape.hidden, candidate.tensor, candidate.tokens
    heads, of_queries = -(-shape.heads // t), latent.plain + latent.rotary
    narrow = latent.queries + latent.keys + latent.rotary
    return [
        (tokens, narrow, hidden, 1),
        (tokens, heads * of_queries, latent.queries or hidden, 1),
        (tokens, heads * (latent.plain + latent.values), latent.keys, 1),
        (tokens, hidden, heads * latent.values, 1),
    ]


def _mlp_products(rows: int, shape: ModelShape, inner: int, count: int = 1) -> list[Sizes]:
    return [(rows, (shape.matrices - 1) * inner, shape.hidden, count), (rows, shape.hidden, inner, count)]


def _expert_products(shape: ModelShape, candidate: RunCandidate) -> list[Sizes]:
    """Return the products of the experts that a rank has, each with as many rows. See [Note: rows of experts].

    All its products are one kernel's. Without ``expert`` tensor ranks divide the width of each.
    """
    c = candidate
    own = max(shape.experts // c.expert, 1)
    rows, inner = c.tokens * shape.used_experts, shape.ffn
    if c.expert > 1:
        rows //= c.tensor
    else:
        inner = -(-inner // c.tensor)
    return _mlp_products(max(-(-rows // own), 1), shape, inner, own)
