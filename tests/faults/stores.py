"""An S3 server on loopback with rules by which requests fail."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.moto_api._internal.models import moto_api_backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from loopback import serve

Start = Callable[..., Any]
LATE_SECONDS = 12.0
SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist.</Message></Error>"
)


@dataclass
class Rule:
    """The requests that fail, and their effect."""

    method: str
    match: str
    """A part of the path or the query."""
    effect: str
    """`slow` answers 503, `late` answers after `LATE_SECONDS`, `reset` closes the connection,
    `cut` closes it in the middle of an answer, `lost` does the request and closes it, `deny`
    answers 403, `ignore` removes the conditions of a write, `hide` leaves keys out of a listing."""
    count: int = 1
    """Number of requests that fail."""
    num_triggered: int = 0


@dataclass
class Store:
    """The address of the server, and its rules."""

    url: str
    rules: list[Rule] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a client of the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def _build_application(
    inner: Any, store: Store
) -> Callable[[dict[str, Any], Start], Iterable[bytes]]:
    def application(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        address = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        for rule in store.rules:
            if rule.method == method and rule.match in address and rule.num_triggered < rule.count:
                rule.num_triggered += 1
                answer = _apply_rule(rule, inner, environ, start)
                if answer is not None:
                    return answer
        body_parts: Iterable[bytes] = inner(environ, start)
        hidden = [rule.match for rule in store.rules if rule.effect == "hide"]
        if method == "GET" and "list-type" in address and hidden:
            return [_hide_keys(b"".join(body_parts), hidden)]
        return body_parts

    return application


def _apply_rule(
    rule: Rule, inner: Any, environ: dict[str, Any], start: Start
) -> list[bytes] | None:
    """Return the answer of a request that fails; None if it is answered as usual."""
    if rule.effect == "slow":
        _drain(environ)
        return _refuse(start, "503 Slow Down", SLOW_DOWN)
    if rule.effect == "deny":
        is_head = environ["REQUEST_METHOD"] == "HEAD"
        return _refuse(start, "403 Forbidden", b"" if is_head else DENIED)
    if rule.effect == "cut":
        body = b"".join(inner(environ, start))
        return [body[: len(body) // 2]]
    if rule.effect == "late":
        time.sleep(LATE_SECONDS)
    if rule.effect == "ignore":
        environ.pop("HTTP_IF_MATCH", None)
        environ.pop("HTTP_IF_NONE_MATCH", None)
    if rule.effect == "lost":
        list(inner(environ, start))
    if rule.effect in ("reset", "lost"):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError
    return None


def _refuse(start: Start, status: str, body: bytes) -> list[bytes]:
    start(status, [("Content-Type", "application/xml")])
    return [body]


def _drain(environ: dict[str, Any]) -> None:
    length = int(environ.get("CONTENT_LENGTH") or 0)
    environ["wsgi.input"].read(length)


def _hide_keys(listing: bytes, hidden: list[str]) -> bytes:
    """Remove entries from a listing; blanks keep its length, which is in a header already."""
    text = listing.decode()
    for name in hidden:
        for tag in ("CommonPrefixes", "Contents"):
            pattern = rf"<{tag}>(?:(?!</{tag}>).)*{re.escape(name)}.*?</{tag}>"
            text = re.sub(pattern, lambda match: " " * len(match[0]), text, flags=re.DOTALL)
    return text.encode()


@contextmanager
def start_store() -> Iterator[Store]:
    """Run the server in a thread for the duration of the block."""
    store = Store("")
    inner = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, _build_application(inner, store), threaded=True)
    try:
        with serve(server, "store") as store.url:
            yield store
    finally:
        moto_api_backend.reset()
