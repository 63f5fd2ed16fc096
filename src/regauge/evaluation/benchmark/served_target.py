"""The server under measurement and its counters.

It is already running, or serves an artifact for the benchmark.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.evaluation.benchmark.http_load import HttpTarget, detect_target
from regauge.system import children, processes, timing
from regauge.system.errors import ChildError, NoProgressError, SettingsError
from regauge.system.processes import read_process_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from regauge.evaluation.benchmark.serving_settings import ServerTarget
    from regauge.system.children import Child

LOOPBACK = "127.0.0.1"
PHASES = "regauge_serve_phase_seconds"
METRICS_SECONDS = 5.0
HEALTH = "/health"
HEALTH_SECONDS = 5.0
"""Timeout of one health request."""
STOP_SECONDS = 30.0
"""Seconds in which a server must end after SIGTERM before it is killed."""
SESSION, TIMES = 3, slice(11, 15)
"""Fields in /proc/PID/stat after the name: the session, and the CPU times in ticks.

The times cover the process and its ended children, in user mode and in the kernel.
"""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@contextmanager
def open_server(
    server: ServerTarget, log: Path
) -> Iterator[tuple[HttpTarget, RunningServer | None]]:
    """Yield the request target, and the server process if it was started for this block.

    Raises SettingsError if the server does not answer, and the errors of `run_server`.
    """
    if server.artifact is None:
        yield _detect(server, str(server.url).rstrip("/")), None
        return
    port = processes.find_free_port()
    url = f"http://{LOOPBACK}:{port}"
    command = build_serve_command(server.artifact, port, server.options)
    with run_server(command, url, log, server.start_timeout_seconds) as running:
        yield _detect(server, url), running


def build_serve_command(artifact: str, port: int, options: tuple[str, ...] = ()) -> list[str]:
    """Return the command for serving an artifact on a loopback port."""
    address = (f"serve.host={LOOPBACK}", f"serve.port={port}")
    return [sys.executable, "-m", "regauge", "serve", artifact, *address, *options]


def _detect(server: ServerTarget, url: str) -> HttpTarget:
    target = HttpTarget(
        url,
        server.protocol,
        server.model,
        server.encoding_format,
        read_key(server),
        server.timeout_seconds,
        server.max_tokens,
    )
    return asyncio.run(detect_target(target))


def read_key(server: ServerTarget) -> str | None:
    """Return the server's API key; raises SettingsError if the variable is not set."""
    name = server.api_key_variable
    if name is None:
        return None
    if name not in os.environ:
        raise SettingsError(f"the environment variable {name} is not set", f"export {name}=KEY")
    return os.environ[name]


def read_phase_seconds(url: str) -> dict[str, float]:
    """Return phase -> seconds since the server started; empty if it does not have counters."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return {}
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=METRICS_SECONDS) as answer:  # noqa: S310
            text = answer.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, urllib.error.URLError, ValueError):
        return {}
    seconds: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name == f"{PHASES}_total" and "phase" in sample.labels:
                phase = sample.labels["phase"]
                seconds[phase] = seconds.get(phase, 0.0) + sample.value
    return seconds


def subtract_phases(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Return phase -> seconds between two readings."""
    return {phase: value - before.get(phase, 0.0) for phase, value in after.items()}


@dataclass(frozen=True)
class RunningServer:
    """A ready server."""

    url: str
    start_seconds: float
    """Seconds from process start to the first healthy answer."""
    pid: int

    def read_processor_seconds(self) -> float:
        """Return the CPU time of all server processes so far."""
        return sum(map(_read_seconds, _list_session(self.pid)))


@contextmanager
def run_server(
    command: Sequence[str],
    url: str,
    log: Path,
    timeout_seconds: float,
    variables: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Start a server, wait until it is healthy, and stop it at the end of the block.

    Its output is appended to the file `log`. Raises ChildError if it ends too early, and
    NoProgressError if it is not healthy within the timeout.
    """
    began = time.perf_counter()
    child = children.spawn(list(command), log, variables or {}, new_session=True)
    try:
        timing.wait_for(
            lambda: is_healthy(url) or child.poll() is not None,
            timeout_seconds,
        )
        start_seconds = time.perf_counter() - began
        if (code := child.poll()) is not None:
            status = children.convert_return_code(code) or 1
            raise ChildError(status, f"the server ended with exit code {code}; see {log}")
        if not is_healthy(url):
            problem = f"the server is not ready after {timeout_seconds:g} s"
            raise NoProgressError(problem, f"see {log}, or raise server.start_timeout_seconds")
        yield RunningServer(url, start_seconds, child.pid)
    finally:
        _stop(child)


def is_healthy(url: str) -> bool:
    """Return whether a server answers as ready."""
    try:
        with urllib.request.urlopen(url + HEALTH, timeout=HEALTH_SECONDS):  # noqa: S310 (http)
            return True
    except (OSError, urllib.error.URLError):
        return False


def _stop(child: Child) -> None:
    """End a server by SIGTERM; kill the remaining processes if it does not end in time."""
    if child.poll() is None:
        child.terminate()
        timing.wait_for(lambda: child.poll() is not None, STOP_SECONDS)
    for pid in _list_session(child.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def _list_session(session: int) -> list[int]:
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = read_process_fields(int(folder.name))
        if fields and int(fields[SESSION]) == session:
            pids.append(int(folder.name))
    return pids


def _read_seconds(pid: int) -> float:
    fields = read_process_fields(pid)
    return sum(int(field) for field in fields[TIMES]) / TICKS_PER_SECOND if fields else 0.0
