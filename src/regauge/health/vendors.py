"""The vendor's own tools, where they are installed: called, and their verdict shown."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from regauge.health.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.accelerators import Accelerator

LIMIT_SECONDS = 120
HERE = "this machine"


def check_vendors(accelerator: Accelerator, size: int) -> Iterator[Finding]:
    """Yield what each tool of an accelerator says; one that is not installed is not mentioned."""
    for command in accelerator.tools(size):
        if shutil.which(command[0]):
            yield _asked(command)
    command = accelerator.occupants()
    if command and shutil.which(command[0]):
        yield _occupied(command)


def _asked(command: tuple[str, ...]) -> Finding:
    """Return a tool's verdict: its exit code, and the last line that it prints."""
    name = command[0]
    code, said = _output(command)
    last = said[-1] if said else "it said nothing"
    if code:
        return Finding.bad(name, HERE, f"ended with code {code}: {last}")
    return Finding(name, HERE, last)


def _occupied(command: tuple[str, ...]) -> Finding:
    """Return which processes are on the devices; where nobody can be asked, that is said."""
    code, said = _output(command)
    if code:
        return Finding("processes", HERE, f"unknown: {said[-1] if said else f'code {code}'}")
    if said:
        return Finding.bad("processes", HERE, f"the devices are in use: {'; '.join(said)}")
    return Finding("processes", HERE, "no other on the devices")


def _output(command: tuple[str, ...]) -> tuple[int, list[str]]:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, [f"no answer in {LIMIT_SECONDS} s"]
    except OSError as error:
        return 126, [f"cannot be run: {error.strerror}"]
    text = answer.stdout + answer.stderr
    return answer.returncode, [line.strip() for line in text.splitlines() if line.strip()]
