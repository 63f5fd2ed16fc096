"""Clients that close their sending side are answered, and those that have gone are not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from regauge.serving.http_server import HttpServer
from regauge.serving.settings import Serve

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class SlowApp:
    """Answers a request after the seconds in its path."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            return
        try:
            await asyncio.sleep(float(scope["path"][1:]))
        except asyncio.CancelledError:
            self.outcomes.append("cancelled")
            raise
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})
        self.outcomes.append("answered")


def serve(work: Callable[[int, SlowApp], Awaitable[None]]) -> None:
    """Run a coroutine with the port and the application of a server."""
    settings = Serve(artifacts={"model": "x"})
    context: Any = SimpleNamespace(settings=settings, tasks={}, state="ready")

    async def run() -> None:
        app = SlowApp()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = HttpServer(context, app)
            running = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await work(listener.getsockname()[1], app)
            finally:
                server.should_exit = True
                await running

    uvloop.run(run())


def build_request(version: str, seconds: float, header: str = "") -> bytes:
    head = f"POST /{seconds} HTTP/{version}\r\nHost: x\r\n{header}Content-Length: 3\r\n\r\n"
    return f"{head}abc".encode()


@pytest.mark.parametrize(
    ("version", "header", "count"),
    [("1.0", "", 1), ("1.1", "", 3), ("1.1", "Expect: 100-continue\r\n", 3)],
)
@pytest.mark.parametrize("seconds", [0, 0.6])
def test_a_client_that_closes_its_sending_side_is_answered(
    version: str, header: str, count: int, seconds: float
) -> None:
    """The first bytes of the answers of slow requests come one by one."""

    async def send(port: int, app: SlowApp) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(build_request(version, seconds, header) * count)
        writer.write_eof()
        content = await reader.read()
        assert content.count(CONTINUE) == (count if header else 0)
        start, *answers = content.replace(CONTINUE, b"").split(b"HTTP/1.1 200 OK\r\n")
        assert start == b""
        assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [b"ok"] * count
        assert [b"connection: close" in answer for answer in answers].index(True) == count - 1
        assert app.outcomes == ["answered"] * count
        writer.close()

    serve(send)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_the_work_of_a_client_that_has_gone_is_cancelled(version: str) -> None:
    async def send(port: int, app: SlowApp) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(build_request(version, 600))
            await asyncio.sleep(0.1)
        while not app.outcomes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert app.outcomes == ["cancelled"]

    serve(send)


def test_an_incomplete_request_ends_with_the_sending_side() -> None:
    async def send(port: int, app: SlowApp) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(build_request("1.1", 0)[:-1])
        writer.write_eof()
        assert await reader.read() == b""
        assert app.outcomes == []
        writer.close()

    serve(send)
