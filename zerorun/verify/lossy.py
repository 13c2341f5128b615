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
    wrong = [f"zero_optimization.{key}" for key, stage in _KEYS.items() if getattr(zero, key) and zero.stage >= stage]
    if config.fp8.enabled and config.fp8.enable_fsdp_float8_all_gather and zero.stage == 3:
        wrong.append("fp8.enable_fsdp_float8_all_gather")  # layers read other values, though they make the same of them
    reason = "ranks compute with rounded values then, and one process does not: no value could be compared."
    remedy = "Set it to false for the verification; what it changes is in docs/configuration.md."
    if wrong:
        raise ConfigError([ConfigProblem(key, True, reason, remedy) for key in wrong])
