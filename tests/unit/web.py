"""A web server on loopback that tells a folder's files, in parts or only as a whole."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from loopback import running


@dataclass
class Web:
    """The server: what it tells, how, and what it was asked."""

    folder: Path
    url: str = ""
    parts: bool = True
    """Whether it tells parts of a file."""
    breaks: int = 0
    """How many answers break off in the middle."""
    status: int = 200
    """What every answer is, if it is no 200."""
    asked: list[str] = field(default_factory=list)
    told_bytes: int = 0


class Handler(BaseHTTPRequestHandler):
    """Answers with files."""

    web: Web

    def do_HEAD(self) -> None:
        self._asked(body=False)

    def do_GET(self) -> None:
        self._asked(body=True)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Say nothing."""

    def _asked(self, *, body: bool) -> None:
        self.web.asked.append(f"{self.command} {self.path}")
        if self.web.status != 200:
            self.send_error(self.web.status)
        else:
            self.answer(body=body)

    def answer(self, *, body: bool) -> None:
        """Answer with the file that the path names."""
        self.tell(self.web.folder / self.path.partition("?")[0].lstrip("/"), {}, body=body)

    def tell(self, path: Path, headers: dict[str, str], *, body: bool) -> None:
        """Answer with a file, or the part of it that was asked for."""
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        size = len(data)
        if wanted and self.web.parts:
            first, last = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
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
            self._tell(data)

    def _tell(self, data: bytes) -> None:
        if self.web.breaks:
            self.web.breaks -= 1
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        try:
            self.wfile.write(data)
            self.web.told_bytes += len(data)
        except ConnectionError:
            pass  # who asked has read enough


@contextmanager
def serving(folder: Path, handler: type[Handler] = Handler) -> Iterator[Web]:
    """Serve a folder for as long as the block lasts."""
    web = Web(folder)
    own = type("Handler", (handler,), {"web": web})
    with running(ThreadingHTTPServer(("127.0.0.1", 0), own), "web") as web.url:
        yield web
