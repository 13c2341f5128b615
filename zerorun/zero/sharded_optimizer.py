"""Stepping: what ranks agree on before an update, the update of the pieces, and the way of new values to the slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..distributed.device import CPU
from ..distributed.replication import Family
from ..distributed.transport.communicator import Communicator
from ..errors import StepError
from ..log import warn_once
from ..ops.rounding import Origin
from ..ops.single_pass import SinglePassOptimizer, Sophia, is_native, leave_to_torch
from ..optim.in_fp32 import KeptTensor, StepsInFp32
from ..optim.optimizer_needs import WatchedSettings
from .flat_group import TrainedGroup
from .host_updates import begin_updates, take_in
from .matrix_updates import MatrixUpdates
from .optimizer_pieces import OptimizerPiece, split_lengths, split_piece
from .unit import Unit, finish_updates

# Steps after which parameters that never had a gradient are named.
WATCHED_STEPS = 10
_RATES = ("lr", "weight_decay", "momentum", "betas")  # which may be whole numbers; other whole numbers count something


class PiecesInFp32:
    """Steps ``optimizer`` in fp32, see optim/in_fp32.py. ``origins``: of a piece, for what is rounded by chance."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        origins: Callable[[OptimizerPiece], tuple[Origin, ...]],
        *,
        cuts: bool,
    ) -> None:
        self._steps, self._origins = StepsInFp32(optimizer, cuts=cuts), origins

    def step(self, pieces: Iterable[OptimizerPiece], coefficient: float) -> None:
        """Update ``pieces`` by their gradients times ``coefficient``."""
        self._steps.step([self._kept(piece) for piece in pieces], coefficient)

    def _kept(self, piece: OptimizerPiece) -> KeptTensor:
        return KeptTensor(piece.tensor, piece.group, piece.gradient, piece.rest, piece.format, self._origins(piece))


Splitter = Callable[[torch.optim.Optimizer, torch.Tensor, list[int]], list[torch.Tensor]]


class ShardedOptimizer:
    """A torch optimizer over pieces of shards. ``split`` cuts one of its tensors and the state that belongs to it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pieces: list[OptimizerPiece],
        units: list[Unit],
        comm: Communicator,
        split: Splitter,
        *,
        refuse_unused: bool = False,
        matrices: MatrixUpdates | None = None,
        in_fp32: PiecesInFp32 | None = None,
        watched: WatchedSettings | None = None,
    ) -> None:
        """``refuse_unused``: a parameter without a gradient on any rank is an error. ``matrices``: of a Muon.

        ``in_fp32``: how to step an optimizer that does not know what its tensors are kept in. ``watched``: settings with
        which it may need more of its parameters.
        """
        self._matrices, self._in_fp32, self._watched = matrices, in_fp32, watched
        self.optimizer, self.pieces, self.units, self.comm = optimizer, pieces, units, comm
        self._split, self._refuses_unused = split, refuse_unused
        self.stepping = False  # the optimizer's step is running
        self._flat_groups = [flat_group for unit in units for flat_group in unit.trainable]
        self._members = _members_of(optimizer)
        self._updates = 0
        self._never_used: set[tuple[int, int]] = set()  # (id of flat group, entry): no gradient in any update so far
        self.tell_overflow(False)
        self._agree_on_kernels()
        optimizer.register_step_pre_hook(self._refuse_direct_step)
        optimizer.register_state_dict_pre_hook(lambda _: finish_updates(units))
        if isinstance(optimizer, SinglePassOptimizer):
            optimizer.before_access = partial(finish_updates, units)
            optimizer.register_state_dict_pre_hook(_settle)  # it reads the groups before the state
            optimizer.register_load_state_dict_pre_hook(lambda found, _: _settle(found))

    def _agree_on_kernels(self) -> None:
        """Let all ranks update with the same kernels: others round differently, and replicas would drift apart."""
        if self.comm.topology.world_size == 1:
            return
        once = isinstance(self.optimizer, SinglePassOptimizer)
        on_host = {unit.placement.optimizer for unit in self.units if unit.trainable and once}
        devices = [torch.device(CPU) if host else self.comm.device for host in on_host]
        found = self.comm.control.values({device.type: is_native(device) for device in devices})
        for device in devices:
            native = [kinds.get(device.type, True) for kinds in found]
            if any(native) and not all(native):
                leave_to_torch(device)
                warn_once(
                    f"rank {native.index(False)} cannot use the fast updates for {device.type} tensors, so that no rank "
                    "does: torch's round differently. Remedy: see what zerorun-report says of that rank's host."
                )

    @property
    def reads_coefficient(self) -> bool:
        """True if ``update`` can leave it to the device to read the coefficient, and to write nothing if it is NaN."""
        on_device = all(not unit.placement.optimizer for unit in self.units if unit.trainable)
        return isinstance(self.optimizer, SinglePassOptimizer) and on_device and not self._has_hooks()

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the buffers for matrices on their way."""
        return 0 if self._matrices is None else self._matrices.bytes

    @property
    def host_buffer_bytes(self) -> int:
        """The bytes of that in host memory, if the device has memory of its own."""
        return 0 if self._matrices is None else self._matrices.host_bytes

    def take_back(self) -> None:
        """Forget the last update, whose coefficient was NaN."""
        if isinstance(self.optimizer, SinglePassOptimizer):
            self.optimizer.take_back()

    def give_methods(self, **methods: Callable[..., None]) -> None:
        """Let the optimizer have these methods, too: some trainers ask it, and not the engine."""
        for name, method in methods.items():
            setattr(self.optimizer, name, method)

    def settle_by(self, settle: Callable[[], None]) -> None:
        """Call ``settle`` before anybody is told what has come of the last update."""
        if isinstance(self.optimizer, SinglePassOptimizer):
            self.optimizer.settle = settle

    def tell_overflow(self, overflow: bool) -> None:
        """Set ``optimizer.overflow``, by which training loops decide whether their own schedules advance.

        True after a step that was skipped. It is there from the start: accelerate looks for it once, before any step.
        """
        self.optimizer.overflow = overflow  # type: ignore[attr-defined]

    def rates(self) -> Iterator[tuple[str, float]]:
        """(key, value) of what parameter groups have in fractions: rates, decays, betas."""
        keys = tuple(dict.fromkeys(("lr", *self.optimizer.defaults)))
        for group in self.optimizer.param_groups:
            yield from rates_in(group, keys)

    def refuse_changed_needs(self) -> None:
        """Raise StepError if groups were changed so that the optimizer cannot be divided any more as it is."""
        if _members_of(self.optimizer) != self._members:
            raise StepError(
                "the lists of parameters in optimizer.param_groups were changed after initialize(). What is in them are "
                "tensors of the engine, each with parts of several parameters. Weights are those before this step. Remedy: "
                "put the lists back. A group with lr = 0 stays as it is, and requires_grad_(False) leaves out single "
                "parameters; for other groups, call engine.destroy() and initialize() with them."
            )
        if self._watched is not None:
            self._watched.refuse_more()

    def update(self, coefficient: torch.Tensor | float, *, unused: bool, order: Sequence[Unit]) -> None:
        """Multiply the gradients by ``coefficient``, step the optimizer, and write the new values in compute dtype.

        ``unused``: leave alone, as torch does, the parameters that no rank had a gradient for. Units in host memory are
        updated in the background, in this ``order``: ``Unit.updated`` waits.
        """
        left_out = self._unused_everywhere() if unused else set()
        for unit in self.units:
            unit.updated()
        self.comm.fence(update=True)
        if unused and self._refuses_unused:
            self._refuse_unused(left_out)
        self._watch_unused(left_out)
        moving = self._without(left_out)
        if self._matrices is not None:
            self._matrices.direct(moving, coefficient)
        once = isinstance(self.optimizer, SinglePassOptimizer)
        alone = once and not self._has_hooks()  # which look at gradients before the step, or change masters after it
        behind = [unit for unit in order if alone and unit.placement.optimizer and unit.trainable]
        apart = {id(flat_group) for unit in behind for flat_group in unit.trainable}
        self._update_now([piece for piece in moving if id(piece.flat_group) not in apart], coefficient)
        unwritten = [s for s in self._flat_groups if not (id(s) in apart or (alone and s.weight_is_beside_master))]
        self.write_back(only=unwritten)
        if behind and isinstance(self.optimizer, SinglePassOptimizer):
            begin_updates(behind, [p for p in moving if id(p.flat_group) in apart], self.optimizer, float(coefficient))

    def _without(self, left_out: set[tuple[int, int]]) -> list[OptimizerPiece]:
        """The pieces but for the parameters at these places (id of flat group, entry)."""
        if left_out:  # parameters that move must not share a piece with those that do not
            self.cut(lambda piece: len({(id(piece.flat_group), run.entry) in left_out for run in piece.runs}) == 2)
        return [p for p in self.pieces if any((id(p.flat_group), run.entry) not in left_out for run in p.runs)]

    def take_curvature(self, coefficient: float, *, unused: bool) -> None:
        """Let the optimizer, which must be Sophia, average the squares of the gradients times ``coefficient``.

        ``unused``: as for ``update``.
        """
        assert isinstance(self.optimizer, Sophia)
        moving = self._without(self._unused_everywhere() if unused else set())
        finish_updates(self.units)
        take_in(self.units, moving, self.optimizer, self.optimizer.update_curvature, coefficient)

    def _has_hooks(self) -> bool:
        """True if somebody besides the engine wants to know of the optimizer's steps."""
        before = len(self.optimizer._optimizer_step_pre_hooks) + len(_global_optimizer_pre_hooks)
        after = len(self.optimizer._optimizer_step_post_hooks) + len(_global_optimizer_post_hooks)
        return before + after > 1  # that refuses direct steps

    def _refuse_direct_step(self, *unused: Any) -> None:
        if not self.stepping:
            raise StepError("optimizer.step() was called directly. Remedy: call engine.step().")

    def _update_now(self, pieces: list[OptimizerPiece], coefficient: torch.Tensor | float) -> None:
        self._step_optimizer(pieces, coefficient)
        if self._watched is not None:
            self._watched.stepped()

    def _step_optimizer(self, pieces: list[OptimizerPiece], coefficient: torch.Tensor | float) -> None:
        if self._in_fp32 is not None:
            self.stepping = True
            try:
                self._in_fp32.step(pieces, float(coefficient))
            finally:
                self.stepping = False
            return
        apart = {piece.tensor: piece.gradient for piece in pieces if piece.gradient.dtype != piece.tensor.dtype}
        for piece in pieces:
            piece.tensor.grad = piece.gradient if piece.tensor not in apart else None
        if isinstance(self.optimizer, SinglePassOptimizer):
            self.optimizer.gradients.clear()
            self.optimizer.gradients.update(apart)  # torch wants gradients of the same dtype
            self.optimizer.outputs = {p.tensor: p.weight for p in pieces if p.flat_group.weight_is_beside_master}
            self.optimizer.coefficient = coefficient
        elif coefficient != 1.0 and pieces:
            torch._foreach_mul_([piece.gradient for piece in pieces], coefficient)
        self.stepping = True
        try:
            self.optimizer.step()
        finally:
            self.stepping = False
        for piece in pieces:
            piece.tensor.grad = None

    def write_back(self, only: Iterable[TrainedGroup] | None = None) -> None:
        """Copy the masters into the compute-dtype shards (at stage 0: into the whole slot), where those differ."""
        for flat_group in self._flat_groups if only is None else only:
            write_back(flat_group)

    def _refuse_unused(self, left_out: set[tuple[int, int]]) -> None:
        """Raise StepError on all ranks alike: other pipeline stages have other parameters."""
        found = self.comm.control.values(self._name_unused(left_out) if left_out else None)
        first = next((text for text in found if text is not None), None)
        if first is not None:
            raise StepError(first)

    def _unused_everywhere(self) -> set[tuple[int, int]]:
        """(id of flat group, entry) of the parameters without a gradient on any rank since the last step."""
        flags = [torch.tensor([float(used) for used in flat_group.used]) for flat_group in self._flat_groups]
        summed = self.comm.control.data_sum(torch.cat([torch.zeros(1), *flags]))[1:].split([len(part) for part in flags])
        for axis in self.comm.model_axes:  # where another rank had a gradient, this one has it, too
            members = [
                part
                for part, flat_group in zip(summed, self._flat_groups, strict=True)
                if axis in flat_group.plan.replication.sums or (axis, flat_group.plan.family) == ("tensor", Family.EXPERT)
            ]
            if members:
                self.comm.sum_over_axis(members, axis)
        totals = iter([value for part in summed for value in part.tolist()])
        return {(id(s), entry) for s in self._flat_groups for entry in range(len(s.used)) if next(totals) == 0}

    def _watch_unused(self, left_out: set[tuple[int, int]]) -> None:
        """Name once, after some steps, what has had no gradient on any rank: a part of the model that nothing reaches?"""
        self._updates += 1
        self._never_used = left_out if self._updates == 1 else self._never_used & left_out
        if self._updates == WATCHED_STEPS and self._never_used:
            names = self._names(self._never_used, lambda param: param.requires_grad)
            if names:
                warn_once(
                    f"{len(names)} parameters got no gradient on any rank in the first {WATCHED_STEPS} steps, and stay as "
                    f"they are: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}. If that is meant, "
                    "requires_grad_(False) before initialize() saves their gradients and optimizer states."
                )

    def _name_unused(self, left_out: set[tuple[int, int]]) -> str:
        names = self._names(left_out)
        return (
            f"{len(names)} parameters got no gradient on any rank in this step: {', '.join(names[:10])}. "
            "Remedy: freeze them, or set zero_optimization.ignore_unused_parameters to true to leave them as they are."
        )

    def _names(self, places: set[tuple[int, int]], where: Callable[[nn.Parameter], bool] = lambda _: True) -> list[str]:
        """Those at ``places`` (id of flat group, entry) for which ``where`` holds, in the order of the model."""
        members = [(s, i, name) for s in self._flat_groups for i, name in enumerate(s.names) if (id(s), i) in places]
        return [name for flat_group, index, name in members if where(flat_group.params[index])]

    def cut(self, mixed: Callable[[OptimizerPiece], bool]) -> None:
        """Replace every ``mixed`` piece by one piece for each parameter in it, with its state."""
        pieces: list[OptimizerPiece] = []
        for piece in self.pieces:
            if mixed(piece):
                tensors = self._split(self.optimizer, piece.tensor, split_lengths(piece))
                pieces += split_piece(piece, tensors)
            else:
                pieces.append(piece)
        self.pieces = pieces
        self._members = _members_of(self.optimizer)


def _members_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The tensors of each group, by their id()."""
    return [[*map(id, group["params"])] for group in optimizer.param_groups]


def rates_in(group: Mapping[str, Any], keys: Iterable[str] = _RATES) -> Iterator[tuple[str, float]]:
    """(key, value) of what a parameter group has in fractions: rates, decays, betas. NaN and infinities are left out, and
    tensors, which may be on a device.
    """
    for key in keys:
        value = group.get(key)
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, (float, int) if key in _RATES else float) and math.isfinite(number):
                yield key, number


def refuse_new_group(*unused: Any, **also_unused: Any) -> None:
    """What ``optimizer.add_param_group`` is: the engine would not know of the parameters that it adds."""
    raise StepError(
        "optimizer.add_param_group() was called after initialize(): gradients of the group would neither be averaged "
        "over ranks nor dropped after a step. Remedy: make them parameters of the model, and give all groups to "
        "initialize(), as optimizer= or model_parameters=; what is to be trained later may have a group with lr = 0 first."
    )


def _settle(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, SinglePassOptimizer):
        optimizer.settle()


def write_back(flat_group: TrainedGroup) -> None:
    """Let the compute-dtype values be the master's, rounded."""
    if flat_group.master is not None and not flat_group.plan.master_is_weight:
        flat_group.weight.copy_(flat_group.master)
