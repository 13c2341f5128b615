"""Muon: momentum, orthogonalized, for the matrices of a model; AdamW for all other parameters.

[Note: three parts of a step]
The momentum of an element needs that element alone, and so does the new weight, given the direction in which it goes. Only
between the two is all of a matrix needed. Here the states are therefore flat: ``advance`` puts what is to be orthogonalized
in the gradient's place, others make directions of it (zero/matrix_updates.py), and ``update`` takes these steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import newton_schulz, single_pass
from ..ops.newton_schulz import orthogonalize, scale_of
from ..ops.single_pass import SinglePassOptimizer, Where

_CHUNK = {"cpu": 1 << 18}  # elements: 1 MiB of fp32 stays in a cache
_DEVICE_CHUNK = 1 << 24
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Muon(SinglePassOptimizer):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for groups with ``use_muon``, AdamW for others.

    States: ``momentum_buffer``, or ``step``, ``exp_avg`` and ``exp_avg_sq``. Formulas and names of settings are those of
    ``torch.optim.Muon``; ``muon_lr`` and ``adam_lr`` take the place of ``lr`` for one kind of groups. ``ns_dtype``: "bf16"
    or "fp32", for the iteration and for what ranks send each other. ``betas`` and ``eps`` are AdamW's. ``ns_parts``: the
    lengths of matrices that lie in one, such as query, key and value; () for none.

    Parameters of groups with ``use_muon`` that have one dimension are pieces of matrices: what takes the gradient's place
    in a step is their direction already. Others are matrices, or filters [out, ...], and the step does it all.
    """

    _rates: Mapping[bool, float] = {}  # by ``use_muon``, for groups without one
    _begun: Sequence[tuple[Tensor, set[str]]] = ()  # of the last step: piece, the states that were made for it

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        *,
        adjust_lr_fn: str = "match_rms_adamw",
        ns_coefficients: newton_schulz.Coefficients = newton_schulz.MUON,
        ns_steps: int = newton_schulz.STEPS,
        ns_method: str = "standard",
        ns_dtype: str = "bf16",
        ns_parts: Sequence[int] = (),
    ) -> None:
        for key, value, known in (
            ("adjust_lr_fn", adjust_lr_fn, newton_schulz.SCALES),
            ("ns_method", ns_method, newton_schulz.METHODS),
            ("ns_dtype", ns_dtype, tuple(DTYPES)),
        ):
            if value not in known:
                raise ValueError(f"{key} must be one of {', '.join(known)}, got {value!r}")
        if not 0 <= momentum < 1 or ns_steps < 1:
            raise ValueError(f"momentum must be in [0, 1) and ns_steps at least 1, got {momentum} and {ns_steps}")
        self._rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        defaults |= {"betas": tuple(betas), "eps": eps, "adjust_lr_fn": adjust_lr_fn}
        defaults |= {"ns_coefficients": tuple(ns_coefficients), "ns_steps": ns_steps}
        super().__init__(params, {**defaults, "ns_method": ns_method, "ns_dtype": ns_dtype, "ns_parts": tuple(ns_parts)})

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group. Without ``use_muon``, it is Muon's if all its parameters are matrices."""
        params = group["params"]
        found = [params] if isinstance(params, Tensor) else list(params)
        group = {**group, "params": found}
        group.setdefault("use_muon", all(param.dim() > 1 for param in found if isinstance(param, Tensor)))
        group.setdefault("lr", self._rates.get(bool(group["use_muon"]), self.defaults["lr"]))
        super().add_param_group(group)

    def _states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group.get("use_muon") else {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    _function = staticmethod(single_pass.adam)
    _settings = ("lr", "betas", "eps", "weight_decay")

    @torch.no_grad()
    def update(
        self,
        param: Tensor,
        gradient: Tensor,
        out: Tensor | None,
        settings: dict[str, Any],
        coefficient: float | Tensor,
        where: Where | None = None,
    ) -> None:
        """Step ``param`` alone. Of a piece of matrices, ``gradient`` is the direction; ``coefficient`` tells whether."""
        if not settings["use_muon"]:
            super().update(param, gradient, out, settings, coefficient, where)
            return
        if param.dim() > 1:
            gradient = self._direction(param, gradient, settings, coefficient, where)
        # A decay that is added to the direction, and one of the weight before it moves, are the same without momentum.
        there = where or _itself
        weight, direction = there(param).detach().view(-1), gradient.detach().view(-1)
        for cut, rounding in self._roundings(param, there, lambda: self._count(param)):
            single_pass.sgd(
                weight[cut],
                direction[cut],
                out=None if out is None else out.view(-1)[cut],
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
                coefficient=coefficient * 0 + 1 if isinstance(coefficient, Tensor) else 1.0,
                rounding=rounding,
            )

    def _direction(
        self, param: Tensor, gradient: Tensor, settings: dict[str, Any], coefficient: float | Tensor, where: Where | None
    ) -> Tensor:
        wanted = gradient.float().clone(memory_format=torch.contiguous_format)
        self.advance(param, wanted, settings, coefficient, where)
        matrix = wanted.view(len(param), -1)
        found = orthogonalized(matrix, settings).float()
        return found * scale_of((matrix.shape[0], matrix.shape[1]), settings["adjust_lr_fn"])

    def begin(self, params: Iterable[Tensor]) -> None:
        """Begin a step of pieces of matrices. ``take_back`` may undo it."""
        pieces = list(params)
        had = [set(self._held.get(piece, ())) for piece in pieces]
        self.prepare(pieces)
        self._begun = [(p, self._held[p].keys() - before) for p, before in zip(pieces, had, strict=True)]

    def take_back(self) -> None:
        """Forget the last step, of which the device has written nothing."""
        super().take_back()
        for param, made in self._begun:
            for key in made:
                self._held[param].pop(key)
            if not self._held[param]:
                del self._held[param]
        self._begun = ()

    @torch.no_grad()
    def advance(
        self,
        param: Tensor,
        gradient: Tensor,
        settings: dict[str, Any],
        coefficient: float | Tensor,
        where: Where | None = None,
    ) -> None:
        """Take ``gradient`` times ``coefficient`` into the momentum. What is to be orthogonalized takes its place.

        ``settings``: from ``prepare``. Momentum stays as it is if the coefficient, a tensor on the device, is not finite.
        Each operation rounds by itself, so that bits do not depend on where a piece begins.
        """
        held = self._held[param]["momentum_buffer"]
        momentum, flat, beta = (held if where is None else where(held)).view(-1), gradient.view(-1), settings["momentum"]
        applies = torch.isfinite(coefficient) if isinstance(coefficient, Tensor) else None
        chunk = _CHUNK.get(flat.device.type, _DEVICE_CHUNK)
        for low in range(0, flat.numel(), chunk):
            place, kept = flat[low : low + chunk], momentum[low : low + chunk]
            new = place.float()  # itself, unless gradients are in bf16
            new.mul_(coefficient)
            blended = kept.mul(beta).add_(new * (1 - beta))
            kept.copy_(blended if applies is None else torch.where(applies, blended, kept))
            if settings["nesterov"]:
                new.mul_(1 - beta).add_(kept * beta)
            else:
                new.copy_(kept)
            if new is not place:
                place.copy_(new)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def orthogonalized(matrix: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return what Newton-Schulz makes of ``matrix`` [rows, columns], in ``ns_dtype``. ``settings``: of its group.

    Of ``ns_parts``, each is a matrix for itself; the result has to be scaled by the shape of the whole one.
    """
    how = (settings["ns_steps"], settings["ns_method"], settings["ns_coefficients"])
    dtype, lengths, scale = DTYPES[settings["ns_dtype"]], settings["ns_parts"], settings["adjust_lr_fn"]
    if not lengths:
        return orthogonalize(matrix, dtype, *how)
    whole, dim = scale_of((matrix.shape[0], matrix.shape[1]), scale), dim_of_parts(matrix.shape, lengths)
    parts = [(part, scale_of((part.shape[0], part.shape[1]), scale)) for part in matrix.split(list(lengths), dim)]
    return torch.cat([orthogonalize(part, dtype, *how) * (own / whole) for part, own in parts], dim)


def dim_of_parts(shape: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the dimension along which a matrix of ``shape`` consists of parts of these ``lengths``; -1: there is none."""
    return next((dim for dim, length in enumerate(shape) if length == sum(lengths)), -1)
