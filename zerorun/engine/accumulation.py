"""Accumulation: the micro-batches of the step that is going on, their losses, and where the step ends.

[Note: one divisor]
Gradients are summed as they come and divided once, in ``step``: by the data-parallel size and the accumulation steps,
or by the total weight if losses came with weights, and by the loss scale. Nothing is divided on the way, so all stages
round alike, and a loss may reach the parameters by any path.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..config.parse import Config
from ..distributed.transport.communicator import Communicator
from ..errors import StepError
from ..log import warn_once
from ..optim.loss_scaler import LossScaler
from ..zero.sharded_model import Told
from ..zero.unit import Unit
from .label_counts import LabelCounts
from .loss_given import weight_of

_MODES = {"weight": "a weight", "mean": "a loss to be averaged", "sum": "scale_wrt_gas=False", None: ""}


class Accumulation:
    """Of one rank. Also what the runtime asks and tells about backwards."""

    def __init__(self, config: Config, comm: Communicator, scaler: LossScaler) -> None:
        self.micro_steps = 0  # step() calls so far
        self._config, self._comm, self._scaler = config, comm, scaler
        self._given_boundary: bool | None = None  # by the loop
        self._in_no_sync = False
        self._is_last: bool | None = None  # of the backwards of a pipeline's batch
        self._labels = LabelCounts(config.gradient_accumulation_steps * comm.topology.data_parallel_size)
        self.begin()

    def begin(self) -> None:
        """A new step begins."""
        self.backwards = 0  # since the last update
        self._steps_seen = 0  # of them, followed by a step()
        self._mode: str | None = None
        self._weight = 0.0
        self._compared = 0.0  # sum of losses, where ranks must have the same
        self.bad_losses: list[int] = []  # micro-batches, counted from 0
        self.empty: list[int] = []  # those of weight 0 whose loss is not finite: it may be a mean of nothing
        self.culprits: list[tuple[int, str]] = []  # (micro-batch, parameter) with non-finite gradients
        self._inspects = self._scaler.at_minimum

    # -- the boundary --------------------------------------------------------------------------------------------

    @property
    def is_boundary(self) -> bool:
        """True if the next step() updates the weights."""
        if self._in_no_sync:
            return False
        if self._given_boundary is not None:
            return self._given_boundary
        if not self._config.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self._config.gradient_accumulation_steps == 0

    def set_boundary(self, is_boundary: bool) -> None:
        """From now on the loop says itself which step() updates the weights."""
        self._given_boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """No step() inside updates."""
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def count_step(self) -> bool:
        """step() was called: True if it is to update the weights. Raises StepError if there is nothing to step from."""
        if self._in_no_sync:
            raise StepError("step() inside no_sync(). Remedy: call it after the block.")
        if self.backwards == self._steps_seen:
            raise StepError(
                "step() without backward(): no gradients since the last step(). "
                "Remedy: call engine.backward(loss) or loss.backward() first."
            )
        new, self._steps_seen = self.backwards - self._steps_seen, self.backwards
        boundary = self.is_boundary
        if not boundary and self._given_boundary is None and new == self._config.gradient_accumulation_steps:
            warn_once(
                f"step() after {new} backwards counts as one of gradient_accumulation_steps = {new} "
                "micro-batches, so the weights are not updated yet. If they were to be one update: call step() after every "
                "backward, or engine.set_gradient_accumulation_boundary(True) once."
            )
        self.micro_steps += 1
        return boundary

    def count_batch(self, micro_batches: int) -> None:
        """A whole batch went through a pipeline."""
        self.backwards = self._steps_seen = micro_batches
        self.micro_steps += micro_batches

    def at_micro_batch(self, number: int) -> None:
        """Losses are those of micro-batch ``number`` of the step, counted from 0."""
        self.backwards = number

    def go_on_from(self, micro_steps: int) -> None:
        """So many came before."""
        self.micro_steps = micro_steps

    # -- backwards, as the runtime sees them ---------------------------------------------------------------------

    def reduces_now(self) -> bool:
        """May gradients that accumulate be reduced in the backward that begins?"""
        if self._is_last is not None:
            return self._is_last
        return self._config.managed_gradient_accumulation and self.is_boundary

    def tell_last(self, is_last: bool) -> None:
        """Whether the next backward is the last of a pipeline's batch; from now on this is told before each."""
        self._is_last = is_last

    def inspect(self, unit: Unit) -> None:
        """Note non-finite gradients of one backward. On while the loss scale is at its minimum, before the last chance."""
        for flat_group in unit.trainable if self._inspects else ():
            for index, (name, param) in enumerate(zip(flat_group.names, flat_group.params, strict=True)):
                for gradient in (param.grad, flat_group.late.get(index)):
                    if gradient is not None and not bool(torch.isfinite(gradient).all()):
                        self.culprits.append((self.backwards, name))

    def ended(self) -> None:
        """A backward is over."""
        self.backwards += 1

    # -- losses --------------------------------------------------------------------------------------------------

    def look_at_labels(self, inputs: dict[str, Any]) -> None:
        """Of a micro-batch: see LabelCounts."""
        self._labels.look(inputs)

    def advise(self) -> None:
        """Say what is known of the losses of a step that were averaged."""
        if self._mode in (None, "mean"):
            self._labels.advise()

    def take_loss(self, weight: Any, *, scale_wrt_gas: bool) -> tuple[str, float]:
        """(how losses of this step count, the factor of the next one). Raises StepError if they do not all alike."""
        mode = "weight" if weight is not None else "mean" if scale_wrt_gas else "sum"
        if self._mode not in (None, mode):
            raise StepError(
                f"backward() was called with {_MODES[self._mode]} and then {_MODES[mode]} within one step. "
                "Remedy: call it the same way for all micro-batches of a step."
            )
        factor = self._scaler.scale
        if weight is not None:
            value = weight_of(weight)
            self._weight += value
            factor *= value
        self._mode = mode
        return mode, factor

    def compare(self, loss: float) -> None:
        """``loss`` must be that of the other ranks of the tensor group."""
        self._compared += loss if math.isfinite(loss) else 0.0

    def told(self, wishes: Sequence[bool]) -> Told:
        """What the other ranks are to know of this rank's losses."""
        return Told(len(self.bad_losses), self._weight, self._compared, wishes)

    # -- the divisor ---------------------------------------------------------------------------------------------

    def unscale(self, weight: float) -> float:
        """From accumulated to averaged, unscaled gradients. ``weight``: of all losses, on all ranks, if they have weights.

        Raises StepError if that is 0.
        """
        if self._mode == "weight":
            if weight <= 0:
                raise StepError(
                    "the weights of all losses of this step are zero on all ranks, so their mean does not exist. "
                    "Remedy: leave out steps without a token, or pass a positive weight."
                )
            return 1.0 / (weight * self._scaler.scale)
        divisor = 1 if self._mode == "sum" else self._config.gradient_accumulation_steps
        mean = self._config.gradient_allreduce_op == "mean"
        return 1.0 / (divisor * (self._comm.topology.data_parallel_size if mean else 1) * self._scaler.scale)

    def gradient_factor(self) -> float:
        """``unscale`` of the losses so far. All ranks must call it."""
        if self._mode != "weight":
            return self.unscale(0.0)
        weight = torch.tensor([self._weight if self._comm.topology.tensor_rank == 0 else 0.0], dtype=torch.float64)
        return self.unscale(float(self._comm.control.sum(weight)[0]))
