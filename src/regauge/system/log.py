"""Verbs' terminal output: log lines for people, one JSON document for machines.

Log lines go to standard error, so that standard output contains only the answer.
"""

from __future__ import annotations

import datetime as dt
import errno
import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from regauge.system.files import format_json

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminal(Console):
    """A console that prints texts as they are, and discards output once its terminal is closed.

    The command then stops at SIGHUP like at any other signal, instead of failing at the next line.
    """

    has_document = False
    """Whether the command has printed its JSON document."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)  # `file.py:100:` is not an emoji

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.file.fileno())
            os.close(null)


stderr = Terminal(stderr=True, soft_wrap=True)
stdout = Terminal(soft_wrap=True)
logger = logging.getLogger("regauge")
logger.addHandler(logging.NullHandler())
PROGRESS_INTERVAL_SECONDS = 10.0
"""Pause between progress lines if standard error is not a terminal."""


class _LineHandler(logging.Handler):
    """Prints a log record as one line; warnings and errors begin with their level."""

    shows_times = False
    """Whether every line begins with time and level."""

    def emit(self, record: logging.LogRecord) -> None:
        style = {"WARNING": "yellow", "ERROR": "red"}.get(record.levelname, "")
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        if self.shows_times:
            time = dt.datetime.fromtimestamp(record.created, dt.UTC)
            prefix = f"{time.isoformat(timespec='milliseconds')} {record.levelname} "
        stderr.print(prefix + record.getMessage(), style=style, markup=False)


def configure(*, quiet: bool = False) -> None:
    """Send the log lines of this process to standard error.

    `quiet` drops all lines except warnings and errors.
    """
    stdout.has_document = False
    logger.handlers[:] = [_LineHandler()]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False


def show_times() -> None:
    """Begin each log line on standard error with time and level."""
    for handler in logger.handlers:
        if isinstance(handler, _LineHandler):
            handler.shows_times = True


def is_interactive() -> bool:
    """Return whether standard error is a terminal; only a terminal shows live progress."""
    return stderr.is_terminal and not _embedding.is_active


def print_line(line: str) -> None:
    """Print a line to standard error; log it if a Python program called the verb."""
    if _embedding.is_active:
        logger.info(line)
    else:
        stderr.print(line, markup=False)


def is_embedded() -> bool:
    """Return whether a Python program called the verb, so that output goes to the logger."""
    return _embedding.is_active


@contextmanager
def embed(*, verbose: bool) -> Iterator[None]:
    """Run a verb for a Python program: no output except log records.

    With `verbose`, results are printed and log lines go to standard error.
    """
    before = (_embedding.is_active, stdout.quiet, logger.level, logger.propagate)
    handler = _LineHandler()
    _embedding.is_active, stdout.quiet = True, not verbose
    if verbose and not any(isinstance(known, _LineHandler) for known in logger.handlers):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        _embedding.is_active, stdout.quiet, level, logger.propagate = before
        logger.setLevel(level)


class _Embedding:
    """Whether a Python program called the verb running in this process."""

    is_active = False


_embedding = _Embedding()


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document to standard output."""
    print_text(format_json(document, indent=2, sort_keys=True, default=str) + "\n")
    stdout.has_document = True


def print_text(text: str) -> None:
    """Print text to standard output, unless a Python program wants no output."""
    if not stdout.quiet:
        sys.stdout.write(text)
        sys.stdout.flush()
