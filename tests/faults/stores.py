"""An S3 server on loopback whose answers can be made to fail."""

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

from loopback import running

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
    """Which requests fail, and how."""

    method: str
    match: str
    """A part of the path or the query."""
    how: str
    """`slow` answers 503, `late` answers after `LATE_SECONDS`, `reset` closes the connection,
    `cut` closes it in the middle of an answer, `deny` answers 403, `hide` leaves keys out of a
    listing."""
    count: int = 1
    """How many of them."""
    struck: int = 0


@dataclass
class Store:
    """The server, and the rules that it breaks."""

    url: str
    rules: list[Rule] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def _application(whole: Any, store: Store) -> Callable[[dict[str, Any], Start], Iterable[bytes]]:
    def application(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        address = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        for rule in store.rules:
            if rule.method == method and rule.match in address and rule.struck < rule.count:
                rule.struck += 1
                if rule.how == "slow":
                    _read(environ)
                    start("503 Slow Down", [("Content-Type", "application/xml")])
                    return [SLOW_DOWN]
                if rule.how == "deny":
                    start("403 Forbidden", [("Content-Type", "application/xml")])
                    return [DENIED if method != "HEAD" else b""]
                if rule.how == "cut":
                    body = b"".join(whole(environ, start))
                    return [body[: len(body) // 2]]
                if rule.how == "late":
                    time.sleep(LATE_SECONDS)
                if rule.how == "reset":
                    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                    raise ConnectionResetError
        found: Iterable[bytes] = whole(environ, start)
        hidden = [rule.match for rule in store.rules if rule.how == "hide"]
        if method == "GET" and "list-type" in address and hidden:
            return [_without(b"".join(found), hidden)]
        return found

    return application


def _read(environ: dict[str, Any]) -> None:
    length = int(environ.get("CONTENT_LENGTH") or 0)
    environ["wsgi.input"].read(length)


def _without(listing: bytes, hidden: list[str]) -> bytes:
    """Leave entries out of a listing; blanks keep its length, which was told before."""
    text = listing.decode()
    for name in hidden:
        for tag in ("CommonPrefixes", "Contents"):
            pattern = rf"<{tag}>(?:(?!</{tag}>).)*{re.escape(name)}.*?</{tag}>"
            text = re.sub(pattern, lambda match: " " * len(match[0]), text, flags=re.DOTALL)
    return text.encode()


@contextmanager
def started() -> Iterator[Store]:
    """Run the server in a thread for as long as the block lasts."""
    store = Store("")
    whole = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, _application(whole, store), threaded=True)
    try:
        with running(server, "store") as store.url:
            yield store
    finally:
        moto_api_backend.reset()
