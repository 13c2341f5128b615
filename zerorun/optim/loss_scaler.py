"""The loss scale that keeps fp16 gradients representable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config.parse import Config
from ..errors import LossScaleError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class LossScaler:
    """The loss scale and its state machine (Micikevicius et al. 2018, arXiv:1710.03740; keys as DeepSpeed's).

    The scale is static unless ``dynamic``. A dynamic scale: an overflow uses up one of ``hysteresis``, and when only one is
    left, every overflow halves the scale, down to ``minimum``. ``window`` clean steps, counted from the last overflow,
    double the scale and restore the hysteresis; with ``consecutive``, each clean step restores it. The last step
    of a window doubles it, as in PyTorch's GradScaler; in DeepSpeed 0.19.8 it is the step after that.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    hysteresis_left: int = 2
    steps: int = 0
    last_overflow: int = -1

    @classmethod
    def of(cls, config: Config) -> LossScaler:
        """Return the loss scale of fp16, or of autocast to fp16: that of torch.amp.GradScaler, as in DeepSpeed.

        GradScaler has no minimum. Below 1 it goes as far here as it begins above: then something else is wrong.
        """
        section = config.fp16
        if not config.scales_loss:
            return cls()
        if not section.enabled:
            return cls(2.0**16, dynamic=True, window=2000, hysteresis=1, minimum=2.0**-16, hysteresis_left=1)
        if section.loss_scale:
            return cls(scale=float(section.loss_scale))
        return cls(
            scale=float(2**section.initial_scale_power),
            dynamic=True,
            window=section.loss_scale_window,
            hysteresis=section.hysteresis,
            consecutive=section.consecutive_hysteresis,
            minimum=float(section.min_loss_scale),
            hysteresis_left=section.hysteresis,
        )

    def go_on_from(self, saved: Mapping[str, Any]) -> str:
        """Continue from the fields of a scaler that was ``saved``, if both are dynamic. Return what is to be told of it.

        What the configuration says counts: a static scale, and the limits of a dynamic one.
        """
        if not (self.dynamic and saved.get("dynamic", True)):
            return f"not its loss scale {saved['scale']:g}, but {self.scale:g} of the configuration"
        self.scale = max(saved["scale"], self.minimum)
        self.hysteresis_left = min(saved["hysteresis_left"], self.hysteresis)
        self.steps, self.last_overflow = saved["steps"], saved["last_overflow"]
        return f"loss scale {self.scale:g}"

    @property
    def at_minimum(self) -> bool:
        """True if the next overflow cannot be answered by halving."""
        return self.dynamic and self.scale <= self.minimum and (self.hysteresis == 1 or self.hysteresis_left == 1)

    def update(self, overflow: bool) -> None:
        """Account for one step. Raises LossScaleError if it overflowed at the minimum scale with no hysteresis left."""
        if not self.dynamic:
            return
        exhausted = overflow and self.at_minimum
        if overflow:
            if self.hysteresis == 1 or self.hysteresis_left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.hysteresis_left -= 1
            self.last_overflow = self.steps
        else:
            if self.consecutive:
                self.hysteresis_left = self.hysteresis
            if (self.steps - self.last_overflow) % self.window == 0:
                self.hysteresis_left = self.hysteresis
                self.scale *= 2
        self.steps += 1
        if exhausted:
            raise LossScaleError(f"gradients overflow although the loss scale is at its minimum, {self.minimum:g}.")
