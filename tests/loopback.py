"""HTTP servers of tests, on the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import NamedTuple


class Request(NamedTuple):
    method: str
    path: str
    headers: Message
    body: bytes


Answer = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


@contextmanager
def answer_requests(respond: Callable[[Request], Answer], name: str) -> Iterator[str]:
    """Serve the answers of a function for the duration of the block; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, self.headers, body)
            status, content, headers = respond(request)
            self.send_response(status)
            for header, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer  # noqa: N815 (names of http.server)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with serve(ThreadingHTTPServer(("127.0.0.1", 0), Handler), name) as address:
        yield address


@contextmanager
def serve(server: BaseServer, name: str) -> Iterator[str]:
    """Run a server in a thread for the duration of the block; yield its address."""
    thread = threading.Thread(target=server.serve_forever, name=name)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
