"""The curvature that Sophia divides by: backwards of its own, whose gradients are no part of a step.

[Note: estimates of curvature]
Sophia-G (arXiv:2305.14342) squares the gradient of the mean loss against labels that are drawn from what the model
predicts. The mean is over all ranks and micro-batches, and is complete before it is squared. An estimate is therefore that
of ``gradient_accumulation_steps`` backwards, or of those that were given when the step ends. Until then its gradients are
kept beside those of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..errors import NonFiniteError, StepError
from ..log import is_rank_zero, logger, warn_once
from ..ops.single_pass import Sophia
from ..zero.gradient_sets import OtherGradients
from ..zero.norm import Told
from ..zero.placeholders import explained_reads
from .accumulation import Accumulation, ScaledBackward, counted_ranks, refuse_no_weight, running, weight_of
from .tracing import Tracing


@dataclass
class CurvatureEstimates:
    """The estimate that is being made. ``interval``: an estimate is due in one of so many steps."""

    interval: int
    gradients: OtherGradients
    backwards: int = 0  # of the estimate
    weight: float = 0.0  # of their losses, if these have weights
    modes: set[str] = field(default_factory=set)  # how their losses are to be averaged
    last: int | None = None  # the number of steps before the last estimate
    without: int = 0  # steps since then, or since the engine was made

    def take_loss(self, weight: Any, *, scale_wrt_gas: bool) -> float:
        """Return by what the loss is to be multiplied, its weight. Raises StepError if losses are averaged differently."""
        mode = "weight" if weight is not None else "mean" if scale_wrt_gas else "sum"
        if self.modes - {mode}:
            raise StepError(
                "backward(curvature=True) was called with different ways to average losses (weight=, scale_wrt_gas=) "
                "within one estimate. Remedy: call it the same way for all micro-batches of a step."
            )
        value = 1.0 if weight is None else weight_of(weight)
        self.modes.add(mode)
        self.backwards += 1
        self.weight += 0.0 if weight is None else value
        return value

    def divisor(self, ranks: int, weight: float) -> float:
        """Return what summed gradients are divided by. ``ranks``: data-parallel ones; ``weight``: the sum over ranks."""
        if "weight" in self.modes:
            refuse_no_weight(weight)
            return weight
        return ranks * (1 if "sum" in self.modes else self.backwards)

    def forget(self) -> None:
        """The estimate is over."""
        self.backwards, self.weight = 0, 0.0
        self.modes.clear()

    def begin_anew(self, interval: int) -> None:
        """Other weights have been loaded: what is known of estimates so far was of those before."""
        self.gradients.forget()
        self.forget()
        self.interval, self.last, self.without = interval, None, 0

    def taken(self, steps: int) -> None:
        """The estimate was given to the optimizer after so many steps."""
        self.last, self.without = steps, 0

    def is_missed(self) -> bool:
        """Count a step. True if more than one estimate that was due has not come."""
        self.without += 1
        return self.without > 2 * self.interval


class CurvatureTaking(Tracing):
    """The part of an engine that takes curvatures."""

    accumulation: Accumulation

    def is_curvature_due(self) -> bool:
        """True if ``backward(loss, curvature=True)`` is due before the step that begins: once in ``update_interval`` steps.

        False for all optimizers but Sophia. It stays True until the estimate is complete.
        """
        estimates = self._estimates
        if estimates is None:
            return False
        return self.global_steps % estimates.interval == 0 and estimates.last != self.global_steps

    @cached_property
    def _estimates(self) -> CurvatureEstimates | None:
        """None if the optimizer takes no curvature."""
        if self.sharded is None or not isinstance(self.sharded.optimizer, Sophia):
            return None
        return CurvatureEstimates(_interval(self.sharded.optimizer), OtherGradients(self.sharded_model))

    def _load(self, load: Callable[[], tuple[Path | None, dict[str, Any]]]) -> tuple[Path | None, dict[str, Any]]:
        found = super()._load(load)
        if found[0] is not None and self._estimates is not None and self.sharded is not None:
            self._estimates.begin_anew(_interval(self.sharded.optimizer))
        return found

    def _take_curvature(self, loss: torch.Tensor, weight: Any, *, scale_wrt_gas: bool, retain_graph: bool) -> torch.Tensor:
        """The backward of a loss against sampled labels; see ``Engine.backward``."""
        estimates = self._estimates
        if estimates is None:
            name = type(self.sharded.optimizer).__name__ if self.sharded is not None else "None"
            raise StepError(
                f"backward(curvature=True) is for Sophia, and the optimizer is {name}. Remedy: leave it out, ask "
                'engine.is_curvature_due() first, or set optimizer.type to "Sophia".'
            )
        scale = self.loss_scale
        factor = scale * estimates.take_loss(weight, scale_wrt_gas=scale_wrt_gas)
        try:
            with running.inside(ScaledBackward(scale)), estimates.gradients.in_use(), explained_reads(lambda: None):
                (loss * factor if factor != 1.0 else loss).backward(retain_graph=retain_graph)
                if estimates.backwards >= self.accumulation.batch.accumulation:
                    self._finish_estimate(estimates)
        except BaseException:
            estimates.forget()  # its gradients are gone
            raise
        return loss.detach()

    def _end_curvature(self, estimates: CurvatureEstimates) -> None:
        """A step is about to end: an estimate that has fewer backwards than the step is as good as it gets."""
        if estimates.backwards:
            with estimates.gradients.in_use():
                self._finish_estimate(estimates)
        if estimates.is_missed():
            warn_once(
                f"Sophia has had no curvature for over {2 * estimates.interval} steps; without any, it only follows the "
                "sign of its momentum. Remedy: while engine.is_curvature_due(), compute a loss against "
                "zerorun.sampled_labels(logits) and call engine.backward(loss, curvature=True)."
            )

    def _finish_estimate(self, estimates: CurvatureEstimates) -> None:
        """Average the squared gradients, which are in use, into the optimizer's state, and drop them."""
        assert self.sharded is not None
        self.settle()  # what the last step made may have to be taken back first
        try:
            self.sharded_model.reduce()
            summary = self.sharded_model.norm(Told(weight=estimates.weight, must_know=True))
            ranks = counted_ranks(self.config, self.topology)
            unscale = 1.0 / (estimates.divisor(ranks, float(summary.weight)) * self.loss_scale)
            decision = self.sharded_model.decide(summary, unscale, 0.0)
            if decision.outcome.finite:
                self.sharded.take_curvature(float(decision.coefficient), unused=summary.unused)
                estimates.taken(self.global_steps)
            else:
                self._refuse_curvature()
        finally:
            estimates.gradients.drop()
            estimates.forget()

    def _refuse_curvature(self) -> None:
        """Gradients of an estimate are not finite. In fp16 those of the next one may be."""
        if not self.config.scales_loss:
            raise NonFiniteError(
                f"gradients of the curvature are NaN or infinite at step {self.global_steps + 1}. Weights and curvature "
                "are those before it. Remedy: look at the data of this step, or lower the learning rate."
            )
        if is_rank_zero():
            logger.warning(
                "the curvature before step %d was left out: its gradients overflow in fp16 at a loss scale of %.10g",
                self.global_steps + 1,
                self.loss_scale,
            )


def _interval(sophia: torch.optim.Optimizer) -> int:
    """An estimate is due in one of so many steps."""
    return min(group["update_interval"] for group in sophia.param_groups)
