"""transformers: ``Trainer(args=TrainingArguments(deepspeed="ds.json"), callbacks=[ZerorunCallback()])`` trains by zerorun.

Importing this module begins the DeepSpeed mode, because accelerate, on which Trainer stands, finds out at its own import
whether there is a DeepSpeed. So import it before transformers.
"""

from __future__ import annotations

from typing import Any

from ..deepspeed.activation import activate

activate()

from transformers import TrainerCallback  # noqa: E402  transformers must find the mode

from ..deepspeed.entry import newest_engine  # noqa: E402
from ..log import info_once  # noqa: E402


class ZerorunCallback(TrainerCallback):  # type: ignore[misc]
    """Shows what the engine knows and Trainer does not ask for.

    At the beginning it logs the effective configuration and the memory by kind. To each line of Trainer's log it adds
    ``skipped_steps`` and, in fp16, ``loss_scale``. Nothing is added where Trainer runs without an engine.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        engine = newest_engine()
        if engine is not None:
            info_once(f"{engine.config.describe()}\n{engine.memory_report()}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **unused: Any) -> None:
        engine = newest_engine()
        if engine is None or logs is None or "loss" not in logs:
            return
        scale = {"loss_scale": engine.loss_scale} if engine.config.scales_loss else {}
        more = {"skipped_steps": engine.skipped_steps, **scale}
        logs |= more
        if state.log_history:  # Trainer has copied the line already
            state.log_history[-1].update(more)
