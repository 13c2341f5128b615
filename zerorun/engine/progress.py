"""How far a training has come."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.parse import Config
from .accumulation import Accumulation


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
