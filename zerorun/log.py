"""Logging: one logger, the rank in its formatter, and a warning that is given once."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("zerorun")
_warned: set[str] = set()


class _RankFormatter(logging.Formatter):
    """Puts the rank in front, read when a record is made, so that importing zerorun needs no process group."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = os.environ.get("RANK", "0")
        return super().format(record)


def in_bytes(count: float) -> str:
    """``count`` bytes with the largest unit that leaves at least one: "1.5 KiB"."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count:.0f} bytes"


def setup_logging(level: int = logging.INFO) -> None:
    """Give the zerorun logger a handler on stderr, unless the program configured logging itself."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_RankFormatter("[zerorun rank %(rank)s] %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def is_rank_zero() -> bool:
    """True on the one rank that speaks for the job."""
    return os.environ.get("RANK", "0") == "0"


def info_once(message: str) -> None:
    """Log ``message`` at INFO on rank 0, the first time it is given."""
    if message not in _warned and is_rank_zero():
        logger.info(message)
    _warned.add(message)


def warn_once(message: str) -> None:
    """Log ``message`` as a warning on rank 0, the first time it is given."""
    if message not in _warned and is_rank_zero():
        logger.warning(message)
    _warned.add(message)
