"""Every way a verb can end, as an exception with its exit code.

A message is one line: what is wrong, then what to do. Nothing here knows how it is printed.
"""

from __future__ import annotations

from typing import Self

INTERRUPTED = 130
"""The exit code after Ctrl-C where nothing was saved, as shells have it."""


class RegaugeError(Exception):
    """A failure with a way out: `problem` says what is wrong, `remedy` what to do about it."""

    exit_code = 1

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy

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


class LimitReachedError(RegaugeError):
    """The run stopped at a limit of time or dollars, and saved."""

    exit_code = 67


class TransientError(RegaugeError):
    """Something outside of the run failed that may work the next time: storage, network."""

    exit_code = 75


class PreflightError(RegaugeError):
    """This machine is not fit to start the run."""

    exit_code = 76


class PreemptedError(RegaugeError):
    """The run was told to stop, and saved."""

    exit_code = 143


class ChildError(RegaugeError):
    """A process of the run ended with a code of its own, and has said why."""

    def __init__(self, exit_code: int, remedy: str) -> None:
        super().__init__(f"a process of the run ended with code {exit_code}", remedy)
        self.exit_code = exit_code
