"""The server under measurement and its counters.

It is already running, or serves an artifact for the benchmark.
"""

from __future__ import annotations

import asyncio
import os
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regauge.evaluation.benchmark.http_load import HttpTarget, detect_target
from regauge.evaluation.benchmark.server_process import RunningServer, run_server
from regauge.system import processes
from regauge.system.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.evaluation.benchmark.serving_settings import ServerTarget

LOOPBACK = "127.0.0.1"
PHASES = "regauge_serve_phase_seconds"
METRICS_SECONDS = 5.0


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
