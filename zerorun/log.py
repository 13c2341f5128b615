"""The output of zerorun: one logger, warnings that are given once, and how commands print and end."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from zerorun.errors import ZerorunError

logger = logging.getLogger("zerorun")
# The one that scripts know as DeepSpeed's. Trainers set its level to their own, by default "warning", which does not hide
# the engine's notes on the configuration.
script_logger = logging.getLogger("zerorun.deepspeed")
_warned: set[str] = set()


class _RankFormatter(logging.Formatter):
    """Adds the rank to records. It is asked for when a record is formatted, so that importing zerorun needs no group."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank = own_rank()
        return super().format(record)


def setup_logging(level: int = logging.INFO) -> None:
    """Give the zerorun logger a handler on stderr, unless the program configured logging itself.

    Then its handlers get the lines. The level WARNING of the root logger does not keep them back: ``logging.basicConfig()``
    leaves it so, and nobody would see what the configuration asks to be printed.
    """
    if logger.handlers or logging.getLogger().handlers:
        if logger.level == logging.NOTSET and logging.getLogger().level == logging.WARNING:
            logger.setLevel(level)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_RankFormatter("[zerorun rank %(rank)s] %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


def is_rank_zero() -> bool:
    """True on the one rank that speaks for the job."""
    return own_rank() == 0


def own_rank() -> int:
    """This rank's number, by the process group if there is one: a script may have made it without a launcher's RANK."""
    dist: Any = sys.modules.get("torch.distributed")  # a line of text is no reason to import torch
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))


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


# -- commands ----------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        """Print it until the reader closes the pipe, in which argparse ends by an error before Python 3.11.4."""
        open_standard_streams()
        with contextlib.suppress(BrokenPipeError):
            super().print_help(file)


def command_parser(program: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser without arguments, which prints ``epilog`` as it is and takes options by their whole names."""
    return _Parser(
        prog=program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def end_as_by_ctrl_c() -> None:
    """Let signals that end a program unwind it, so that what it began is undone."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def open_standard_streams() -> None:
    """Let closed standard streams lead nowhere, as those of daemons are: else the next files would get their numbers."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:  # Python found it closed
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def run_command(program: str, failed: int, command: Callable[[], tuple[int, Iterable[str]]]) -> int:
    """Print the lines that ``command`` returns, and return its exit status.

    An error of zerorun or of the system is printed as one line on stderr, any other exception as a traceback. In both cases
    the status is ``failed`` instead of Python's 1, which may have another meaning. Ctrl-C gives 130.
    """
    open_standard_streams()
    try:
        status, lines = command()
        print_lines(lines)
    except ZerorunError as error:
        return _fail(program, failed, str(error))
    except OSError as error:
        return _fail(program, failed, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return failed
    return status


def _fail(program: str, status: int, message: str) -> int:
    print(f"{program}: error:", printable(" ".join(message.split())), file=sys.stderr)
    return status


def print_lines(lines: Iterable[str]) -> None:
    """Print ``lines`` until the reader of stdout closes it."""
    open_standard_streams()
    try:
        for line in lines:
            print(printable(line))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits


def printable(text: str) -> str:
    """Return a line that is safe to print on a terminal, whatever names from a file are in it."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def positive(text: str) -> int:
    """Parse a command-line argument that must be a whole number of at least 1."""
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def amount(text: str) -> float:
    """Parse a command-line argument that must be a finite number from 0 on."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number from 0 on")
    return found


def above_zero(text: str) -> float:
    """Parse a command-line argument that must be a finite number above 0."""
    found = amount(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return found


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun: ``1 host``, ``3,000 hosts``. ``plural``: the ending, such as ``es`` of batches."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def listed(items: Sequence[str], most: int = 6) -> str:
    """Return ``a, b and 3 more``."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def in_bytes(count: float) -> str:
    """Return ``count`` bytes in the largest unit of which there is at least one: ``1.5 KiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(count) >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count:.0f} bytes"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
