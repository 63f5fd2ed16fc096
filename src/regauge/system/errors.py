"""Exceptions that end a verb, each with an exit code.

A message is one line: the problem, a semicolon, the remedy. `cli` prints it.
"""

from __future__ import annotations

import errno
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

SHOW_TRACEBACK = "--traceback"
ERROR_PREFIX = "regauge: "
"""Start of the line a command prints for an error."""

PACKAGE = Path(__file__).parents[1]
FIRST_SIGNAL_CODE = 128
"""After a signal, the exit code is this plus the signal number, as in shells."""
INTERRUPTED = FIRST_SIGNAL_CODE + signal.SIGINT
"""Exit code after Ctrl-C."""
UNUSABLE_PATH_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""System errors for a path the user cannot use."""
LINK_LOOP = "Symlink loop from "
"""Message of the RuntimeError raised by `Path.resolve` before Python 3.13."""
ESCAPES = {code: repr(chr(code))[1:-1] for code in (*range(32), 127)}
"""Control characters of quoted values as they are shown."""
WRONG_KIND_ERRNOS = (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENXIO)
"""System errors for the wrong kind of path, such as a folder for a file."""


class RegaugeError(Exception):
    """A failure with a `problem`, which describes it, and a `remedy`, which is an instruction."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = _join_lines(problem)
        self.remedy = _join_lines(remedy)
        super().__init__(f"{self.problem}; {self.remedy}")

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Pickle both parts; the message alone cannot rebuild the error."""
        return type(self), (self.problem, self.remedy)

    def add_location(self, location: str) -> Self:
        """Put a location in front of the problem and return this error."""
        self.problem = f"{location}: {self.problem}"
        self.args = (f"{self.problem}; {self.remedy}",)
        return self


class SettingsError(RegaugeError):
    """The command line, the run file or a combination of settings is invalid."""

    exit_code = 2


class DataError(RegaugeError):
    """The user's data or code is invalid: empty, undecodable, or outside the declared limits."""

    exit_code = 64


class NoCheckpointError(RegaugeError):
    """Checkpoints exist, but none can be loaded."""

    exit_code = 65


class NoProgressError(RegaugeError):
    """The run cannot continue: it fails at the same step again, or recompiles without end."""

    exit_code = 66


class RollbackError(NoProgressError):
    """Steps must be discarded: the run returns to the last checkpoint, once."""


class LimitReachedError(RegaugeError):
    """The run reached a limit of time, tokens or dollars and saved a checkpoint."""

    exit_code = 67


class DifferenceError(RegaugeError):
    """Compared runs differ by more than the tolerance and their noise floor."""

    exit_code = 68


class UndecidedError(DifferenceError):
    """The gate needs more evaluation rows to decide on a model."""

    exit_code = 70


class InconclusiveError(RegaugeError):
    """A comparison is inconclusive: the runs are not comparable, or not measured."""

    exit_code = 69


class TransientError(RegaugeError):
    """An external failure that a retry may fix, such as storage or network."""

    exit_code = 75


class DeviceError(TransientError):
    """A device computed a wrong result."""


class PreflightError(RegaugeError):
    """The pre-flight checks failed: this machine cannot start the run."""

    exit_code = 76


class PreemptedError(RegaugeError):
    """The run received a stop signal and saved a checkpoint."""

    exit_code = FIRST_SIGNAL_CODE + signal.SIGTERM

    def __init__(self, problem: str, remedy: str, number: int = signal.SIGTERM) -> None:
        super().__init__(problem, remedy)
        self.exit_code = FIRST_SIGNAL_CODE + number


class StopSignalError(KeyboardInterrupt):
    """A signal stopped the command; the same command resumes.

    It is not a `RegaugeError`, so code that handles failures does not continue after it.
    """

    def __init__(self, number: int) -> None:
        super().__init__("stopped by a signal; run the command again to resume")
        self.number = number
        self.exit_code = FIRST_SIGNAL_CODE + number


class ChildError(RegaugeError):
    """A child process failed; this error passes on the exit code and message."""

    def __init__(self, exit_code: int, line: str) -> None:
        line = line.removeprefix(ERROR_PREFIX)
        problem, _, remedy = line.rpartition("; ")
        super().__init__(problem or remedy, remedy if problem else "")
        self.args = (line,)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.exit_code, *self.args)


RESTART_CODES = (TransientError.exit_code, PreflightError.exit_code, PreemptedError.exit_code)
"""Exit codes after which a scheduler restarts a job, perhaps on other machines."""


class ErrorReport(NamedTuple):
    """Message and exit code of an exception that ended a verb."""

    line: str
    """One line: the problem, a semicolon, the remedy."""
    code: int

    def to_document(self) -> dict[str, str | int]:
        """Return JSON."""
        problem, _, remedy = self.line.rpartition("; ")
        return {"error": problem or remedy, "remedy": remedy if problem else "", "code": self.code}


def describe_error(error: BaseException) -> ErrorReport:
    """Return the one-line message and exit code for an exception that ended a verb."""
    if isinstance(error, StopSignalError):
        return ErrorReport(str(error), error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return ErrorReport("interrupted; run the same command again to continue", INTERRUPTED)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        location = f" at {error.filename}" if error.filename else ""
        error = TransientError(
            f"no space left on the disk{location}", "free some and run the same command again"
        )
    if isinstance(error, OSError) and error.filename:
        error = _convert_path_error(error)
    if isinstance(error, RuntimeError) and str(error).startswith(LINK_LOOP):
        error = SettingsError(str(error), "remove that link")
    if isinstance(error, RegaugeError):
        return ErrorReport(str(error), error.exit_code)
    message = _join_lines(str(error)) or "no message"
    remedy = f"run again with {SHOW_TRACEBACK} to see the traceback"
    location = f"{type(error).__name__} in {_find_code_location(error)}"
    return ErrorReport(f"{location}: {message}; {remedy}", 1)


def _convert_path_error(error: OSError) -> Exception:
    """Return an error about a path that cannot be used as a SettingsError, any other unchanged."""
    path = error.filename2 or error.filename
    problem = f"{path} cannot be used: {error.strerror}"
    if error.errno in UNUSABLE_PATH_ERRNOS:
        return SettingsError(problem, "name another path, or change its permissions")
    if error.errno in WRONG_KIND_ERRNOS:
        return SettingsError(problem, "remove it, or name another path")
    return error


def find_refusal(check: Callable[[], object]) -> dict[str, Any]:
    """Return the entries `error` and `code` of a dry run if a check fails, otherwise nothing."""
    try:
        check()
    except RegaugeError as error:
        return {"error": str(error), "code": error.exit_code}
    return {}


def first_line(error: object) -> str:
    """Return the first line of an error's message, or the error's type if there is none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _join_lines(text: str) -> str:
    """Return a text as one printable line."""
    return " ".join(text.split()).translate(ESCAPES)


def _find_code_location(error: BaseException) -> str:
    """Return `file:line` of the innermost frame in Regauge, or else of the innermost frame."""
    frames = traceback.walk_tb(error.__traceback__)
    locations = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    in_package = [
        (path.relative_to(PACKAGE.parent), line)
        for path, line in locations
        if path.is_relative_to(PACKAGE)
    ]
    path, line = (in_package or locations)[-1]
    return f"{path}:{line}"
