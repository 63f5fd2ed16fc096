"""Runs a server: loads the models, listens, and drains after a stop signal."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import uvloop

from regauge.serving.api_keys import ApiKeys
from regauge.serving.http_server import HttpServer
from regauge.serving.runtime import TOKENIZER_THREADS, ServingRuntime
from regauge.system import log, stop_signals
from regauge.system.errors import SettingsError
from regauge.system.log import logger
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from regauge.serving.settings import Serve

BACKLOG = 1024


def run_server(settings: Serve) -> dict[str, Any]:
    """Serve until a stop signal; return the number of answered requests.

    Raises the models' errors, and SettingsError if the address cannot be used.
    """
    with (
        stop_signals.record_signals(),
        stop_signals.defer_stop(has_limit=False),
        _listen(settings.host, settings.port) as listener,
        ThreadPoolExecutor(TOKENIZER_THREADS, "tokenize") as executor,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(settings, listener, executor))


async def _serve(
    settings: Serve, listener: socket.socket, executor: ThreadPoolExecutor
) -> dict[str, Any]:
    stop_signals.watch_signals()
    if settings.http.access_log:
        log.show_times()
    start = time.monotonic()
    keys = ApiKeys.read(settings.http.api_keys_file)
    keys.warn_if_open(settings.host)
    runtime = ServingRuntime(settings, keys, executor)
    server = HttpServer(runtime.context, runtime.app)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        if await _run_until_stopped(runtime.start()):
            _log_ready(settings, listener, time.monotonic() - start)
            await _run_until_stopped(runtime.watch())
        runtime.drain()
        logger.info("Draining: accepted requests are completed")
    finally:
        server.should_exit = True
        await running
        await runtime.stop()
    return {"requests": server.server_state.total_requests, "state": "stopped"}


async def _run_until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Run a coroutine and raise any error; return False if a stop signal ends it."""
    task = asyncio.create_task(work)
    while stop_signals.find_signal() is None:
        await asyncio.wait({task}, timeout=POLL_SECONDS)
        if task.done():
            task.result()
            return True
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return False


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises SettingsError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise SettingsError(problem, "set another serve.host or serve.port") from None
    listener.listen(BACKLOG)
    return listener


def _log_ready(settings: Serve, listener: socket.socket, seconds: float) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(settings.artifacts)
    logger.info("Serving %s at http://%s:%d (ready after %.1f s)", names, shown, port, seconds)
