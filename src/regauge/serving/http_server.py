"""The HTTP server: connection limits on uvicorn, cancellation, and a lossless shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import struct
import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from regauge.serving.http_protocol import OPEN_PATHS
from regauge.system.log import logger
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from regauge.serving.http_protocol import ServerContext

MAX_HEADER_BYTES = 64 << 10
"""Maximum header bytes per request, path included."""
IDLE_SECONDS = 2.0
"""How long an idle connection stays open after SIGTERM, for a request already under way."""
ACCEPT_SECONDS = 0.2
"""Time to accept connections that were complete at SIGTERM."""
RESERVED_CONNECTIONS = 64
"""Connections above the limit, which only health routes answer."""
ANSWER_START = b"HTTP/1.1 "
"""First bytes of every answer, which are sent one by one to see whether a client is there."""
PROBE_SECONDS = 0.05
"""Time between the first two of them; it doubles."""
BUSY = "too many connections"
SO_ATTACH_FILTER, BPF_RETURN = 26, 0x06
"""A Linux socket option, and the packet filter instruction that ends the filter: socket(7)."""


class BegunAnswer:
    """A transport that leaves out the start of an answer if it has already been sent."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.num_sent = 0
        """Sent bytes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_next(self) -> None:
        """Send another byte of the start, if any is left."""
        self._transport.write(ANSWER_START[self.num_sent : self.num_sent + 1])
        self.num_sent = min(self.num_sent + 1, len(ANSWER_START))

    def write(self, content: bytes) -> None:
        self._transport.write(content[self.num_sent :])
        self.num_sent = 0


class LimitedProtocol(HttpToolsProtocol):
    """A connection whose headers must arrive in time, and whose end cancels its requests."""

    context: ServerContext
    """Set by `build_protocol`."""
    counts: Counter[str]
    """Client address -> number of open connections."""
    idle: dict[LimitedProtocol, None]
    """Connections without a request, the oldest first."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_bytes = 0
        self._running_cycle: Any = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self.address = self.client[0] if self.client else ""
        self.counts[self.address] += 1
        self._is_reserved = not self._make_room(0)
        if self._is_reserved and not self._make_room(RESERVED_CONNECTIONS):
            self._refuse(503, BUSY)
            return
        self.idle[self] = None
        self._start_header_timer()

    def _make_room(self, extra: int) -> bool:
        """Close the oldest idle connection if there are too many; return False without one."""
        http = self.context.settings.http
        is_full = self.counts[self.address] > http.max_address_connections + extra
        if not is_full and len(self.connections) <= http.max_connections + extra:
            return True
        for oldest in self.idle:
            has_been_read = not oldest.transport.get_write_buffer_size()
            if has_been_read and (not is_full or oldest.address == self.address):
                oldest.stop_counting()
                oldest.transport.close()
                return True
        return False

    def stop_counting(self) -> None:
        """Stop counting this connection."""
        self.idle.pop(self, None)
        if self in self.connections:
            self.connections.discard(self)
            self.counts[self.address] -= 1
            if not self.counts[self.address]:
                del self.counts[self.address]

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_counting()
        self._stop_header_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        if self._running_cycle is not None:
            self._running_cycle.disconnected = True
        for task in self.context.tasks.pop(self.client, ()) if self.client else ():
            task.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override] # as in asyncio
        """Return whether the connection stays open, for the answers to a client that only reads."""
        if self._is_between_requests() or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe_client(PROBE_SECONDS)
        return True

    def _probe_client(self, seconds: float) -> None:
        """Send a byte of the answer, and another one later: writing fails if the client has gone.

        The end of a client's requests looks the same whether it still reads or not.
        """
        if self.transport.is_closing():
            return
        cycle = self._running_cycle
        if not cycle.response_started:
            if not isinstance(cycle.transport, BegunAnswer):
                cycle.transport = BegunAnswer(cycle.transport)
            cycle.transport.send_next()
        self._probe_timer = self.loop.call_later(seconds, self._probe_client, 2 * seconds)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._header_timer is not None or self._is_between_requests():
            self._header_bytes += len(data)
            self.idle.pop(self, None)
            if self._header_timer is None:
                self._start_header_timer()
        super().data_received(data)
        if self._header_timer is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "the headers are too large")

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        if self._is_reserved and self.url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            self.app = refuse_request
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_between_requests() and not self.transport.is_closing():
            self.idle[self] = None

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Start to answer a request, and remember it.

        uvicorn only knows the last pipelined request, so it would write an earlier answer to a
        closed connection.
        """
        self._running_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _start_header_timer(self) -> None:
        seconds = self.context.settings.http.header_timeout_seconds
        self._header_timer = self.loop.call_later(
            seconds, self._refuse, 408, "the headers did not arrive in time"
        )

    def _stop_header_timer(self) -> None:
        self._header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, message: str) -> None:
        self._stop_header_timer()
        if self.transport.is_closing():
            return
        body = message.encode()
        head = (
            f"HTTP/1.1 {status} {message}\r\ncontent-type: text/plain\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


async def refuse_request(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request on a connection that is kept for the health of the server."""
    del scope, receive
    headers = [(b"content-type", b"text/plain"), (b"retry-after", b"1"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": BUSY.encode()})


def drop_new_connections(listener: socket.socket) -> None:
    """Make the kernel drop new connections' packets, as a full queue does.

    Without this, a complete but unaccepted connection is reset when the socket closes, and the
    request is lost. A dropped client tries again, and is refused once the socket is closed.
    """
    if not sys.platform.startswith("linux"):
        return
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(instruction))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def build_protocol(context: ServerContext) -> type[LimitedProtocol]:
    """Return the connection class of a server."""
    fields = {"context": context, "counts": Counter(), "idle": {}}
    return type("ServerProtocol", (LimitedProtocol,), fields)


def track_tasks(context: ServerContext, app: ASGIApp) -> ASGIApp:
    """Wrap an application so that tasks are cancelled when their connection ends."""

    async def run_tracked(scope: Scope, receive: Receive, send: Send) -> None:
        client, task = scope.get("client"), asyncio.current_task()
        if client is None or task is None:
            await app(scope, receive, send)
            return
        tasks = context.tasks.setdefault(client, set())
        tasks.add(task)
        try:
            await app(scope, receive, _close_if_draining(context, send))
        except asyncio.CancelledError:
            if client in context.tasks:  # not by the end of the connection
                raise
        finally:
            tasks.discard(task)
            if not tasks and context.tasks.get(client) is tasks:
                del context.tasks[client]

    return run_tracked


def _close_if_draining(context: ServerContext, send: Send) -> Send:
    """Return a function that asks clients to close their connections while the server drains."""

    async def send_message(message: Any) -> None:
        if context.state == "draining" and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_message


class HttpServer(uvicorn.Server):
    """A uvicorn server that completes the requests of open connections before it ends."""

    def __init__(self, context: ServerContext, app: ASGIApp) -> None:
        http = context.settings.http
        config = uvicorn.Config(
            track_tasks(context, app),
            http=build_protocol(context),
            loop="uvloop",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=1024,
            timeout_keep_alive=http.keep_alive_seconds,
            timeout_graceful_shutdown=int(http.drain_seconds) + 1,
        )
        super().__init__(config)
        self._context = context
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller, which sets `should_exit`."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, answer the requests of open ones, and close idle ones."""
        for listener in sockets or []:
            drop_new_connections(listener)
        await asyncio.sleep(ACCEPT_SECONDS)  # accepts the connections that are complete
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._context.settings.http.drain_seconds
        idle_since: dict[Any, float] = {}
        while self.server_state.connections and loop.time() < deadline:
            connections: Any = list(self.server_state.connections)
            for connection in connections:
                cycle = connection.cycle
                if cycle is not None and not cycle.response_complete:
                    idle_since.pop(connection, None)
                elif loop.time() - idle_since.setdefault(connection, loop.time()) > IDLE_SECONDS:
                    connection.shutdown()
            await asyncio.sleep(POLL_SECONDS)
        if count := len(self.server_state.tasks):
            logger.warning("%d requests were not completed in time", count)
        await super().shutdown(sockets)
