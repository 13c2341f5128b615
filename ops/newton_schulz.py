"""Newton-Schulz iteration: a matrix becomes nearly orthogonal, by matrix products alone.

With the coefficients of Muon (Jordan et al. 2024), singular values come into about [0.7, 1.2] and not to 1, in few steps.
``gram`` is the same polynomial, applied to the square matrix X X^T in place of X: fewer products where one side is longer
(tridao.me/blog/2026/gram-newton-schulz). Errors grow from step to step, so that X is multiplied out after RESTART steps.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]  # (a, b, c) of a step: a X + b (X X^T) X + c (X X^T)^2 X
MUON: Coefficients = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7  # the least norm by which a matrix is divided
RESTART = 2
METHODS = ("standard", "gram")
SCALES = ("match_rms_adamw", "original")


def orthogonalize(
    matrix: Tensor,
    dtype: torch.dtype,
    steps: int = STEPS,
    method: str = "standard",
    coefficients: Coefficients = MUON,
) -> Tensor:
    """Return what ``steps`` steps make of ``matrix`` [rows, columns], which stays as it is, in ``dtype``: bf16 or fp32.

    Products are rounded to ``dtype``; to fp16 with ``gram`` in bf16, whose 8 bits are not enough there. CPUs multiply in
    fp32, which most do many times faster, and round the results.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPS)
    gram = method == "gram" and x.shape[0] < x.shape[1]
    rounded = torch.float16 if gram and dtype == torch.bfloat16 else dtype
    x = x.to(torch.float32 if x.device.type == "cpu" else rounded)
    x = (_by_gram if gram else _by_products)(x, steps, rounded, coefficients)
    return (x.T if tall else x).to(dtype).contiguous()


def scale_of(shape: tuple[int, int], kind: str) -> float:
    """Return the factor of the learning rate for a matrix of ``shape``.

    "original": as in Jordan et al. 2024. "match_rms_adamw": the update is about as large as AdamW's (Liu et al. 2025,
    arXiv:2502.16982), so that learning rates and decay for AdamW fit.
    """
    rows, columns = shape
    return sqrt(max(1.0, rows / columns)) if kind == "original" else 0.2 * sqrt(max(rows, columns))


def _by_products(x: Tensor, steps: int, dtype: torch.dtype, coefficients: Coefficients) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        square = _round(x @ x.T, dtype)
        update = _round(torch.addmm(square, square, square, beta=b, alpha=c), dtype)
        x = _round(torch.addmm(x, update, x, beta=a), dtype)
    return x


def _by_gram(x: Tensor, steps: int, dtype: torch.dtype, coefficients: Coefficients) -> Tensor:
    """``factor`` is the product of the steps' polynomials, and ``square`` what X X^T has become."""
    a, b, c = coefficients
    square, factor = _round(x @ x.T, dtype), None
    for step in range(steps):
        if step == RESTART and factor is not None:
            x = _round(factor @ x, dtype)
            square, factor = _round(x @ x.T, dtype), None
        update = _round(torch.addmm(square, square, square, beta=b, alpha=c), dtype)
        if factor is None:
            factor = update.clone()
            factor.diagonal().add_(a)
            factor = _round(factor, dtype)
        else:
            factor = _round(torch.addmm(factor, update, factor, beta=a), dtype)
        if step + 1 not in (RESTART, steps):
            once = _round(torch.addmm(square, update, square, beta=a), dtype)
            square = _round(torch.addmm(once, update, once, beta=a), dtype)
    return x if factor is None else factor @ x


def _round(product: Tensor, dtype: torch.dtype) -> Tensor:
    return product if product.dtype == dtype else product.to(dtype).to(product.dtype)
