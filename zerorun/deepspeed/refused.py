"""Names that programs import at their top, and use only if their own configuration asks for it: the use is refused."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError, ConfigProblem


class CurriculumScheduler:
    """``deepspeed.runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler``. Raises ConfigError where it is made."""

    def __init__(self, config: Any) -> None:
        reason = "data efficiency is not built."
        remedy = "Leave it out, and choose in the dataset or its sampler what is learned when."
        raise ConfigError([ConfigProblem("curriculum_learning", config, reason, remedy)], "CurriculumScheduler()")
