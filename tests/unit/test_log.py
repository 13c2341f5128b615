"""Whose handlers get the lines of zerorun, and at which levels."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zerorun.log import logger, setup_logging


@contextmanager
def new_program() -> Iterator[io.StringIO]:
    """Loggers are as in a program that has configured nothing. Returns a stream for its handlers.

    No fixture: pytest gives the root handlers when the test itself begins.
    """
    root = logging.getLogger()
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in (root, logger)]
    for each, *_ in before:
        each.handlers, each.propagate = [], True
    root.setLevel(logging.WARNING)
    logger.setLevel(logging.NOTSET)
    try:
        yield io.StringIO()
    finally:
        for each, level, propagate, handlers in before:
            each.setLevel(level)
            each.propagate, each.handlers = propagate, handlers


def said(lines: io.StringIO) -> list[str]:
    setup_logging()
    setup_logging()
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "%s", logging.getLevelName(level))
    return lines.getvalue().split()


@pytest.mark.parametrize(
    ("root", "own", "wanted"),
    [
        (logging.WARNING, logging.NOTSET, ["INFO", "WARNING", "ERROR"]),  # basicConfig() and no more
        (logging.INFO, logging.NOTSET, ["INFO", "WARNING", "ERROR"]),
        (logging.DEBUG, logging.NOTSET, ["DEBUG", "INFO", "WARNING", "ERROR"]),
        (logging.ERROR, logging.NOTSET, ["ERROR"]),
        (logging.WARNING, logging.WARNING, ["WARNING", "ERROR"]),
        (logging.ERROR, logging.INFO, ["INFO", "WARNING", "ERROR"]),
    ],
)
def test_handlers_of_the_root_get_what_its_level_does_not_keep_back(root: int, own: int, wanted: list[str]) -> None:
    with new_program() as lines:
        logging.basicConfig(stream=lines, level=root, format="%(message)s")
        logger.setLevel(own)
        assert said(lines) == wanted
        assert not logger.handlers, "lines would come twice"


def test_a_handler_of_its_own() -> None:
    with new_program() as lines:
        logger.addHandler(logging.StreamHandler(lines))
        assert said(lines) == ["INFO", "WARNING", "ERROR"]


def test_a_handler_may_have_a_level() -> None:
    with new_program() as lines:
        handler = logging.StreamHandler(lines)
        handler.setLevel(logging.ERROR)
        logging.getLogger().addHandler(handler)
        assert said(lines) == ["ERROR"]


def test_a_program_that_configures_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with new_program() as lines:
        assert said(lines) == []
        found = capsys.readouterr().err
    assert found == "[zerorun rank 0] INFO: INFO\n[zerorun rank 0] WARNING: WARNING\n[zerorun rank 0] ERROR: ERROR\n"
