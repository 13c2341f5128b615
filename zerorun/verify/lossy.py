"""Settings under which ranks compute with other values than one process on purpose, so that nothing can be verified."""

from __future__ import annotations

from ..config.parse import Config
from ..errors import ConfigError, ConfigProblem

_KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")


def refuse_lossy(config: Config) -> None:
    """Raise ConfigError if ``config`` lets ranks send rounded values."""
    wrong = [key for key in _KEYS if getattr(config.zero_optimization, key) and config.zero_optimization.stage == 3]
    reason = "ranks compute with rounded weights then, and one process does not: no value could be compared."
    remedy = "Set it to false for the verification; what it changes is in docs/configuration.md."
    if wrong:
        raise ConfigError([ConfigProblem(f"zero_optimization.{key}", True, reason, remedy) for key in wrong])
