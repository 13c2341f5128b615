"""Accumulation: the micro-batches of the current step, their losses, and where the step ends.

[Note: one divisor]
Gradients are summed as they come and divided once, in ``step``: by the ranks that sum them and the accumulation steps,
or by the total weight if losses came with weights, and by the loss scale. Nothing is divided on the way, so all stages
round alike, and a loss may reach the parameters by any path.

[Note: labels]
A loss that is a mean over its labels, averaged over micro-batches and ranks, is a mean of means: labels of a micro-batch
with few of them count more. Only the first micro-batches are checked for this, and only if the model gets its labels in the
argument ``labels``, and no ``num_items_in_batch``, by which it would divide the sum.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Number
from typing import Any

import torch
from torch import nn

from ..config.batch import Batch
from ..config.parse import Config
from ..distributed.device import holds
from ..distributed.same_data import checksum
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..errors import StepError
from ..log import counted, warn_once
from ..optim.loss_scaler import LossScaler
from ..plan.replaced_forwards import ReplacedForward, uncompiled
from ..zero.flat_group import fresh_gradient
from ..zero.norm import Alike, Told, UnreadLosses
from ..zero.unit import Unit

IGNORED = -100  # the class that torch's cross-entropy leaves out
WATCHED_MICRO_BATCHES = 20  # the first ones only: looking at labels on a device means waiting for the device
_MANY_BACKWARDS = 8  # for each micro-batch of a step: by then a loop has called step(), if it ever does
_MODES = {"weight": "a weight", "mean": "a loss to be averaged", "sum": "scale_wrt_gas=False", None: ""}


@dataclass
class Notes:
    """What is known of the micro-batches of one step on this rank. They are counted from 0.

    ``bad_losses``: with a loss that is NaN or infinite. ``empty``: of weight 0, with such a loss, which may be a mean of
    nothing. ``bad_weights``: with the weights that are of no use. ``culprits``: with the parameters whose gradients are not
    finite there. ``unread``: those whose losses are on a device, with ``marks`` and ``weights`` as in UnreadLosses.
    ``released``: (parameter, unit) of placeholders that such losses were computed from.
    """

    bad_losses: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    bad_weights: list[tuple[int, float]] = field(default_factory=list)
    culprits: list[tuple[int, str]] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    released: list[tuple[str, str]] = field(default_factory=list)
    marks: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)

    def read(self) -> None:
        """Sort the unread losses that are of no use. Waits for the device."""
        if not self.unread:
            return
        marks, weights = (torch.stack(values).tolist() for values in (self.marks, self.weights))
        for micro_batch, mark, weight in zip(self.unread, marks, weights, strict=True):
            if not math.isnan(mark):
                continue
            if weight == 0:
                self.empty.append(micro_batch)
            elif 0 < weight < math.inf:
                self.bad_losses.append(micro_batch)
            else:
                self.bad_weights.append((micro_batch, weight))


def samples_of_step(batch: Batch, backwards: int, *, managed: bool, ended_by_loop: bool) -> int:
    """Samples of a step that ends, over all ranks. A loop that accumulates by itself has one micro-batch per backward.

    So has one that says where steps end, up to those of a step as configured: it may call backward twice for a micro-batch.
    """
    if managed:
        backwards = min(backwards, batch.accumulation) if ended_by_loop else batch.accumulation
    return batch.train // batch.accumulation * backwards


@dataclass(eq=False)
class ScaledBackward:
    """A backward of a loss that an engine has multiplied by its loss ``scale``. It is over when nobody refers to it.

    ``counts``: how losses of this backward count, as arguments of ``take_loss``; None if nobody said so.
    ``heard``: the accumulations that know of that. ``by_engine``: it is in a call of an engine's ``backward``.
    """

    scale: float
    counts: dict[str, Any] | None = None
    heard: list[Accumulation] = field(default_factory=list)
    by_engine: bool = True


class RunningBackwards:
    """The scaled backwards that run in this process, outermost first."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[ScaledBackward]] = []

    def innermost(self) -> ScaledBackward | None:
        """None in a plain backward."""
        while self._found:
            backward = self._found[-1]()
            if backward is not None:
                return backward
            self._found.pop()  # it has ended in an exception
        return None

    def scale(self) -> float:
        """The factor of the losses of the innermost one; 1.0 in a plain backward."""
        backward = self.innermost()
        return 1.0 if backward is None else backward.scale

    def _is_given(self) -> bool:
        """True if the innermost one is that of a loss that an engine was given, and has multiplied by itself."""
        backward = self.innermost()
        return backward is not None and backward.by_engine

    @contextlib.contextmanager
    def inside(self, backward: ScaledBackward) -> Iterator[None]:
        """Backwards in the block are ``backward``."""
        self._found.append(weakref.ref(backward))
        try:
            yield
        finally:
            self._leave(backward)

    @uncompiled
    def enter(self, scale: float) -> None:
        """To be called in a backward that has begun: its loss was multiplied by ``scale``.

        Raises StepError if another part of it was multiplied by another one.
        """
        if self.innermost() is not None:
            before = self.scale()
            if before != scale or (scale != 1.0 and self._is_given()):
                raise StepError(  # whose traceback refers to no backward, and lets it be over
                    "a loss was multiplied by the loss scale of an engine twice, or parts of it by different ones "
                    f"({before:g}, {scale:g}), in one backward. Remedy: add up the losses, and call either "
                    "engine.backward(loss) or engine.scale(loss).backward(), with one of the engines."
                )
            return
        backward = ScaledBackward(scale, by_engine=False)
        self._found.append(weakref.ref(backward))

        def left() -> None:
            self._leave(backward)

        # Autograd drops what is to be called at the end if there is an exception: then nobody refers to it any more.
        torch.autograd.Variable._execution_engine.queue_callback(left)

    def _leave(self, backward: ScaledBackward) -> None:
        self._found = [found for found in self._found if found() not in (None, backward)]


running = RunningBackwards()


class _Entrance:
    """Of a backward whose gradients have passed into an engine. It refers to this until it is over, or has failed."""

    @uncompiled
    def __call__(self) -> None:
        """What is called when the backward is over."""


class Arrivals:
    """Whether the gradients of one engine's backwards came with its loss scale: see loss_scale_borders.py."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        self._entrance: weakref.ref[_Entrance] | None = None
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self._outside = running.scale()
        self.has_gradient = False  # of any trained parameter, in it

    @uncompiled
    def enter(self) -> None:
        """In the backward that is running, gradients pass into the engine: they have its loss scale."""
        if not self._has_entered():
            entrance = _Entrance()
            self._entrance = weakref.ref(entrance)
            torch.autograd.Variable._execution_engine.queue_callback(entrance)  # refers to it, until the backward is over

    def _has_entered(self) -> bool:
        return self._entrance is not None and self._entrance() is not None

    def inspect(self, unit: Unit) -> None:
        """Note whether the backward has left a gradient in ``unit``."""
        self.has_gradient = self.has_gradient or unit.has_gradient()

    def lack_scale(self, *, late: bool) -> bool:
        """True if the backward, which ends, has left gradients that had another scale when it came to the engine."""
        return (self.has_gradient or late) and not self._has_entered() and self._outside != self._scaler.scale

    def refuse(self) -> None:
        """Raise StepError for such a backward."""
        raise StepError(
            f"a backward has come to parameters without the loss scale of their engine, {self._scaler.scale:g}, by which "
            "step() divides: its loss depends on what the engine's call has not returned in a tensor, list, dict or "
            "dataclass, such as the output of engine.module(...), a tensor in an object of another class, or an "
            "attribute of a module. Weights are as before. Remedy: engine.zero_grad(counted=True), and "
            "engine.backward(loss) or engine.scale(loss).backward(), for all micro-batches of the step."
        )


class Accumulation:
    """The accumulation of one rank. The runtime asks it, and informs it, about backwards."""

    def __init__(self, config: Config, comm: Communicator, scaler: LossScaler) -> None:
        self.micro_steps = 0  # step() calls so far
        self._config, self._comm, self._scaler = config, comm, scaler
        self._observes = config.observes_loss
        sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        self.batch = Batch(*sizes, comm.topology.data_parallel_size, derived=())
        self._device = comm.device
        self.given_boundary: bool | None = None  # set by the training loop
        self._in_no_sync = False
        self._is_last: bool | None = None  # whether the next backward is the last of a pipeline's batch
        self._labels = LabelCounts(config.gradient_accumulation_steps * comm.topology.data_parallel_size)
        self._first_data = FirstData(comm.topology.data_parallel_size)
        self.arrivals = Arrivals(scaler)
        self._mode: str | None = None
        comm.expect_micro_batches(self.batch.accumulation)
        self.begin(lambda: scaler.at_minimum)

    def begin(self, inspects: Callable[[], bool]) -> None:
        """Begin a new step: the one before has ended, or its gradients are dropped.

        ``inspects``: whether to look where gradients are not finite, as that would be an error.
        """
        self.begun_at = self.micro_steps  # when the step began
        # Since the last update. What a rank does on its own must not hang on ``backwards``, of which it may have fewer than
        # others, as without a token for its experts.
        self.backwards = 0  # with gradients of parameters, or by the engine's backward()
        self.of_any_kind, self._of_any_kind_seen = 0, 0  # backwards, and those of them that a step() has followed
        self.has_begun = False  # a backward that has not ended
        self.steps_seen = 0  # backwards of these that a step() has followed
        self._given = 0  # losses
        if self._mode == "sum":
            self._comm.expect_micro_batches(self.batch.accumulation)
        self._mode = None
        self._weight = 0.0
        self._compared = 0.0  # the sum of what must be the same on all ranks with the same batch
        self._losses: list[torch.Tensor] = []  # fp64 [2] each: as ``Told.observed``
        self.notes = Notes()
        self._inspects = inspects
        self._is_unscaled = False

    # -- the boundary --------------------------------------------------------------------------------------------

    @property
    def is_boundary(self) -> bool:
        """True if the next step() updates the weights."""
        if self._in_no_sync:
            return False
        if self.given_boundary is not None:
            return self.given_boundary
        if not self._config.managed_gradient_accumulation:
            return True
        return (self.micro_steps - self.begun_at + 1) % self.batch.accumulation == 0

    def set_boundary(self, is_boundary: bool | None) -> None:
        """Let the training loop decide from now on which step() updates the weights; None: by the count again."""
        self.given_boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate inside the block: no boundary is reached, and ``count_step`` raises StepError."""
        around, self._in_no_sync = self._in_no_sync, True  # blocks may be nested
        try:
            yield
        finally:
            self._in_no_sync = around

    def count_step(self) -> bool:
        """Count a step() and return True if it is to update the weights.

        Raises StepError if there was no backward since the last step(), or one without the loss scale since the last
        update, and inside ``no_sync``. A rank may have no gradients where others have some, as of experts, so that only
        ``refuse_no_backward`` knows whether there are any.
        """
        if self._is_unscaled:
            self.arrivals.refuse()
        if self._in_no_sync:
            raise StepError("step() inside no_sync(). Remedy: call it after the block.")
        if self.of_any_kind == self._of_any_kind_seen:
            refuse_no_backward(0)
        self._of_any_kind_seen = self.of_any_kind
        new, self.steps_seen = self.backwards - self.steps_seen, self.backwards
        boundary = self.is_boundary
        if not boundary and self.given_boundary is None and new == self.batch.accumulation:
            warn_once(
                f"step() after {new} backwards counts as one of gradient_accumulation_steps = {new} "
                "micro-batches, so the weights are not updated yet. If they were meant to be one update, call step() "
                "after every backward, or engine.set_gradient_accumulation_boundary(True) once."
            )
        self.micro_steps += 1
        return boundary

    def count_batch(self, micro_batches: int) -> None:
        """Count a whole batch that went through a pipeline."""
        self.backwards = self.steps_seen = micro_batches
        self.micro_steps += micro_batches

    def at_micro_batch(self, number: int) -> None:
        """Attribute losses from now on to micro-batch ``number`` of the step, counted from 0."""
        self.backwards = number

    def go_on_from(self, micro_steps: int, begun_at: int) -> None:
        """Continue counting from ``micro_steps`` of an earlier run, in a step that began after ``begun_at`` of them."""
        self.micro_steps, self.begun_at = micro_steps, begun_at

    def resize(self, batch: Batch) -> None:
        """Let later steps have these sizes. No backward may have come since the last update."""
        self.batch, self.begun_at = batch, self.micro_steps
        self._comm.expect_micro_batches(batch.accumulation)

    # -- backwards, as the runtime sees them ---------------------------------------------------------------------

    def reduces_now(self) -> bool:
        """A backward begins. Return True if accumulated gradients may be reduced in it."""
        self.has_begun = True
        self.arrivals.begin()
        if self._is_last is not None:
            return self._is_last
        return self._config.managed_gradient_accumulation and self.is_boundary

    def tell_last(self, is_last: bool) -> None:
        """Note whether the next backward is the last of a pipeline's batch. Once called, it must precede every backward."""
        self._is_last = is_last

    def inspect(self, unit: Unit) -> None:
        """Note how the loss counts if it is another engine's, and, if this step ``inspects``, non-finite gradients."""
        self.arrivals.inspect(unit)
        backward = running.innermost()
        said = backward.counts if backward is not None and self not in backward.heard else None
        if backward is not None and said is not None and unit.has_gradient():
            backward.heard.append(self)
            mode, counts = self.take_loss(**said)
            if self._comm.queues and mode == "weight":
                self.note_unread(None, counts)
        for flat_group in unit.trainable if self._inspects() else ():
            for index, (name, param) in enumerate(zip(flat_group.names, flat_group.params, strict=True)):
                for gradient in (fresh_gradient(param), flat_group.late.get(index)):
                    if gradient is not None and not bool(torch.isfinite(gradient).all()):
                        self.notes.culprits.append((self.backwards, name))

    def ended(self, *, late: bool = False) -> None:
        """Count a backward that has ended. ``late``: gradients came after the turn of their unit.

        Those of inputs alone, as of torch.autograd.grad, are no part of the step. Raises StepError if gradients of
        parameters have come without the loss scale.
        """
        self.of_any_kind, self.has_begun = self.of_any_kind + 1, False
        backward = running.innermost()
        counts = self.arrivals.has_gradient or late or (backward is not None and self in backward.heard)
        if self._is_last is None and not counts:
            return
        self.backwards += 1
        if self.micro_steps == 0 and self.backwards == _MANY_BACKWARDS * self.batch.accumulation:
            warn_once(
                f"{self.backwards} backwards, and engine.step() has not been called yet: no weight has changed. It takes "
                "the place of optimizer.step() and zero_grad(), and is called after every backward."
            )
        if self._is_last is None and self.arrivals.lack_scale(late=late):
            self._is_unscaled = True
            self.arrivals.refuse()

    # -- losses --------------------------------------------------------------------------------------------------

    def look_at(self, named: Mapping[str, Any], data: Any = None) -> None:
        """Look at a micro-batch: at the labels in what is ``named``, and at its ``data``, if ranks are to compare it.

        See LabelCounts and FirstData.
        """
        self._labels.look(named)
        if data is not None:
            self._first_data.look(data)

    def advise(self, remedy: str) -> None:
        """Warn if the losses of a step were averaged although their micro-batches have different numbers of labels.

        ``remedy``: how to get a mean over all labels of a step.
        """
        if self._mode in (None, "mean"):
            self._labels.advise(remedy)

    def take_loss(self, weight: Any, *, scale_wrt_gas: bool) -> tuple[str, torch.Tensor | float]:
        """Return (the mode in which losses of this step count, the weight of this one, which is 1 if it has none).

        A weight that is on a device stays there, as an fp64 scalar. Raises StepError if losses of one step have different
        modes.
        """
        mode = "weight" if weight is not None else "mean" if scale_wrt_gas else "sum"
        if self._mode not in (None, mode):
            raise StepError(
                f"backward() was called with {_MODES[self._mode]} and then {_MODES[mode]} within one step. "
                "Remedy: call it the same way for all micro-batches of a step."
            )
        value: torch.Tensor | float = 1.0
        if weight is not None:
            there = self._comm.queues and isinstance(weight, torch.Tensor) and holds(self._device, weight)
            if there and weight.numel() == 1 and not weight.is_complex():
                value = weight.detach().to(torch.float64, copy=True).reshape(())  # the script may use its own again
            else:
                value = weight_of(weight)
            if not self._comm.queues:
                self._weight += float(value)
        if mode == "sum" and self._mode is None:
            self._comm.expect_micro_batches(1)  # what the loop has divided does not grow with their number
        self._mode = mode
        self._given += 1
        return mode, value

    def note_unread(self, loss: torch.Tensor | None, weight: torch.Tensor | float) -> None:
        """Let the device find out whether ``loss`` (None: any is) and its ``weight`` are of use."""
        if not isinstance(weight, torch.Tensor):
            weight = self._one if weight == 1.0 else torch.full_like(self._one, weight)
        mark = weight.sqrt() * 0.0  # NaN for NaN, infinities and negative numbers
        if loss is not None:
            mark = mark + loss.detach().double().reshape(()) * 0.0
        self.notes.unread.append(self.backwards)
        self.notes.marks.append(mark)
        self.notes.weights.append(weight)

    @cached_property
    def _one(self) -> torch.Tensor:
        return torch.ones((), dtype=torch.float64, device=self._device)

    def observe(self, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Remember ``loss`` for who writes or prints that of the step, if anybody does. Waits for nothing."""
        if not self._observes:
            return
        value, counts = loss.detach().to(torch.float64).reshape(()), self._one
        if self.is_weighted:
            counts = self._one * weight
            value = torch.where(counts == 0, 0.0, value * counts)
        elif self._mode == "sum" and self._losses:  # the step's loss is the sum of these, so each rank divides once
            counts = torch.zeros_like(counts)
        self._losses.append(torch.stack([value, counts]))

    def compare(self, number: float) -> None:
        """Add ``number`` to the sum that must be the same on all ranks with the same batch: a loss, or what stands for
        random numbers."""
        self._compared += number if math.isfinite(number) else 0.0

    def told(self, wishes: Sequence[int], *, must_know: bool) -> Told:
        """Return what the other ranks have to know about this rank's losses. ``must_know``: the outcome of the step."""
        divisor = (
            None if self._mode is None else 0 if self.is_weighted else 1 if self._mode == "sum" else self.batch.accumulation
        )
        unread = UnreadLosses(self.notes.marks, self.notes.weights)
        observed = None
        if self._observes:
            observed = sum(self._losses, torch.zeros(2, dtype=torch.float64, device=self._device))
        return Told(
            len(self.notes.bad_losses),
            self._weight,
            self._compared,
            wishes,
            Alike(divisor, self._given if self._mode == "mean" else None),
            self._first_data.told(),
            unread,
            must_know,
            observed,
        )

    # -- the divisor ---------------------------------------------------------------------------------------------

    @property
    def is_weighted(self) -> bool:
        """True if losses of this step come with weights."""
        return self._mode == "weight"

    def unscale(self, weight: torch.Tensor | float) -> torch.Tensor | float:
        """Return the factor that turns accumulated gradients into averaged, unscaled ones.

        ``weight``: the sum of the weights of all losses on all ranks, if losses have weights. Raises StepError if it is 0,
        unless it is a tensor, of which the program does not know.
        """
        if self.is_weighted:
            if isinstance(weight, float):
                refuse_no_weight(weight)
            return 1.0 / (weight * self._scaler.scale)
        divisor = 1 if self._mode == "sum" else self.batch.accumulation
        return 1.0 / (divisor * counted_ranks(self._config, self._comm.topology) * self._scaler.scale)

    def gradient_factor(self) -> float:
        """Return ``unscale`` for the losses so far. All ranks must call it."""
        if not self.is_weighted:
            return float(self.unscale(0.0))
        mine = self._weight + sum(map(float, self.notes.weights)) if self._comm.topology.tensor_rank == 0 else 0.0
        return float(self.unscale(float(self._comm.control.sum(torch.tensor([mine], dtype=torch.float64))[0])))


def counted_ranks(config: Config, topology: Topology) -> int:
    """Return by how many ranks a sum of gradients over the data axis is divided.

    Each rank of a context group has the loss of one batch, and gradients that add up to as many times those of the batch.
    """
    return topology.data_size if config.gradient_allreduce_op == "mean" else topology.context


def refuse_no_backward(backwards: int) -> None:
    """Raise StepError if there were no ``backwards``."""
    if not backwards:
        raise StepError(
            "step() without backward(): no gradients of parameters since the last step(). Remedy: call "
            "engine.backward(loss) or loss.backward() first."
        )


# -- what others call to drop gradients --------------------------------------------------------------------------


class ModuleZeroGrad(ReplacedForward):
    """``zero_grad`` of an engine's module: the gradients that it means are the engine's, in flat buffers.

    So it does what ``engine.zero_grad()`` does.
    """

    def __init__(
        self, module: nn.Module, accumulation: Accumulation, drop: Callable[[], Callable[..., None] | None]
    ) -> None:
        """``drop`` returns what drops them; None if the engine is no more."""
        super().__init__(module, "zero_grad")
        self._accumulation, self._drop = accumulation, drop

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        drop = self._drop()
        if drop is not None and has_failed(self._accumulation):
            drop(counted=True)
        elif drop is not None and self._accumulation.of_any_kind:
            drop()
        self.inner(*args, **kwargs)


def has_failed(accumulation: Accumulation) -> bool:
    """True if the last backward has ended in an exception, so that some of its gradients are there.

    They cannot be told from those of earlier micro-batches, so that whoever drops them drops all, as in PyTorch.
    """
    return accumulation.has_begun and torch._C._current_graph_task_id() == -1


def is_in_a_step(accumulation: Accumulation) -> bool:
    """True if there are gradients that no update has used, or if ``step`` has counted micro-batches since the last one."""
    return accumulation.backwards > 0 or accumulation.micro_steps > accumulation.begun_at


def warn_of_kept(what: str, backwards: int) -> None:
    """Warn that ``what`` has not dropped the gradients of these backwards."""
    warn_once(
        f"{what} has no effect: the gradients of {counted(backwards, 'backward')} since the last update are kept, and the "
        "next one adds them up. Remedy: remove the call, or call engine.zero_grad(counted=True) if they are to be dropped."
    )


def zero_grad_beside(accumulation: Accumulation, drop: Callable[[], Callable[..., None] | None]) -> Callable[..., None]:
    """Return what ``optimizer.zero_grad`` is: the optimizer has no gradients between steps, so it drops none.

    But it calls what ``drop`` returns after a backward that has failed, as where a script skips what does not fit.
    """
    seen = weakref.ref(accumulation)  # scripts may keep the optimizer longer than the engine

    def zero_grad(set_to_none: bool = True) -> None:
        found, found_drop = seen(), drop()
        if found is not None and found_drop is not None and has_failed(found):
            found_drop(counted=True)
        elif found is not None and found.backwards:
            warn_of_kept("optimizer.zero_grad()", found.backwards)

    return zero_grad


# -- labels -------------------------------------------------------------------------------------------------------


class LabelCounts:
    """The label counts of one rank's micro-batches. ``micro_batches``: losses averaged in a step, over all ranks."""

    def __init__(self, micro_batches: int) -> None:
        self._left = WATCHED_MICRO_BATCHES if micro_batches > 1 else 0
        self._counts: set[int] = set()

    def look(self, inputs: Mapping[str, Any]) -> None:
        """Count the ``labels`` of the next micro-batch, if it has any, and if its loss is a mean over them."""
        labels = inputs.get("labels") if inputs.get("num_items_in_batch") is None else None
        if self._left and isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            self._left -= 1
            self._counts.add(int((labels != IGNORED).sum()))

    def advise(self, remedy: str) -> None:
        """Warn, once, if the averaged losses came from micro-batches with different numbers of labels."""
        if len(self._counts) > 1:
            warn_once(
                f"micro-batches have between {min(self._counts)} and {max(self._counts)} labels, and each counts the same: "
                "the gradient is that of a mean of means, and changes with the number of ranks and accumulation steps. "
                f"Remedy: {remedy}; with labels[..., 1:] for models that shift them, as decoders of Hugging Face do."
            )
            self._left, self._counts = 0, set()


class FirstData:
    """A checksum of the first micro-batch of one of ``ranks`` data-parallel ranks, for one step to tell of."""

    def __init__(self, ranks: int) -> None:
        self._looks = ranks > 1
        self._seen: int | None = None

    def look(self, given: Any) -> None:
        if self._looks:
            self._looks, self._seen = False, checksum(given)

    def told(self) -> int | None:
        seen, self._seen = self._seen, None
        return seen


UNUSABLE_WEIGHT = "the weight of a loss must be finite and not negative, got {}."


# -- what a loop gives to backward --------------------------------------------------------------------------------


def check_loss(loss: Any, function: str = "backward()") -> None:
    """Raise StepError for anything but a tensor of one element that depends on parameters."""
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"{function} needs the loss as a tensor, got {_shown(loss)}. Remedy: {_remedy(loss)}")
    if loss.numel() != 1:
        raise StepError(
            f"{function} needs a scalar loss, got {tuple(loss.shape)}. Remedy: reduce it, for example with loss.mean()."
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss does not depend on any trainable parameter. Remedy: compute it from the engine's output, outside "
            "torch.no_grad(), and without detach()."
        )


def _shown(loss: Any) -> str:
    kind = type(loss).__name__
    return f"{kind} {loss!r:.40}" if isinstance(loss, (Number, str)) else "None" if loss is None else f"a {kind}"


def _remedy(loss: Any) -> str:
    if loss is None:
        return "pass the tensor that the model computed; Hugging Face's compute a loss only if they are given labels."
    if isinstance(loss, Number) or hasattr(loss, "item"):
        return "pass the tensor itself, and take loss.item() only to print it: a number has no gradient."
    if hasattr(loss, "loss") or (isinstance(loss, Mapping) and "loss" in loss):
        return "pass the tensor in it, such as output.loss."
    return "pass the tensor that the model or the loss function returned."


def refuse_no_weight(weight: float) -> None:
    """Raise StepError for a sum of weights that is 0."""
    if weight <= 0:
        raise StepError(
            "the weights of all losses of this step are zero on all ranks, so their mean does not exist. "
            "Remedy: leave out steps without a token, or pass a positive weight."
        )


def weight_of(weight: Any) -> float:
    """Return the weight of a loss as a float. Raises StepError unless it is a finite number that is not negative."""
    try:
        value = float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StepError(
            f"the weight of a loss must be a number, got {_shown(weight)} ({error}). Remedy: pass one number for the "
            "micro-batch, such as mask.sum()."
        ) from None
    if not math.isfinite(value) or value < 0:
        raise StepError(UNUSABLE_WEIGHT.format(value))
    return value
