"""Sinks of notifications on the loopback interface: well-behaved and hostile ones."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult

from loopback import Answer, Request, answer_requests


@dataclass
class WebhookSink:
    """A web server that records JSON documents, with the headers of their requests."""

    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers; afterwards 200."""
    location: str = ""
    """Header of a redirect."""
    url: str = ""
    documents: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def events(self) -> list[str]:
        """The names of the received events."""
        return [document["event"] for document in self.documents]

    @contextmanager
    def run(self) -> Iterator[WebhookSink]:
        """Serve in a thread for the duration of the block."""
        with answer_requests(self._respond, "webhook") as address:
            self.url = f"{address}/hook"
            yield self

    def _respond(self, request: Request) -> Answer:
        self.headers.append(dict(request.headers))
        status = self.statuses.pop(0) if self.statuses else 200
        if status < 300:
            self.documents.append(json.loads(request.body))
        return status, b"", {"Location": self.location} if self.location else {}


@pytest.fixture
def webhook() -> Iterator[WebhookSink]:
    with WebhookSink().run() as sink:
        yield sink


def notify(url: str, **options: Any) -> dict[str, Any]:
    """Return the table `monitoring` with a webhook."""
    limits = {"timeout_seconds": 60.0, "exit_seconds": 60.0}
    return {"notifications": {"webhook": {"url": url}, **limits, **options}}


@contextmanager
def run_hostile(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server that calls a function with each connection; yield its port."""
    threads = []
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                behave(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    threads.append(threading.Thread(target=answer, args=(connection,)))
                    threads[-1].start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def be_silent(connection: socket.socket) -> None:
    """Read and never answer."""
    while connection.recv(1 << 16):
        pass


def send_endless_headers(connection: socket.socket) -> None:
    """Answer with one header line that never ends."""
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        connection.sendall(b"x" * 65536)


def send_endless_body(connection: socket.socket) -> None:
    """Answer with success and a body that never ends."""
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def drip(connection: socket.socket) -> None:
    """Answer one byte of the status line at a time, each within the time limit of a read."""
    connection.recv(1 << 16)
    stop = threading.Event()
    for byte in b"HTTP/1.1 200 " + b"O" * 100_000:
        connection.sendall(bytes([byte]))
        stop.wait(0.02)


def reset(connection: socket.socket) -> None:
    """Close the connection without an answer."""
    connection.recv(1 << 16)


def greet_without_end(connection: socket.socket) -> None:
    """Greet as a mail server whose greeting has endless lines."""
    while True:
        connection.sendall(b"220-hello\r\n" * 4096)


@dataclass
class MailSink:
    """A mail server that records e-mails; `login` is the name and password that it requires."""

    login: tuple[str, str] | None = None
    refused: str = ""
    """Recipient that it refuses."""
    certificate: Path | None = None
    """Certificate and key for STARTTLS."""
    mails: list[EmailMessage] = field(default_factory=list)

    async def handle_RCPT(  # noqa: N802 (a name of aiosmtpd)
        self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
    ) -> str:
        if address == self.refused:
            return "550 no such person"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        mail = message_from_bytes(envelope.content, policy=policy.default)
        self.mails.append(mail)  # type: ignore[arg-type]
        return "250 accepted"

    @contextmanager
    def run(self) -> Iterator[int]:
        """Serve in a thread for the duration of the block; yield the port."""
        context = None
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        controller = Controller(
            self,
            hostname="127.0.0.1",
            port=port,
            tls_context=context,
            require_starttls=context is not None,
            auth_required=self.login is not None,
            authenticator=self._check_login,
        )
        controller.start()
        try:
            yield port
        finally:
            controller.stop()

    def _check_login(
        self, _server: Any, _session: Any, _envelope: Any, _kind: str, data: Any
    ) -> Any:
        is_known = (data.login.decode(), data.password.decode()) == self.login
        message = None if is_known else f"535 5.7.8 wrong password {data.password.decode()}"
        return AuthResult(success=is_known, handled=False, message=message)
