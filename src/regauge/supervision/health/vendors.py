"""Runs the vendor's own diagnostic tools, if installed, and shows the results."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from regauge.supervision.health.findings import Finding
from regauge.system.children import run_tool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.accelerators import Accelerator

TIMEOUT_SECONDS = 120
LOCATION = "this machine"


def check_vendors(accelerator: Accelerator, size: int) -> Iterator[Finding]:
    """Yield each installed tool's result."""
    for command in accelerator.diagnostic_commands(size):
        if shutil.which(command[0]):
            yield _run_tool(command)
    command = accelerator.process_list_command()
    if command and shutil.which(command[0]):
        yield _check_occupancy(command)


def _run_tool(command: tuple[str, ...]) -> Finding:
    """Report a tool's exit code and last output line."""
    name = command[0]
    code, lines = _run(command)
    last = lines[-1] if lines else "no output"
    if code:
        return Finding.bad(name, LOCATION, f"exited with code {code}: {last}")
    return Finding(name, LOCATION, last)


def _check_occupancy(command: tuple[str, ...]) -> Finding:
    """Report which other processes use the devices; a failing command is not a bad finding."""
    code, lines = _run(command)
    if code:
        reason = lines[-1] if lines else f"code {code}"
        return Finding("processes", LOCATION, f"unknown: {reason}")
    if lines:
        return Finding.bad("processes", LOCATION, f"the devices are in use: {'; '.join(lines)}")
    return Finding("processes", LOCATION, "no other on the devices")


def _run(command: tuple[str, ...]) -> tuple[int, list[str]]:
    """Return a command's exit code and non-empty output lines."""
    try:
        process = run_tool(command, TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return 124, [f"no answer in {TIMEOUT_SECONDS} s"]
    except OSError as error:
        return 126, [f"cannot be run: {error.strerror}"]
    text = process.stdout + process.stderr
    return process.returncode, [line.strip() for line in text.splitlines() if line.strip()]
