"""DeepSpeed's classes of single monitors, for scripts that write events of their own: each is made of its section."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from ..monitors.monitor import Monitor


class _OneSection(Monitor):
    """Writes where one section of the configuration says, and has its values as attributes. Raises as Monitor does."""

    key: ClassVar[str]

    def __init__(self, section: Any) -> None:
        self._section = section
        super().__init__(SimpleNamespace(**{self.key: section}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._section, name)


class TensorBoardMonitor(_OneSection):
    """``TensorBoardMonitor(config.tensorboard)``."""

    key = "tensorboard"


class csvMonitor(_OneSection):
    """``csvMonitor(config.csv_monitor)``."""

    key = "csv_monitor"


class WandbMonitor(_OneSection):
    """``WandbMonitor(config.wandb)``."""

    key = "wandb"


class CometMonitor(_OneSection):
    """``CometMonitor(config.comet)``."""

    key = "comet"
