"""The flat parameter group: parameters of a unit that lie end to end in one buffer, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ..distributed.layout import Layout
from ..distributed.quantised_blocks import decode_parts, encode
from ..distributed.transport.sums import square_sum
from ..ops.rounding import join
from ..plan.sharding_plan import FlatGroupPlan
from .placeholders import AWAY, placeholders

# ``param.grad`` as autograd has left it, also where a mode shows something else under this name.
fresh_gradient: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that updates can write
_COMPARED = 2**20  # elements at a time, of which a rounded copy is made


@dataclass(frozen=True)
class CodeBuffers:
    """Memory of the codes that gathers send, uint8. ``shard``: of this rank's; ``full``: of all, as they come."""

    shard: torch.Tensor
    full: torch.Tensor


class FlatGroup:
    """The parameters of a unit that share one dtype and replication and are either all trained or all frozen. See unit.py.

    This class alone stands for frozen ones.
    """

    master: torch.Tensor | None = None
    rest: torch.Tensor | None = None
    grad_shard: torch.Tensor | None = None

    def __init__(
        self,
        plan: FlatGroupPlan,
        params: Sequence[nn.Parameter],
        full: torch.Tensor,
        shard: torch.Tensor,
        codes: CodeBuffers | None = None,
        second: torch.Tensor | None = None,
    ) -> None:
        """``params``: in the order of the layout; they become views of ``full`` [numel]. ``shard``: this rank's part.

        ``second``: room for this rank's part of the second copy, of the weights or of their codes.
        """
        self.plan, self.params = plan, list(params)
        self.names = [entry.name for entry in plan.layout.entries]
        self.full, self.shard = full, shard
        self.coded = codes.shard if codes is not None else None
        self.arriving = codes.full if codes is not None else None
        self.second = second
        self._coded_at = self._copied_at = -1
        self._largest = torch.zeros(len(self.params), device=full.device)
        self.views = _views(full, plan.layout)
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view
        # The placeholders that the parameters show while they are resharded, and the elements behind them.
        self.marks, self.loud = placeholders(self.params)
        self._kept: set[int] = set()  # entries, see ``keep``
        self._counted = not (plan.resident or any(param.is_inference() for param in self.params))
        self._loses_writes = self._counted and not plan.packed
        self._states: list[tuple[int, int]] = []  # writes to each, and where it is, when the unit was unsharded
        self.written: list[str] = []  # names of those written to before the unit was resharded: what was written is gone

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def dtype(self) -> torch.dtype:
        return self.plan.dtype

    @property
    def trainable(self) -> bool:
        return self.plan.trainable

    @property
    def weight(self) -> torch.Tensor:
        """The compute-dtype values that belong to ``master``: [owned]."""
        return self.full if self.plan.owns_everything and self.plan.resident else self.shard

    @property
    def arrives_in(self) -> torch.Tensor:
        """Where what is gathered comes: the codes, if those are sent."""
        return self.full if self.arriving is None else self.arriving

    def encode(self, state: int) -> torch.Tensor:
        """The codes of the shard. ``state``: a number that is another one whenever the shard may have changed."""
        assert self.coded is not None
        if self._coded_at != state:
            cast = self.plan.float8
            if cast is None:
                encode(self.shard, self.coded)
            else:
                cast.encode(self.shard, self.plan.shard_pieces, self._largest.to(self.shard.device), self.coded)
            self._coded_at = state
        return self.coded

    def copies_anew(self, state: int) -> bool:
        """True if the second copy is to be made anew, which follows. ``state``: as for ``encode``."""
        before, self._copied_at = self._copied_at, state
        return before != state

    def largest_here(self) -> torch.Tensor:
        """The largest magnitude of each parameter in the shard [parameters], fp32; 0 for one that is not in it."""
        found = torch.zeros(len(self.params), device=self.shard.device)
        for piece in self.plan.shard_pieces:
            found[piece.entry] = self.shard[piece.shard_start : piece.shard_start + piece.numel].abs().amax()
        return found

    def take_largest(self, largest: torch.Tensor) -> None:
        """``largest`` [parameters] fp32: of the whole parameters. fp8 codes follow from them."""
        self._largest = largest

    def decode(self) -> None:
        """Let ``full`` have the values of the codes that have come, this rank's too: all compute with the same."""
        assert self.arriving is not None
        if self.plan.float8 is None:
            decode_parts(self.arriving, self.layout.bounds, self.full)
        else:
            self.plan.float8.decode(self.arriving, self.layout, self._largest, self.full)

    def unshard(self) -> None:
        """Make the parameters views of the slot."""
        self._show(self.views, away=False)
        if self._loses_writes and not self._kept:
            self._states = [(param._version, param.data_ptr()) for param in self.params]

    def reshard(self) -> None:
        """Make the parameters loud placeholders."""
        if self._states and not self._kept:
            states = [(param._version, param.data_ptr()) for param in self.params]
            if states != self._states:
                found = zip(self.names, states, self._states, strict=True)
                self.written += [name for name, now, before in found if now != before]
        self._states = []
        self._show(self.loud, away=True)

    def _show(self, tensors: Sequence[torch.Tensor], *, away: bool) -> None:
        shown = self.params
        if self._kept:
            chosen = [entry for entry in range(len(shown)) if entry not in self._kept]
            shown, tensors = [shown[entry] for entry in chosen], [tensors[entry] for entry in chosen]
        for param, tensor in zip(shown, tensors, strict=True):
            param.data = tensor
        self._count(shown, away=away)

    def keep(self, entry: int, value: torch.Tensor) -> None:
        """Let the parameter ``entry`` be ``value`` until ``let_go``, also while layers run: a block of a script has it."""
        self.params[entry].data = value
        self._kept.add(entry)
        self._count([self.params[entry]], away=False)

    def let_go(self, entry: int, *, unsharded: bool) -> None:
        """Let the parameter ``entry`` be a view of the slot if its unit is ``unsharded``, and else a loud placeholder."""
        self._kept.discard(entry)
        self.params[entry].data = (self.views if unsharded else self.loud)[entry]
        self._count([self.params[entry]], away=not unsharded)

    def _count(self, params: Sequence[nn.Parameter], *, away: bool) -> None:
        """Let autograd refuse to read ``params`` while they are ``away``, see [Note: versions] in placeholders.py."""
        if self._counted:
            beyond = AWAY if away else 0
            versions = [param._version % AWAY + beyond for param in params]
            torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))

    def take_in(self, entry: int) -> bool:
        """Let the frozen parameter ``entry`` have the values of the tensor that a script has put into its place.

        False, and nothing is done, if it is not always here, or if the tensor is of another shape, dtype or device.
        """
        given, view = self.params[entry].data, self.views[entry]
        alike = (given.shape, given.dtype, given.device) == (view.shape, view.dtype, view.device)
        if self.trainable or self.plan.packed or not self.plan.resident or not alike:
            return False
        view.copy_(given)
        self.params[entry].data = view
        return True

    def forget_gradients(self) -> None:
        """Start the next step without gradients. Frozen parameters may have one, too."""
        for param in self.params:
            if fresh_gradient(param) is not None:
                set_gradient(param, None)


@dataclass(frozen=True)
class GradientBuffers:
    """Memory of a flat group's gradients, in one dtype. ``full``: [numel]; ``shard``: [shard], maybe a part of it.

    ``host``: [shard], where the optimizer is not on the device. ``residual``: what rounding has left out of sums so far.
    """

    full: torch.Tensor
    shard: torch.Tensor
    host: torch.Tensor | None = None
    residual: torch.Tensor | None = None


@dataclass(frozen=True)
class KeptGradients:
    """The gradients of a flat group, and what is known of them, while others use its buffers.

    ``full`` [numel], ``shard`` [shard] and ``host`` [shard] are copies of those buffers that held something; the rest is as
    in :class:`TrainedGroup`.
    """

    used: list[bool]
    accumulated: bool
    reduced: bool
    fetched: bool
    loose: list[torch.Tensor] | None
    late: dict[int, torch.Tensor]
    carry: torch.Tensor | None
    square_sum: torch.Tensor | None
    full: torch.Tensor | None
    shard: torch.Tensor | None
    host: torch.Tensor | None


class TrainedGroup(FlatGroup):
    """A flat group with a master and gradients."""

    master: torch.Tensor
    grad_shard: torch.Tensor
    # State of the current step:
    used: list[bool]  # which parameters got a gradient on this rank
    accumulated: bool  # grad_full or loose holds gradients that are not reduced yet
    reduced: bool  # grad_shard holds reduced gradients
    fetched: bool  # host_grad holds them, or will
    loose: list[torch.Tensor] | None  # flat gradients where autograd left them; grad_full is not used then
    late: dict[int, torch.Tensor]  # fp32 gradients that came after the unit's turn, by parameter
    _carry: torch.Tensor | None  # reduced gradients set aside while grad_full fills again
    _square_sum: torch.Tensor | None  # of host_grad, where it was taken on arrival

    def __init__(
        self,
        plan: FlatGroupPlan,
        params: Sequence[nn.Parameter],
        full: torch.Tensor,
        shard: torch.Tensor,
        master: torch.Tensor,
        gradients: GradientBuffers,
        codes: CodeBuffers | None = None,
        second: torch.Tensor | None = None,
        rest: torch.Tensor | None = None,
        *,
        together: bool = True,
    ) -> None:
        """``master``: [owned] fp32 or bf16. ``rest``: [owned], what a master in bf16 leaves out (ops/rounding.py).

        ``together``: master and weight are on the same device.
        """
        super().__init__(plan, params, full, shard, codes, second)
        self.master, self.rest, self._together = master, rest, together
        self.grad_full, self.grad_shard, self.host_grad = gradients.full, gradients.shard, gradients.host
        self.residual = gradients.residual
        # True if grad_shard is a part of grad_full (stages 0 and 1).
        self.shares_grad_memory = (
            gradients.shard.untyped_storage().data_ptr() == gradients.full.untyped_storage().data_ptr()
        )
        self.pieces = plan.shard_pieces
        self.grad_pieces = [self.grad_shard[p.shard_start : p.shard_start + p.numel] for p in self.pieces]
        self.grad_views = _views(gradients.full, plan.layout)
        self._gap_views = _gaps(gradients.full, plan.layout)  # elements that belong to no parameter
        self._begin_step()

    @cached_property  # because every step asks
    def weight_is_beside_master(self) -> bool:
        """True if the weight is another tensor than the master, on the same device, in a dtype that updates can write."""
        return self._together and not self.plan.master_is_weight and self.weight.dtype in ROUNDED

    @property
    def exact(self) -> torch.Tensor:
        """The values of the master in fp32, [owned]: itself, or a copy. Not to be written to."""
        return join(self.master, self.rest)

    @property
    def has_more_than_weights(self) -> bool:
        """True if masters have digits that the weights lack, so that weights alone do not tell what they are."""
        return not self.plan.master_is_weight or self.rest is not None

    def keep_exact(self, values: torch.Tensor, low: int = 0) -> None:
        """Let the master have ``values`` [n], from element ``low`` on."""
        parts = self.plan.master_format.parts(values.reshape(-1).to(self.master.device))
        for kept, new in zip((self.master, self.rest), parts, strict=True):
            if kept is not None and new is not None:
                kept[low : low + new.numel()].copy_(new)

    # -- from autograd -------------------------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """True if autograd has left a gradient that is not accumulated yet."""
        if self.late:
            return True
        for param in self.params:  # noqa: SIM110  a generator would cost a Python call for each parameter
            if fresh_gradient(param) is not None:
                return True
        return False

    def take_loose(self) -> bool:
        """Keep every ``parameter.grad`` where it is, if all exist, nothing was accumulated before, and layouts allow it."""
        if self.accumulated or self.late or not self.plan.unpacked:
            return False
        grads = [fresh_gradient(param) for param in self.params]
        if not all(grad is not None and grad.layout == torch.strided and grad.is_contiguous() for grad in grads):
            return False
        self._set_reduced_aside()
        self.loose = [grad.detach().view(-1) for grad in grads if grad is not None]
        self.used = [True] * len(self.params)
        for param in self.params:
            set_gradient(param, None)
        self.accumulated = True
        return True

    def accumulate(self) -> None:
        """Move ``parameter.grad`` into the gradient slot: copied if the slot is fresh, else added."""
        present, grads, missing = [], [], []
        for index, param in enumerate(self.params):
            grad, late = fresh_gradient(param), self.late.pop(index, None)
            if late is not None:
                grad = late if grad is None else late.add_(grad)
            if grad is None:
                missing.append(self.grad_views[index])
                continue
            present.append(self.grad_views[index])
            grads.append(grad.to_dense() if grad.is_sparse else grad)
            self.used[index] = True
            set_gradient(param, None)
        if not self.accumulated:
            self._set_reduced_aside()
            if missing or self._gap_views:
                torch._foreach_zero_(missing + self._gap_views)
            if present:
                torch._foreach_copy_(present, grads)
            self.accumulated = True
        elif present:
            torch._foreach_add_(present, grads)

    def clear_gaps(self) -> None:
        """Zero what belongs to no parameter: the slot may have another unit's gradients there, and the norm is of all."""
        if self._gap_views:
            torch._foreach_zero_(self._gap_views)

    def set_late_aside(self) -> None:
        """Keep gradients that came after the unit's turn in fp32, where autograd would add to them in their dtype."""
        for index, param in enumerate(self.params):
            grad = fresh_gradient(param)
            if grad is not None:
                grad = grad.to_dense() if grad.is_sparse else grad
                kept = self.late.get(index)
                self.late[index] = grad.to(torch.float32, copy=True) if kept is None else kept.add_(grad)
                set_gradient(param, None)

    def _set_reduced_aside(self) -> None:
        """Save the reduced shard before a second backward of the same step fills the slot that it is a part of."""
        if self.reduced and self.shares_grad_memory and self.host_grad is None:
            self._carry = self.grad_shard.clone()
            self.reduced = False

    # -- reductions ----------------------------------------------------------------------------------------------

    @property
    def adds_to_reduced(self) -> bool:
        """True if a reduction is to be added to what ``grad_shard`` holds."""
        return self.reduced and not self.shares_grad_memory and self.host_grad is None

    def parts(self) -> list[torch.Tensor]:
        """The unreduced gradients by parameter, flat."""
        return self.loose or [self.grad_full[e.offset : e.end] for e in self.layout.entries]

    def reduction_begins(self) -> None:
        """The accumulated gradients are being reduced. The collective keeps loose ones alive as long as it needs them."""
        self.loose = None
        self.accumulated, self.reduced = False, True

    def reduction_ends(self) -> None:
        """``grad_shard`` holds the sum."""
        if self._carry is not None:
            self.grad_shard.add_(self._carry)
            self._carry = None

    def fetch_begins(self) -> bool:
        """``grad_shard`` is on its way to ``host_grad``. True if it is to be added to what is there."""
        before, self.fetched = self.fetched, True
        return before

    def landed(self, *, final: bool) -> None:
        """``host_grad`` has changed. ``final``: as far as is known, it will not change again in this step."""
        assert self.host_grad is not None
        self._square_sum = square_sum(self.host_grad) if final else None

    def local_square_sum(self) -> torch.Tensor:
        """Sum of squares of this rank's reduced gradients, at stage 0 of its shard only: fp64 scalar on their device."""
        if self._square_sum is not None:
            return self._square_sum
        return square_sum(self.grad_shard if self.host_grad is None else self.host_grad)

    def gradient_changed(self) -> None:
        """The reduced gradients were summed over more ranks. Forget what was computed from them."""
        self._square_sum = None

    def gradient_replaced(self, entry: int) -> None:
        """The reduced gradient of parameter ``entry`` has other values now, and is one even if no backward gave any."""
        self.used[entry] = True
        self._square_sum = None

    def keep_gradients(self) -> KeptGradients:
        """Make room for gradients of another kind, with which the buffers begin anew. No reduction may be in flight."""
        on_device = self.reduced and self.host_grad is None
        whole = (self.accumulated and self.loose is None) or (on_device and self.plan.owns_everything)
        in_shard = on_device and not (whole and self.shares_grad_memory)
        kept = KeptGradients(
            self.used,
            self.accumulated,
            self.reduced,
            self.fetched,
            self.loose,
            self.late,
            self._carry,
            self._square_sum,
            self.grad_full.clone() if whole else None,
            self.grad_shard.clone() if in_shard else None,
            self.host_grad.clone() if self.fetched and self.host_grad is not None else None,
        )
        self._begin_step()
        return kept

    def bring_back_gradients(self, kept: KeptGradients) -> None:
        """Go on with what ``keep_gradients`` has returned. What the buffers hold is lost."""
        self.used, self.loose, self.late = kept.used, kept.loose, kept.late
        self.accumulated, self.reduced, self.fetched = kept.accumulated, kept.reduced, kept.fetched
        self._carry, self._square_sum = kept.carry, kept.square_sum
        for buffer, held in ((self.grad_full, kept.full), (self.grad_shard, kept.shard), (self.host_grad, kept.host)):
            if buffer is not None and held is not None:
                buffer.copy_(held)

    def forget_gradients(self) -> None:
        """Start the next step without gradients."""
        super().forget_gradients()
        self._begin_step()

    def _begin_step(self) -> None:
        self.accumulated = self.reduced = self.fetched = False
        self.loose = self._carry = self._square_sum = None
        self.late = {}
        self.used = [False] * len(self.params)


def rounded(plan: FlatGroupPlan, values: torch.Tensor) -> torch.Tensor:
    """``values`` [...] in the dtype of the weights, as a rest is of them if there is one; themselves if they have it."""
    if plan.master_format.rest is None:
        return values.to(plan.dtype)
    return plan.master_format.parts(values.reshape(-1))[0].view(values.shape)


def take_weight(flat_group: TrainedGroup, entry: int, value: torch.Tensor, before: torch.Tensor | None = None) -> None:
    """Let the master of parameter ``entry`` have ``value`` where that is another weight than the master stands for.

    Elsewhere nobody has changed it, and it keeps the digits that weights lack. ``value``: the whole parameter, and
    ``before``: what it was, if ``value`` is in the place of the master already.
    """
    new, old = value.reshape(-1), None if before is None else before.reshape(-1)
    run = flat_group.plan.owned_run(entry)
    if run is not None:
        place, part = slice(run.offset, run.offset + run.numel), slice(run.start, run.start + run.numel)
        _take_changed(flat_group, place, new[part], None if old is None else old[part])


def _take_changed(flat_group: TrainedGroup, place: slice, new: torch.Tensor, before: torch.Tensor | None) -> None:
    master, rest = flat_group.master, flat_group.rest
    new = new.to(master.device)
    was = master[place].to(flat_group.dtype) if before is None else before.to(master.device)
    changed = new != was
    for kept, fresh in zip((master, rest), flat_group.plan.master_format.parts(new), strict=True):
        if kept is not None and fresh is not None:
            kept[place] = torch.where(changed, fresh, kept[place])


def shows_copy(group: TrainedGroup) -> bool:
    """True if the parameters are always whole, and copies of the master, so that a write to one does not reach it."""
    is_copy = not group.plan.master_is_weight and group.weight.dtype in ROUNDED
    return is_copy and group.plan.resident and not group.plan.coded and group.rest is None


def edited(group: TrainedGroup) -> list[int]:
    """The entries of a group with ``shows_copy`` whose weights are not the masters, rounded: a script has written to them.

    Only of this rank's part. Waits for the device.
    """
    weight = group.full[slice(*group.plan.owned)]
    if all(map(_is_rounded, weight.split(_COMPARED), group.master.split(_COMPARED))):
        return []
    runs = ((run.entry, slice(run.offset, run.offset + run.numel)) for run in group.plan.owned_runs())
    return [entry for entry, run in runs if not _is_rounded(weight[run], group.master[run])]


def _is_rounded(weight: torch.Tensor, master: torch.Tensor) -> bool:
    """True if ``weight`` [n] is ``master`` [n] in its dtype. NaN equals NaN."""
    weight = weight.to(master.device)
    found = master.to(weight.dtype)
    return torch.equal(weight, found) or bool(((weight == found) | (weight.isnan() & found.isnan())).all())


def _views(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """A view of each parameter in the flat buffer [numel]."""
    return [flat[entry.offset : entry.end].view(entry.shape) for entry in layout.entries]


def _gaps(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Views of the elements that belong to no parameter."""
    ends = [0, *(entry.end for entry in layout.entries)]
    starts = [*(entry.offset for entry in layout.entries), layout.numel]
    return [flat[end:start] for end, start in zip(ends, starts, strict=True) if start > end]
