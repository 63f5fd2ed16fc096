"""Findings of the vendor: its diagnostic tools, if installed, and its device counters."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

from regauge.accelerators import open_device_counters
from regauge.monitoring.polled_source import PolledSource
from regauge.supervision.health.findings import Finding
from regauge.system.children import run_tool
from regauge.system.device_counters import DeviceCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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


CHECK = "counters"
SAMPLE_SECONDS = 0.1
COUNTERS = tuple(field.name for field in fields(DeviceCounters) if field.name != "device")
Reading = tuple[DeviceCounters, ...]


@contextmanager
def record_counters(accelerator: Accelerator) -> Iterator[list[Reading]]:
    """Yield a list to which counter readings are appended during the block.

    The block should use the devices, because an idle device may have a utilization of 0.
    """
    readings: list[Reading] = []

    def open_reader() -> Callable[[], None]:
        read = open_device_counters(accelerator)
        return lambda: readings.append(read())

    with PolledSource(open_reader, SAMPLE_SECONDS):
        yield readings


def judge_counters(readings: Sequence[Reading]) -> list[Finding]:
    """Return a finding per device: the counters, and those that are empty or always 0.

    Such a counter does not prevent a run, so the findings are never bad.
    """
    devices = dict.fromkeys(counters.device for reading in readings for counters in reading)
    if not devices:
        return [Finding(CHECK, "this machine", "none: the vendor's library found no device")]
    return [_judge_device(device, readings) for device in devices]


def _judge_device(device: str, readings: Sequence[Reading]) -> Finding:
    local = [counters for reading in readings for counters in reading if counters.device == device]
    values = {
        name: [value for counters in local if (value := getattr(counters, name)) is not None]
        for name in COUNTERS
    }
    empty = [name for name in COUNTERS if not values[name]]
    zero = [name for name in COUNTERS if values[name] and not any(values[name])]
    useful = [name for name in COUNTERS if name not in (*empty, *zero)]
    problems = [
        f"{state}: {', '.join(names)}"
        for state, names in (("always 0", zero), ("empty", empty))
        if names
    ]
    return Finding(CHECK, f"device {device}", ", ".join(useful), "; ".join(problems))
