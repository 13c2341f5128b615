"""What comes of steps: how far the training is, and of each whether it is applied or skipped, or why it cannot go on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..config.parse import Config
from ..errors import LossScaleError, NonFiniteError, StepError
from ..log import is_rank_zero, logger
from ..optim.loss_scaler import LossScaler
from ..zero.gradients import not_finite
from ..zero.sharded_model import Summary
from .accumulation import Accumulation
from .queries import LoopQueries
from .reports import Reports

# How far losses may differ, relatively, that are computed from the same activations.
_APART = 1e-4
# After so many steps in a row without finite gradients training in bf16 ends: no loss scale can mend it.
SKIPS_IN_A_ROW = 3
# In fp16 so many skipped steps in a row have a line each; after that, one of so many has.
SKIPS_TOLD, SKIPS_BETWEEN = 10, 100


@dataclass
class Progress:
    """``global_steps``: steps at an accumulation boundary, those that were skipped included. ``grad_norm``: of the last
    step that was applied; None before the first."""

    global_steps: int = 0
    skipped_steps: int = 0
    skips_in_a_row: int = 0
    grad_norm: float | None = None
    applied: bool = False  # the last step() changed the weights

    def begin(self) -> None:
        """A step() that has not changed the weights yet."""
        self.applied = False

    def count(self) -> None:
        """A step at an accumulation boundary."""
        self.global_steps += 1

    def go_on_from(self, global_steps: int, skipped_steps: int) -> None:
        """Counts of a run that came before."""
        self.global_steps, self.skipped_steps = global_steps, skipped_steps

    def skip(self) -> None:
        """A step was not applied."""
        self.skipped_steps += 1
        self.skips_in_a_row += 1

    def apply(self, grad_norm: float) -> None:
        """A step was."""
        self.grad_norm, self.applied, self.skips_in_a_row = grad_norm, True, 0


class Counters:
    """The counts of an engine, as loops read and set them."""

    config: Config
    progress: Progress
    accumulation: Accumulation

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, those that were skipped included."""
        return self.progress.global_steps

    @global_steps.setter
    def global_steps(self, count: int) -> None:
        self.progress.go_on_from(count, self.skipped_steps)

    @property
    def skipped_steps(self) -> int:
        """Those that left the weights as they were: gradients were not finite."""
        return self.progress.skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.progress.go_on_from(self.global_steps, count)

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        return self.accumulation.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self.accumulation.go_on_from(count)

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of the averaged, unclipped gradient of the last step that was applied; the same on all ranks.

        A skipped step leaves it as it was. None before the first.
        """
        return self.progress.grad_norm

    def was_step_applied(self) -> bool:
        """True if the last step() changed the weights."""
        return self.progress.applied

    def counters(self) -> dict[str, int]:
        """What a checkpoint keeps of the progress."""
        return {name: getattr(self, name) for name in ("global_steps", "micro_steps", "skipped_steps")}

    def set_counters(self, counters: dict[str, int]) -> None:
        """Go on from ``counters``. Micro-batches are counted anew if a step has another number of them now."""
        found = self.counters() | counters
        self.progress.go_on_from(found["global_steps"], found["skipped_steps"])
        each, micro_steps = self.config.gradient_accumulation_steps, found["micro_steps"]
        self.accumulation.go_on_from(self.global_steps * each if micro_steps % each else micro_steps)


class Outcomes(Reports, Counters, LoopQueries):
    """The part of an engine that says what became of a step."""

    scaler: LossScaler

    def zero_grad(self) -> None:
        """Gradients are forgotten by step(); this drops those that are not stepped yet."""
        self.sharded_model.finish_reductions()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self.sharded_model.forget_gradients()
        self.accumulation.begin()

    def _refuse_losses(self, summary: Summary) -> None:
        assert self.sharded is not None
        if summary.bad_losses:
            self.sharded.tell_overflow(True)
            raise NonFiniteError(self._explain("the loss is NaN or infinite", self.accumulation.bad_losses))
        if summary.apart > _APART:
            raise StepError(
                f"ranks of one tensor-parallel group had different losses at step {self.global_steps}: they saw different "
                "data, or drew different random numbers. Weights are those before this step. Remedy: choose data by "
                "engine.topology.data_parallel_rank, not by the rank of the world, and seed all ranks of a group alike."
            )

    def _skip(self) -> None:
        """Gradients are not finite: leave the weights as they are, or stop where nothing would mend it."""
        self.progress.skip()
        in_a_row = self.progress.skips_in_a_row
        if self.scaler.dynamic:
            return
        if self.config.bf16.enabled and self.config.bf16.check_grad_overflow and in_a_row < SKIPS_IN_A_ROW:
            if is_rank_zero():
                what = "step %d skipped: gradients are NaN or infinite; %d such steps in a row are an error"
                logger.warning(what, self.global_steps, SKIPS_IN_A_ROW)
            return
        names = not_finite(self.units)
        raise NonFiniteError(self._explain("gradients are NaN or infinite", self.accumulation.empty, names))

    def _update_scale(self, *, overflow: bool) -> None:
        before = self.scaler.scale
        try:
            self.scaler.update(overflow)
        except LossScaleError as error:
            found = sorted(
                (micro, rank, name)
                for rank, culprits in enumerate(self.comm.control.values(self.accumulation.culprits))
                for micro, name in culprits
            )
            where = "none was found in the gradients of a single rank: the sum over ranks overflows."
            if found:
                micro, rank, name = found[0]
                where = f"first in parameter {name!r} on rank {rank} in micro-batch {micro} of this step."
            raise LossScaleError(
                f"{error} Non-finite values: {where} Weights are those before this step and can be saved."
                f"{self._hint_of_placeholders()} Remedy: train in bf16, or lower the learning rate; fp16 rarely works for "
                "weights made in bf16."
            ) from None
        count = self.progress.skips_in_a_row
        told = count <= SKIPS_TOLD or count % SKIPS_BETWEEN == 0
        if overflow and told and is_rank_zero():
            what = "step %d skipped (%d in a row): gradients overflow in fp16; loss scale %.10g -> %.10g"
            logger.warning(what, self.global_steps, count, before, self.scaler.scale)

    def _explain(self, what: str, micro_batches: list[int], names: Sequence[str] = ()) -> str:
        """A message that is the same on all ranks: the first that saw it, and the parameters concerned, if that is known.

        ``micro_batches``: that had a bad loss; those that are known to weigh nothing if there are ``names``.
        """
        answers = self.comm.control.values((micro_batches, names))
        seen = [(rank, found[0]) for rank, (found, _) in enumerate(answers) if found]
        bad = list(dict.fromkeys(name for _, found in answers for name in found))
        where = f" in {_listed(bad)}" if bad else ""
        hint = ""
        if seen and bad:
            hint = (
                f" Rank {seen[0][0]} gave micro-batch {seen[0][1]} a weight of 0 and a loss that is not finite: divide by "
                "mask.sum().clamp(min=1), so that a mean of nothing has a gradient of 0."
            )
        elif seen:
            where = f", first on rank {seen[0][0]} in micro-batch {seen[0][1]} of this step"
        return (
            f"{what} at step {self.global_steps}{where}. Weights are those before this step."
            f"{hint}{self._hint_of_placeholders()} Remedy: look at the data of this step, lower the learning rate, or clip "
            "gradients."
        )

    def _hint_of_placeholders(self) -> str:
        if not self.plan.shares_params:
            return ""
        return " A stage-3 parameter used outside its module's forward reads as NaN, too."

    def _print_progress(self) -> None:
        every = self.config.steps_per_print
        if every and math.isfinite(every) and self.global_steps % int(every) == 0 and self.topology.rank == 0:
            rates = ", ".join(f"{rate:.3e}" for rate in self.get_lr())
            scale = f", loss scale {self.scaler.scale:g}" if self.scaler.dynamic else ""
            logger.info("step %d, skipped %d, lr %s%s", self.global_steps, self.skipped_steps, rates, scale)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(repr(name) for name in names[:3])}{more}"
