"""Settings under which ranks compute with other values than one process on purpose, so that nothing can be verified."""

from __future__ import annotations

from ..config.parse import Config
from ..errors import ConfigError, ConfigProblem

_KEYS = {
    "zero_quantized_weights": 3,
    "zero_quantized_nontrainable_weights": 3,
    "zero_quantized_gradients": 1,
}  # from this stage on


def refuse_lossy(config: Config) -> None:
    """Raise ConfigError if ``config`` lets ranks send rounded values."""
    zero = config.zero_optimization
    wrong = [key for key, stage in _KEYS.items() if getattr(zero, key) and zero.stage >= stage]
    reason = "ranks compute with rounded values then, and one process does not: no value could be compared."
    remedy = "Set it to false for the verification; what it changes is in docs/configuration.md."
    if wrong:
        raise ConfigError([ConfigProblem(f"zero_optimization.{key}", True, reason, remedy) for key in wrong])
