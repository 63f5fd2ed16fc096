"""A local web server for the files of a folder, with or without range requests."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from loopback import serve


@dataclass
class Web:
    """The state of the server."""

    folder: Path
    url: str = ""
    supports_ranges: bool = True
    """Whether range requests are supported."""
    num_interruptions: int = 0
    """Number of next responses that are interrupted in the middle."""
    status: int = 200
    """HTTP status of every response; only 200 sends files."""
    requests: list[str] = field(default_factory=list)
    """Method and path of every request."""
    sent_bytes: int = 0


class Handler(BaseHTTPRequestHandler):
    """Responds with files of the folder."""

    web: Web

    def do_HEAD(self) -> None:
        self._handle(body=False)

    def do_GET(self) -> None:
        self._handle(body=True)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Log nothing."""

    def _handle(self, *, body: bool) -> None:
        self.web.requests.append(f"{self.command} {self.path}")
        if self.web.status != 200:
            self.send_error(self.web.status)
        else:
            self.respond(body=body)

    def respond(self, *, body: bool) -> None:
        """Respond with the file that the path names."""
        self.send_file(self.web.folder / self.path.partition("?")[0].lstrip("/"), {}, body=body)

    def send_file(self, path: Path, headers: dict[str, str], *, body: bool) -> None:
        """Send a file, or the requested range of it."""
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        requested_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        size = len(data)
        if requested_range and self.web.supports_ranges:
            first, last = (
                int(requested_range[1]),
                min(int(requested_range[2] or size - 1), size - 1),
            )
            data = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self._send_body(data)

    def _send_body(self, data: bytes) -> None:
        if self.web.num_interruptions:
            self.web.num_interruptions -= 1
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        try:
            self.wfile.write(data)
            self.web.sent_bytes += len(data)
        except ConnectionError:
            pass  # the client has closed the connection


@contextmanager
def serve_folder(folder: Path, handler: type[Handler] = Handler) -> Iterator[Web]:
    """Serve a folder for the duration of the block."""
    web = Web(folder)
    bound_handler = type("Handler", (handler,), {"web": web})
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), bound_handler), "web") as web.url:
        yield web
