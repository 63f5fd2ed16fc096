"""Serves metrics over HTTP from a daemon thread, without risk to the run.

A connection lasts a few seconds at most. A new connection replaces the oldest one when too many are
open. Connections per second are bounded, and metrics are rendered at most once a second. So a slow
or hostile client costs a bounded share of one core, and Prometheus is still served.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.monitoring.vocabulary import RUN_FAILED, Sample
from regauge.system import timing
from regauge.system.errors import (
    DataError,
    LimitReachedError,
    SettingsError,
    StopSignalError,
)
from regauge.system.files import write_atomic
from regauge.system.json_files import read_json_list
from regauge.system.log import logger
from regauge.system.stop_signals import EXIT_CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from regauge.monitoring.settings import Monitoring
    from regauge.monitoring.vocabulary import RunLabels

NO_FAILURES = (0, LimitReachedError.exit_code, *EXIT_CODES)
"""Exit codes after a limit or a stop signal."""
EXPORTERS = "exporters"
"""Output subfolder with each exporter's address, in a file `<host>-<pid>.json` in Prometheus'
file_sd format."""
METRICS_PATH = "/metrics"
CONNECTION_SECONDS = 5.0
"""Maximum connection time, from the start to the answer's last byte."""
MAX_CONNECTIONS = 16
ACCEPT_PAUSE_SECONDS = 0.05
"""Pause after each connection: 20 connections per second at most."""
MAX_REQUEST_BYTES = 8192
MIN_RENDER_SECONDS = 1.0
"""Age below which metrics are sent again instead of collected again."""
MAX_READ_SECONDS = 60.0
"""Maximum wait for a last read after a failure."""
CLOSE_SECONDS = 2.0
"""Maximum wait for the thread at the end; it may be blocked by a file system."""
BACKLOG = 16
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""


class Exporter:
    def __init__(self, listener: socket.socket, render: Callable[[], bytes]) -> None:
        """Start the server; `render` returns the metrics and is called in the server thread."""
        self._listener, self._render = listener, render
        listener.settimeout(0)
        self.port: int = listener.getsockname()[1]
        self._rendered_at, self._text = float("-inf"), b""
        self._sent_at = float("-inf")
        """When the newest metrics that a client has got were collected."""
        self._read_seconds = 0.0
        self._wake_end, self._stop_end = socket.socketpair()
        self._wake_end.settimeout(0)
        self._thread = threading.Thread(target=self._run, name="exporter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server; waits for a bounded time."""
        self._stop_end.close()
        self._thread.join(CLOSE_SECONDS)

    def wait_for_read(self) -> None:
        """Wait for the next read, unless nobody reads at intervals; ends after two of these."""
        began_at, limit = time.monotonic(), min(2 * self._read_seconds, MAX_READ_SECONDS)
        with suppress(StopSignalError):
            timing.wait_for(lambda: self._sent_at > began_at, limit)

    def _run(self) -> None:
        with self._listener, self._wake_end:
            try:
                asyncio.run(self._serve())
            except Exception as error:  # noqa: BLE001 (the run must not end with its metrics)
                logger.warning("the metrics are not served any more: %s", error)

    async def _serve(self) -> None:
        """Accept connections until the socket pair's other end is closed."""
        accepting = asyncio.create_task(self._accept())
        stopping = asyncio.create_task(asyncio.get_running_loop().sock_recv(self._wake_end, 1))
        done, pending = await asyncio.wait(
            (accepting, stopping), return_when=asyncio.FIRST_COMPLETED
        )
        for task in pending:
            task.cancel()
        if accepting in done:
            accepting.result()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Task[None]] = []
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # the client has left, or the process has no free handle
                if error.errno == errno.EBADF:
                    return
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            answers = [task for task in answers if not task.done()]
            if len(answers) >= MAX_CONNECTIONS:
                answers.pop(0).cancel()
            answers.append(asyncio.create_task(self._answer(connection)))
            await asyncio.sleep(ACCEPT_PAUSE_SECONDS)

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, suppress(OSError, TimeoutError):
            connection.settimeout(0)
            async with asyncio.timeout(CONNECTION_SECONDS):
                request = await _read_request(connection)
                await loop.sock_sendall(connection, self._respond(request))
                connection.shutdown(socket.SHUT_WR)
                self._sent_at = self._rendered_at
                while await loop.sock_recv(connection, MAX_REQUEST_BYTES):
                    pass  # a client that still sends would lose the answer to a reset

    def _respond(self, request: bytes) -> bytes:
        """Return the response to a request; only the request's first line matters."""
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):  # noqa: PLR2004 (RFC 9112)
            return _format_response("400 Bad Request", b"this is not HTTP\n")
        method, path = words[0], words[1].split(b"?", 1)[0].decode("latin-1")
        if method not in {b"GET", b"HEAD"}:
            return _format_response("405 Method Not Allowed", b"use GET\n")
        if path != METRICS_PATH:
            return _format_response(
                "404 Not Found", f"the metrics are at {METRICS_PATH}\n".encode()
            )
        try:
            body = self._read_text()
        except Exception as error:  # noqa: BLE001 (a damaged file must not end the server)
            logger.warning("the metrics cannot be collected: %s", error)
            return _format_response("500 Internal Server Error", b"see the log of the run\n")
        return _format_response("200 OK", body, has_body=method == b"GET")

    def _read_text(self) -> bytes:
        """Return the metrics, not older than MIN_RENDER_SECONDS."""
        now = time.monotonic()
        if now - self._rendered_at >= MIN_RENDER_SECONDS:
            self._text = self._render()
            if self._rendered_at > 0:
                self._read_seconds = max(self._read_seconds, now - self._rendered_at)
            self._rendered_at = now
        return self._text


async def _read_request(connection: socket.socket) -> bytes:
    """Return a request's header; empty if it is too long or incomplete."""
    loop = asyncio.get_running_loop()
    request = b""
    while b"\r\n\r\n" not in request:
        data = await loop.sock_recv(connection, MAX_REQUEST_BYTES)
        request += data
        if not data or len(request) > MAX_REQUEST_BYTES:
            return b""
    return request


def _format_response(status: str, body: bytes, *, has_body: bool = True) -> bytes:
    header = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return header.encode() + (body if has_body else b"")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; logs a warning and takes a free port if the port is in use.

    Raises SettingsError if the address cannot be used at all.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.bind((host, 0))
            free_port = listener.getsockname()[1]
            message = "monitoring.port %d is in use by another program; the metrics use port %d"
            logger.warning(message, port, free_port)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"the metrics cannot use {host}:{port}: {error.strerror or error}"
        raise SettingsError(problem, "set another monitoring.host or monitoring.port") from None
    return listener


@contextmanager
def export_metrics(
    settings: Monitoring,
    folder: Path,
    read_samples: Callable[[], Iterable[Sample]],
    *,
    port_offset: int = 0,
    find_run: Callable[[], RunLabels] | None = None,
) -> Iterator[Exporter | None]:
    """Serve samples within the block, if `monitoring.port` is set.

    The address is written to the subfolder EXPORTERS, and to `monitoring.targets_folder`. Processes
    on one machine add their offset to the port. With `find_run`, a failure of the block is exported
    for that run, and the end waits until Prometheus has read it.

    Raises SettingsError if the address cannot be used or prometheus-client is not installed.
    """
    if settings.port is None:
        yield None
        return
    try:
        from regauge.monitoring.exposition import render_samples
    except ImportError as error:
        remedy = "pip install 'regauge[monitor]', or leave monitoring.port out"
        raise SettingsError(f"monitoring.port needs a package: {error}", remedy) from None

    has_failed = False

    def render() -> bytes:
        failed = () if find_run is None else (Sample(RUN_FAILED, has_failed, find_run()),)
        return render_samples(lambda: (*read_samples(), *failed))

    port = settings.port + port_offset if settings.port else 0
    exporter = Exporter(listen(settings.host, port), render)
    folders = [Path(name) for name in (folder / EXPORTERS, settings.targets_folder) if name]
    try:
        target = f"{_find_reachable_host(settings.host)}:{exporter.port}"
        for addresses in folders:
            _write_address(addresses, target)
        logger.info("Metrics: http://%s%s", target, METRICS_PATH)
        yield exporter
    except Exception as error:
        has_failed = find_run is not None and getattr(error, "exit_code", 1) not in NO_FAILURES
        if has_failed:
            exporter.wait_for_read()
        raise
    finally:
        exporter.close()
        with suppress(OSError):
            for addresses in folders:
                _find_address_file(addresses).unlink(missing_ok=True)
            folders[0].rmdir()


def _write_address(folder: Path, target: str) -> None:
    """Write an address for Prometheus, with the node that also names this machine's devices."""
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale_addresses(folder)
    groups = [{"targets": [target], "labels": {"node": os.uname().nodename}}]
    write_atomic(_find_address_file(folder), json.dumps(groups) + "\n", durable=False)


def _find_address_file(folder: Path) -> Path:
    return folder / f"{os.uname().nodename}-{os.getpid()}.json"


def _remove_stale_addresses(folder: Path) -> None:
    """Remove addresses left by killed processes on this machine."""
    prefix = f"{os.uname().nodename}-"
    for path in folder.glob(f"{prefix}*.json"):
        pid = path.stem.removeprefix(prefix)
        if pid.isdecimal():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # a process of another user


def _find_reachable_host(host: str) -> str:
    """Return the host name for an exporter's address, in brackets for IPv6."""
    if host in {"0.0.0.0", "::"}:  # noqa: S104 (compared, not bound)
        return os.uname().nodename
    return f"[{host}]" if ":" in host else host


def find_targets(folder: Path) -> dict[str, str]:
    """Return exporter address, `host:port` -> node, for an output folder."""
    nodes: dict[str, str] = {}
    for path in sorted((folder / EXPORTERS).glob("*.json")):
        with suppress(DataError):
            for group in read_json_list(path, "remove it"):
                if isinstance(group, dict):
                    node = str((group.get("labels") or {}).get("node", ""))
                    nodes |= dict.fromkeys(group.get("targets", []), node)
    return nodes
