"""Dispatch: in place of a module of experts, rows go to the ranks that have their experts, and what these make comes back.

[Note: what is computed where]
The model's own forward runs on the experts of this rank, with one expert for each row, and with weight 1. The sender
multiplies by the weights and adds up, in the order in which the model's own forward does. A rank to which no row comes
runs its forward on a row of zeros and drops the result: so its experts get gradients of zero, and backward makes the
exchanges that the others wait for (Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020, arXiv:2006.16668).

[Note: folded]
Tensor ranks all have the same rows, and different experts. Each sends a part of the rows, and then all are gathered. The
gradient of a part becomes whole in the same way, so the router gets a whole gradient on every tensor rank.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..distributed.tensor_shard import even_bounds
from ..errors import ModelError, OrderError
from ..tensor_parallel.axis import Axis
from ..tensor_parallel.collectives import gather_rows, split_rows
from .deferred_tensor import Later, Shared, Steps, result_of
from .known_experts import Experts, arguments, is_eager
from .replayed_dispatch import Replay, Route, next_node
from .row_exchange import Exchange, Rows, begin, end

_UNFIT = 2  # what a rank tells the others of a call; otherwise whether it has gradients
_ALIKE = 0.05  # relative: bf16 rounds to a hundredth; what is added up in another way differs in the first digit


class Dispatch:
    """Replaces ``module.forward``. ``axis``: the ranks that have the experts between them, as many each.

    ``tensor``: the tensor ranks, if there are several. ``loads`` [experts]: the rows that this rank has sent to each expert
    in training, since the last ``take_loads``; on the CPU. ``shared``: what replaces the forwards of shared experts.
    """

    def __init__(self, experts: Experts, axis: Axis, tensor: Axis | None) -> None:
        self.name, self.count, self.axis, self.tensor = experts.name, experts.count, axis, tensor
        self.loads = torch.zeros(experts.count, dtype=torch.int64)
        self._module, self._own = experts.module, experts.module.forward
        self._arguments, self._replay = arguments(experts.module), Replay()
        self._tried = False
        self.shared = {module: Shared(module, self._defers, self._is_under_way) for module in experts.shared}
        self._last: weakref.ref[Later] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = self._call_uncompiled if "torch._dynamo" in sys.modules else self._call
        return call(args, kwargs, not torch.compiler.is_compiling() and self._defers())

    def _call(self, args: Any, kwargs: Any, defers: bool) -> torch.Tensor:
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        hidden, index, weights = (given[name] for name in self._arguments)
        self._check(hidden, index, weights)
        steps = self._steps(hidden, index, weights, defers)
        if not defers:
            return result_of(steps)
        made = Later(steps, [other for shared in self.shared.values() for other in shared.waiting()])
        self._last = weakref.ref(made)
        return made

    _call_uncompiled = torch._disable_dynamo(_call)  # the compiler does not know what ranks do

    # -- beside shared experts ------------------------------------------------------------------------------------

    def _defers(self) -> bool:
        """True if the block may go on while rows are on their way: it has shared experts, and nobody looks at what they and
        these experts return. What runs again does as it did the first time: autograd counts on the order."""
        if not self.shared:
            return False
        route = self._replay.recall()
        return not any(map(_is_watched, (self._module, *self.shared))) if route is None else route.defers

    def _is_under_way(self) -> bool:
        last = None if self._last is None else self._last()
        return last is not None and last.is_open

    def go_on(self, *unused: Any) -> None:
        """Shared experts are half-way: let the rows that have come be computed, and go back beside the other half."""
        last = None if torch.compiler.is_compiling() or self._last is None else self._last()
        if last is not None:
            last.go_on()

    def take_loads(self) -> list[int]:
        """Return ``loads``, which begin anew."""
        found: list[int] = self.loads.tolist()
        self.loads = torch.zeros_like(self.loads)
        return found

    def _check(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        rows = hidden.numel() // hidden.shape[-1]
        if index.dim() != 2 or index.shape != weights.shape or len(index) != rows or index.is_floating_point():
            raise ModelError(
                f"{self.name} was called with {rows} rows, indices {tuple(index.shape)} of {index.dtype} and weights "
                f"{tuple(weights.shape)}, and needs the number of an expert and a weight for each row and choice. Remedy: "
                "remove the section expert_parallel."
            )

    def _steps(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, defers: bool) -> Steps:
        """The whole call. It is interrupted where rows are on their way."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.tensor is None:
            return (yield from self._spread(rows, index, weights, defers)).view_as(hidden)
        axis, bounds = self.tensor, even_bounds(len(rows), self.tensor.size)
        rows, weights = split_rows(rows, axis, bounds), split_rows(weights, axis, bounds)
        made = yield from self._spread(rows, index[bounds[axis.rank] : bounds[axis.rank + 1]], weights, defers)
        return gather_rows(made, axis, bounds).view_as(hidden)

    def _spread(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, defers: bool) -> Steps:
        """[T, H], [T, K], [T, K] -> [T, H]"""
        begun, route = next_node(), self._replay.recall()
        if route is not None and route.index.shape == index.shape:
            index, weights = route.index, route.weights.requires_grad_(weights.requires_grad)
            if route.tries:  # selective checkpointing counts the operations of both runs
                self._is_unfit(rows)
        else:
            route = self._route(rows, index, weights, defers)
        sent = rows[route.order // index.shape[1]]
        came = yield from self._moved(sent, route.sends, route.receives, "experts: dispatch forward")
        made = self._run(came, route.experts)
        back = yield from self._moved(made, route.receives, route.sends, "experts: combine forward")
        slots = back[route.order.argsort()].view(*index.shape, rows.shape[1])
        output = self._combine(slots, index, weights)
        self._replay.keep(route, begun, output)
        return output

    def _moved(self, rows: torch.Tensor, sends: Rows, receives: Rows, label: str) -> Steps:
        exchange = Exchange(self.axis, sends, receives, label)
        came = begin(rows, exchange)
        try:
            yield
        except GeneratorExit:  # nobody wants the rest: a recomputation may end early
            exchange.wait()
            raise
        return end(came, exchange)

    def _route(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, defers: bool) -> Route:
        """Tell the ranks how many rows come for each of their experts, and learn how many come here."""
        tries = not self._tried
        state = _UNFIT if tries and self._is_unfit(rows) else int(torch.is_grad_enabled())
        size, chosen = self.axis.size, index.reshape(-1)
        counts = torch.bincount(chosen, minlength=self.count)
        if len(counts) != self.count:
            raise ModelError(f"{self.name} was called with an expert number above {self.count - 1}, the last.")
        local = self.count // size
        exchange = Exchange(self.axis, (local + 1,) * size, (local + 1,) * size, "experts: counts")
        told = torch.cat([counts.view(size, local), counts.new_full((size, 1), state)], 1)
        theirs = exchange.send(told.view(-1)).view(size, local + 1)
        exchange.wait()
        known = torch.stack([told, theirs]).cpu()  # the program must know them, and waits for the device once
        self._check_states(known[1, :, local].tolist())
        if self._module.training and torch.is_grad_enabled():
            self.loads = self.loads + known[0, :, :local].reshape(-1)
        sends, receives = known[:, :, :local].sum(2).tolist()
        theirs = theirs[:, :local].reshape(-1)
        numbers = torch.arange(local, device=index.device).repeat(size)
        experts = numbers.repeat_interleave(theirs, output_size=sum(receives))
        order = chosen.argsort(stable=True)
        return Route(index, weights.detach(), order, tuple(sends), tuple(receives), experts, defers, tries)

    def _check_states(self, states: list[int]) -> None:
        """Raise an error, on all ranks alike, unless the module is fit and all ranks make the same call of it."""
        if _UNFIT in states:
            raise ModelError(
                f"{self.name} ({type(self._module).__name__}) does not return the sum of what experts give, times the "
                "weights that it is called with, so that its rows cannot be sent to the ranks that have their experts. "
                "Remedy: remove the section expert_parallel."
            )
        if len(set(states)) > 1:
            raise OrderError(
                f"{self.name} was called with gradients on {sum(states)} and without on {len(states) - sum(states)} of the "
                f"{len(states)} ranks that have its experts between them: some train while others evaluate or generate. "
                "Remedy: make as many forwards on each rank: equal numbers of batches for evaluation, and "
                "generate(..., synced_gpus=True)."
            )

    def _is_unfit(self, like: torch.Tensor) -> bool:
        """True unless the module adds up what its experts give, times their weights, or if that cannot be told this time.

        Its forward tells on a row of numbers, like those in ``like``, for the first and the last expert here. It does not
        where these give infinite numbers or NaN: the next call tells then.
        """
        row = torch.arange(1, like.shape[1] + 1, device=like.device).sin().to(like.dtype).unsqueeze(0)
        experts = torch.tensor([[0, self.count // self.axis.size - 1]], device=like.device)
        weights = row.new_tensor([[0.5, 0.25]])
        with torch.no_grad(), _evaluating(self._module):
            first, last = (self._own(row, experts[:, [place]], row.new_ones(1, 1)).float() for place in (0, 1))
            found = self._own(row, experts, weights).float()
        wanted = 0.5 * first + 0.25 * last
        self._tried = row.is_meta or bool((wanted.isfinite() & found.isfinite()).all())
        return self._tried and not row.is_meta and not bool((found - wanted).abs().max() <= _ALIKE * wanted.abs().max())

    def _run(self, came: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The model's own forward, with one of the experts here for each row."""
        count = len(came)
        if not count:
            came, experts = torch.cat([came, came.new_zeros(1, came.shape[1])]), experts.new_zeros(1)
        made: torch.Tensor = self._own(came, experts.unsqueeze(1), came.new_ones(len(came), 1))
        return made[:count]

    def _combine(self, slots: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, K, H], [T, K], [T, K] -> [T, H], added up as the model does."""
        if not is_eager(self._module):
            return (slots * weights.unsqueeze(-1)).sum(1).to(slots.dtype)
        order = index.argsort(dim=1, stable=True)
        rows = torch.arange(len(index), device=index.device).unsqueeze(1)
        weighed = (slots[rows, order] * weights[rows, order].unsqueeze(-1)).to(slots.dtype)
        return _added_up(weighed.unbind(1))


def _is_watched(module: nn.Module) -> bool:
    """True if a hook gets what ``module`` is given or returns."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(hooks) or bool(nn.modules.module._has_any_global_hook())


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Let ``module`` and what is in it be in evaluation, where nothing is random."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _added_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum, from the first to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def dispatches(modules: Any) -> list[Dispatch]:
    """The dispatches of a model's modules, in its order."""
    return [forward for module in modules if isinstance(forward := vars(module).get("forward"), Dispatch)]
