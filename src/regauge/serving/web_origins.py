"""Web pages whose requests a server accepts, by the Origin and Host headers of a browser."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from regauge.serving.request_errors import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.serving.settings import Serve

PORT = re.compile(r":\d*$")


def check_origin(settings: Serve, headers: Mapping[str, str]) -> None:
    """Raise ForbiddenError for requests that a web page sends without permission.

    A browser sends any page's requests to a local server. A page whose own host name resolves to
    this machine could read the answers as well, so the host name counts, too.
    """
    allowed, host = settings.http.allowed_origins, headers.get("host", "")
    if "*" in allowed:
        return
    origin = headers.get("origin")
    if origin is not None and origin not in allowed and origin.partition("://")[2] != host:
        problem = f"web pages of {origin[:80]} may not use this server"
        raise ForbiddenError(f"{problem}; add it to serve.http.allowed_origins")
    hosts = {known.partition("://")[2] for known in allowed}
    is_public = not is_loopback(settings.host)
    if not (is_public or host in hosts or _is_local_name(host)):
        problem = f"the host name {host[:80]} is not one of this server"
        raise ForbiddenError(f"{problem}; add http://{host[:80]} to serve.http.allowed_origins")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local_name(host: str) -> bool:
    """Return whether a Host header is an address or a local name, which no web site can own."""
    name = PORT.sub("", host).strip("[]")
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return "." not in name or name.endswith(".localhost")
