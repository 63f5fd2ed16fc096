"""Runs the schedulers' command-line clients, and converts failures to errors."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from regauge.system.children import run_tool
from regauge.system.errors import PreflightError, SettingsError, TransientError, first_line

CLIENT_SECONDS = 60.0
UNREACHABLE_PHRASES = (
    "connection refused",
    "connection timed out",
    "could not connect",
    "i/o timeout",
    "no such host",
    "unable to connect",
    "unable to contact",
    "was refused",
)
"""Phrases in client messages if the server does not answer, in lowercase."""
_LOG_LINE = re.compile(r"[EWIF]\d{4} \d{2}:\d{2}:\d{2}\.|Warning: ")
"""Prefix of kubectl log lines before the message."""


def find_client(name: str, package: str) -> str:
    """Return a client's path; raises PreflightError naming the package that contains it."""
    path = shutil.which(name)
    if path is None:
        raise PreflightError(f"'{name}' is not installed here", f"install {package}")
    return path


def run_client(
    command: Sequence[str], *, text: str | None = None, remedy: str, seconds: float = CLIENT_SECONDS
) -> str:
    """Run a client command with `text` as its input; return the standard output.

    Raises TransientError if the server is unreachable or silent. Raises SettingsError for every
    other failure, with the first line of the client's message and the remedy.
    """
    name = command[0].rpartition("/")[2]
    try:
        process = run_tool(command, seconds, input=text)
    except subprocess.TimeoutExpired:
        problem = f"'{name}' did not answer within {seconds:g} s"
        raise TransientError(problem, "check that its server runs, then try again") from None
    if process.returncode == 0:
        return process.stdout
    raise build_client_error(name, process.stderr, process.stdout, remedy=remedy)


def build_client_error(
    name: str, errors: str, output: str = "", *, remedy: str
) -> TransientError | SettingsError:
    """Return the error for a failed client, from its standard error and output.

    TransientError if the server is unreachable, else SettingsError with the remedy.
    """
    message = _find_message(errors) or _find_message(output) or "no message"
    if any(phrase in errors.lower() for phrase in UNREACHABLE_PHRASES):
        problem = f"'{name}' cannot reach the server: {message}"
        return TransientError(problem, "check that its server runs, then try again")
    return SettingsError(f"'{name}' failed: {message}", remedy)


def _find_message(text: str) -> str:
    """Return the message's first line; log lines count only without any other line."""
    lines = text.strip().splitlines()
    messages = [line for line in lines if not _LOG_LINE.match(line)]
    return first_line("\n".join(messages or lines)) if lines else ""
