"""Every way a verb can end, as an exception with its exit code.

A message is one line: what is wrong, then what to do. Nothing here knows how it is printed.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

SHOW_TRACEBACK = "--traceback"

PACKAGE = Path(__file__).parent
INTERRUPTED = 130
"""The exit code after Ctrl-C where nothing was saved, as shells have it."""
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""What the system says of a place that nobody should have named."""


class RegaugeError(Exception):
    """A failure with a way out: `problem` says what is wrong, `remedy` what to do about it."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Let another process have both parts: the message alone does not make an error again."""
        return type(self), (self.problem, self.remedy)

    def within(self, where: str) -> Self:
        """Return this error with the place it happened in before its problem."""
        self.problem = f"{where}: {self.problem}"
        self.args = (f"{self.problem}; {self.remedy}",)
        return self


class SettingsError(RegaugeError):
    """The command line, the run file or a combination of settings is wrong."""

    exit_code = 2


class DataError(RegaugeError):
    """The user's data or code is wrong: empty, undecodable, outside the declared limits."""

    exit_code = 64


class NoCheckpointError(RegaugeError):
    """Checkpoints exist, and none of them can be loaded."""

    exit_code = 65


class NoProgressError(RegaugeError):
    """The run cannot go on: it fails in the same place, or compiles without end."""

    exit_code = 66


class RollBackError(NoProgressError):
    """Steps that must not count: the run goes back to its last checkpoint, once."""


class LimitReachedError(RegaugeError):
    """The run stopped at a limit of time or dollars, and saved."""

    exit_code = 67


class DifferenceError(RegaugeError):
    """Runs that should have come to the same did not, by more than the band and their noise."""

    exit_code = 68


class NotShownError(RegaugeError):
    """Whether runs came to the same cannot be said: they are not comparable, or not measured."""

    exit_code = 69


class TransientError(RegaugeError):
    """Something outside of the run failed that may work the next time: storage, network."""

    exit_code = 75


class DeviceError(TransientError):
    """A device computed something else than it should have."""


class PreflightError(RegaugeError):
    """This machine is not fit to start the run."""

    exit_code = 76


class PreemptedError(RegaugeError):
    """The run was told to stop, and saved."""

    exit_code = 143


class ChildError(RegaugeError):
    """A process that was started here ended with a code of its own; the line says why."""

    def __init__(self, exit_code: int, line: str) -> None:
        problem, _, remedy = line.rpartition("; ")
        super().__init__(problem or remedy, remedy if problem else "")
        self.args = (line,)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.exit_code, *self.args)


def explain(error: BaseException) -> tuple[str, int]:
    """Return the one line for an error that ended a verb, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped; run the same command again and it continues", INTERRUPTED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" at {error.filename}" if error.filename else ""
        error = TransientError(
            f"no space left on the disk{where}", "free some and run the same command again"
        )
    if isinstance(error, OSError) and error.errno in UNUSABLE and error.filename:
        problem = f"{error.filename} cannot be used: {error.strerror}"
        error = SettingsError(problem, "name another place, or see who may use it")
    if isinstance(error, RegaugeError):
        return _one_line(str(error)), error.exit_code
    what = _one_line(str(error)) or "no message"
    remedy = f"run again with {SHOW_TRACEBACK} to see all of it"
    return f"{type(error).__name__} in {_place(error)}: {what}; {remedy}", 1


def find_refusal(check: Callable[[], object]) -> dict[str, str]:
    """Return what a dry run answers for a check of its output folder that fails, else nothing."""
    try:
        check()
    except RegaugeError as error:
        return {"would_refuse": str(error)}
    return {}


def plain(error: object) -> str:
    """Return the first line of what an error says, or its kind where it says nothing."""
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _place(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of Regauge, or of the innermost one of all."""
    walked = traceback.walk_tb(error.__traceback__)
    places = [(Path(frame.f_code.co_filename), line) for frame, line in walked]
    ours = [
        (path.relative_to(PACKAGE.parent), line)
        for path, line in places
        if path.is_relative_to(PACKAGE)
    ]
    path, line = (ours or places)[-1]
    return f"{path}:{line}"
