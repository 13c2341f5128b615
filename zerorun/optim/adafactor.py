"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235), with the formulas of torch.optim.Adafactor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerorun.distributed.transport.sums import square_sum

from .factored import Factors
from .parameter_parts import Part, PartsOptimizer, StateRange, SumOfParts

_SQUARES, _UPDATES = "optimizer: sums of squares", "optimizer: norms of updates"


class Adafactor(PartsOptimizer):
    """An update by second moments that are kept by row and by column of a matrix: m + n numbers, not m * n.

    With G the gradient, w = t^beta2_decay, R and C the moving averages (weight w of the newest) of the means of G^2 over
    columns and rows, U = G / sqrt(max(R C / max(mean(R), eps1), eps1^2)). The parameter moves by -a U / max(1, rms(U) / d),
    where a = max(eps2, rms(p)) * min(lr, 1 / sqrt(t)), after it has shrunk by lr * weight_decay. A parameter of less than
    two dimensions has a second moment for each element instead. ``eps``: (eps1, eps2); eps1 None is that of the dtype.

    A rank keeps the moments of the rows that it has elements of, and of all columns of their matrices. mean(R) is taken
    as mean(C), which is the same number.
    """

    factors = frozenset({"row_var", "col_var"})

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """``maximize``: follow the gradient upwards. Raises ValueError for numbers out of range."""
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr and weight_decay must be at least 0: {lr}, {weight_decay}")
        if beta2_decay > 0 or d < 1:
            raise ValueError(f"beta2_decay must be at most 0 and d at least 1: {beta2_decay}, {d}")
        if len(eps) != 2 or eps[1] < 0 or (eps[0] or 0.0) < 0:
            raise ValueError(f"eps must be two numbers of at least 0, of which the first may be None: {eps}")
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": tuple(eps), "d": d, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient. ``closure`` computes the loss anew, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = {param: self._begin(group, param) for group, param in self._moving()}
        shared = {param: update.squares() for param, update in updates.items() if update.part.is_shared}
        for param, total in self.sums(shared, _squares_of, _SQUARES).items():
            updates[param].take_squares(total)
        for update in updates.values():
            update.compute()
        norms = {param: update.norm for param, update in updates.items() if update.part.is_shared}
        for param, total in self.sums(norms, _is_shared, _UPDATES).items():
            updates[param].norm = total
        for update in updates.values():
            update.apply()
        return loss

    def _moving(self) -> list[tuple[dict[str, Any], Tensor]]:
        each = ((group, param) for group in self.param_groups for param in group["params"])
        return [(group, param) for group, param in each if param.grad is not None and param.numel()]

    def _begin(self, group: dict[str, Any], param: Tensor) -> _Update:
        """Count a step of ``param``, and take the squares of its gradient."""
        gradient, part, state = self.spent_gradient(param), self.part_of(param), self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {key: gradient.new_zeros(numel) for key, numel in self.state_numels(part).items()}
        state["step"] += 1
        if group["maximize"]:
            gradient.neg_()
        kind = _MatrixUpdate if len(part.shape) > 1 else _VectorUpdate
        return kind(param, part, gradient, state, group)

    # -- what plans know before there is an optimizer --------------------------------------------------------------

    @staticmethod
    def planned_sums(parts: Sequence[Part]) -> tuple[SumOfParts, ...]:
        squares, norms = sum(map(_squares_of, parts)), sum(map(_is_shared, parts))
        return (SumOfParts(_SQUARES, squares), SumOfParts(_UPDATES, norms)) if norms else ()

    @staticmethod
    def state_numels(part: Part) -> dict[str, int]:
        if len(part.shape) < 2:
            return {"variance": part.numel}
        factors = Factors(part)
        return {"row_var": factors.row_count, "col_var": factors.matrix_count * factors.width}

    @staticmethod
    def state_ranges(key: str, part: Part) -> tuple[StateRange, ...]:
        return Factors(part).stored_rows if key == "row_var" else Factors(part).stored_columns


def _is_shared(part: Part) -> int:
    return int(part.is_shared)


def _squares_of(part: Part) -> int:
    """How many numbers of ``part`` ranks sum before its update: of rows, of columns, and the square of the parameter."""
    if not part.is_shared:
        return 0
    return sum(Factors(part).slots) + 1 if len(part.shape) > 1 else 1


def _square_sum(tensor: Tensor) -> Tensor:
    """[1] fp32."""
    return square_sum(tensor.reshape(-1)).float().view(1)


class _Update:
    """The update of one part in one step, in the order of the methods. ``gradient`` [numel] becomes the update."""

    def __init__(self, param: Tensor, part: Part, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.part, self._param, self._values, self._state, self._group = part, param, gradient, state, group
        self._step = float(state["step"])
        self._weight = self._step ** group["beta2_decay"]
        self._length = _square_sum(param)  # of the parameter, squared
        self.norm = self._length  # of the update, squared

    def squares(self) -> Tensor:
        """This rank's summands [squares of the part]."""
        return self._length

    def take_squares(self, total: Tensor) -> None:
        """The sums over ranks of ``squares``."""
        self._length = total[-1:]

    def compute(self) -> None:
        """Average the second moments, and compute the direction of the update and ``norm``."""
        self._direct()
        self.norm = _square_sum(self._values)

    def _direct(self) -> None:
        raise NotImplementedError

    @property
    def _floor(self) -> float:
        eps = self._group["eps"][0]
        return float(torch.finfo(self._param.dtype).eps if eps is None else eps)

    def apply(self) -> None:
        """Change the parameter. ``norm`` is that of the whole update."""
        group, numel = self._group, self.part.whole_numel
        rate = float(group["lr"])
        length = (self._length / numel).sqrt().clamp(min=group["eps"][1]) * min(rate, self._step**-0.5)
        self._values.mul_(length / ((self.norm / numel).sqrt() / group["d"]).clamp(min=1.0))
        if group["weight_decay"]:
            self._param.mul_(1 - rate * group["weight_decay"])
        self._param.sub_(self._values.view(self._param.shape))


class _VectorUpdate(_Update):
    """Of a parameter with less than two dimensions: a second moment for each element."""

    def _direct(self) -> None:
        variance = self._state["variance"].view(-1)
        variance.lerp_(self._values.square(), self._weight)
        self._values.mul_(variance.clamp(min=self._floor**2).rsqrt_())


class _MatrixUpdate(_Update):
    """Of matrices: second moments by row and by column."""

    def __init__(self, param: Tensor, part: Part, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().__init__(param, part, gradient, state, group)
        factors = self._factors = Factors(part)
        self._rows = gradient.new_zeros(factors.row_count)
        local = gradient.new_zeros(factors.matrix_count, factors.local_width)
        for values, rows, columns in self._blocks(self._rows, local):
            squares = values.square()
            rows.add_(squares.sum(2))
            columns.add_(squares.sum(1))
        self._columns = local if factors.local_width == factors.width else self._spread(local)

    def _blocks(self, rows: Tensor, columns: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Views of the elements [matrices, rows, columns] with those of ``rows`` [matrices, rows] and ``columns``
        [matrices, columns] that belong to them."""
        found = []
        for block in self._factors.blocks:
            matrices, height, width = block.shape
            values = self._values[block.offset : block.offset + matrices * height * width].view(block.shape)
            own = rows[block.row : block.row + matrices * height].view(matrices, height)
            found.append(
                (values, own, columns[block.matrix : block.matrix + matrices, block.column : block.column + width])
            )
        return found

    def _spread(self, local: Tensor) -> Tensor:
        """[matrices, columns of whole ones], with zeros where other tensor ranks have columns."""
        whole, here = local.new_zeros(local.shape[0], self._factors.width), 0
        for begin, end in self._factors.columns:
            whole[:, begin:end] = local[:, here : here + end - begin]
            here += end - begin
        return whole

    def squares(self) -> Tensor:
        factors, (rows, columns) = self._factors, self._factors.slots
        found = self._rows.new_zeros(rows + columns + 1)
        for stretch in factors.shared_rows:
            found[stretch.there :][: stretch.numel] = self._rows[stretch.here :][: stretch.numel]
        for stretch in factors.shared_columns:
            found[rows + stretch.there :][: stretch.numel] = self._columns.view(-1)[stretch.here :][: stretch.numel]
        found[-1:] = self._length
        return found

    def take_squares(self, total: Tensor) -> None:
        super().take_squares(total)
        factors, rows = self._factors, self._factors.slots[0]
        for stretch in factors.shared_rows:
            self._rows[stretch.here :][: stretch.numel] = total[stretch.there :][: stretch.numel]
        for stretch in factors.shared_columns:
            self._columns.view(-1)[stretch.here :][: stretch.numel] = total[rows + stretch.there :][: stretch.numel]

    def _direct(self) -> None:
        factors, state = self._factors, self._state
        row_var, col_var = state["row_var"].view(-1), state["col_var"].view(factors.matrix_count, factors.width)
        row_var.lerp_(self._rows.div_(factors.width), self._weight)
        col_var.lerp_(self._columns.div_(factors.height), self._weight)
        scaled = col_var / col_var.mean(1, keepdim=True).clamp_(min=self._floor)
        if factors.local_width != factors.width:
            scaled = torch.cat([scaled[:, begin:end] for begin, end in factors.columns], 1)
        for values, rows, columns in self._blocks(row_var, scaled):
            estimate = rows.unsqueeze(2) * columns.unsqueeze(1)
            values.mul_(estimate.clamp_(min=self._floor**2).rsqrt_())
