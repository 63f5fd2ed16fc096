"""The process that sends one request: `python -m regauge.monitoring.notify.send_request`.

It reads the request from standard input. After a failure it prints the problem and ends with code
1, or with code 2 if a retry is useless. Its parent kills it at the time limit. It does not follow
redirects or read answer bodies. A hostile server gets little CPU time, and cannot fill the memory.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import smtplib
import ssl
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from regauge.system.children import die_with_parent
from regauge.system.errors import first_line
from regauge.system.json_files import parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping

TRANSIENT, PERMANENT = 1, 2
"""Exit codes after a failure."""
MAX_MEMORY_BYTES = 2**30
NICENESS = 10
MAX_PROBLEM_LENGTH = 1000
RETRIED_STATUSES = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
"""Client error statuses after which a retry may succeed."""
MIN_PERMANENT_REPLY = 500
"""First permanent SMTP reply code."""


class _PermanentError(Exception):
    """A refusal that a retry cannot change."""


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Reports a redirect as an error: an event must not reach another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, which makes the redirect an HTTPError."""


def _post(request: Mapping[str, Any]) -> None:
    """Send an HTTP request; the environment's proxy variables apply."""
    context = ssl.create_default_context(cafile=request["ca_file"])
    opener = urllib.request.build_opener(
        _RefuseRedirects(), urllib.request.HTTPSHandler(context=context)
    )
    message = urllib.request.Request(  # noqa: S310 (the settings permit only http and https)
        request["url"], request["body"].encode(), request["headers"], method="POST"
    )
    opener.open(message, timeout=request["timeout_seconds"]).close()


def _send_mail(request: Mapping[str, Any]) -> None:
    """Send an e-mail to all recipients; a refused recipient is a permanent problem."""
    context = ssl.create_default_context(cafile=request["ca_file"])
    address = request["host"], request["port"]
    limit = request["timeout_seconds"]
    if request["security"] == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(*address, timeout=limit, context=context)
    else:
        server = smtplib.SMTP(*address, timeout=limit)
    with server:
        if request["security"] == "starttls":
            server.starttls(context=context)
        if request["username"] is not None:
            server.login(request["username"], request["password"])
        refused = server.sendmail(request["sender"], request["to"], request["message"])
    if refused:
        raise _PermanentError(f"refused: {', '.join(sorted(refused))}")


def _describe_failure(error: Exception) -> tuple[str, bool]:
    if isinstance(error, _PermanentError):
        return str(error), True
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code < HTTPStatus.BAD_REQUEST:
            return f"status {error.code}, a redirect, which is not followed", True
        is_server_error = error.code >= HTTPStatus.INTERNAL_SERVER_ERROR
        return f"status {error.code}", not is_server_error and error.code not in RETRIED_STATUSES
    cause: object = error.reason if isinstance(error, urllib.error.URLError) else error
    replies = []
    if isinstance(cause, smtplib.SMTPResponseException):
        replies = [cause.smtp_code]
    elif isinstance(cause, smtplib.SMTPRecipientsRefused):
        replies = [code for code, _ in cause.recipients.values()]
    is_permanent = bool(replies) and min(replies) >= MIN_PERMANENT_REPLY
    is_permanent |= isinstance(cause, ssl.SSLCertVerificationError | smtplib.SMTPNotSupportedError)
    return f"{type(cause).__name__}: {first_line(cause)}", is_permanent


def main() -> None:
    """Send the request read from standard input."""
    die_with_parent()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    request = parse_object(sys.stdin.buffer.read())
    signal.alarm(math.ceil(request["timeout_seconds"]) + 1)  # if nobody is left to kill it
    try:
        {"http": _post, "smtp": _send_mail}[request["kind"]](request)
    except Exception as error:  # noqa: BLE001 (an answer of a server may raise anything)
        problem, is_permanent = _describe_failure(error)
        sys.stdout.buffer.write(problem[:MAX_PROBLEM_LENGTH].encode(errors="replace"))
        raise SystemExit(PERMANENT if is_permanent else TRANSIENT) from None


if __name__ == "__main__":
    main()
