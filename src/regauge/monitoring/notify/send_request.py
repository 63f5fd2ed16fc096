"""The process that sends one request: `python -m regauge.monitoring.notify.send_request`.

It reads the request from standard input and prints one JSON document: `problem`, empty after a
success, and `is_permanent`, whether a retry is useless. Its parent kills it at its time limit. It
follows no redirect and reads no body of an answer. A hostile server gets little processor time,
and cannot fill the memory.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import smtplib
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from regauge.system.errors import first_line
from regauge.system.json_files import parse_object
from regauge.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MEMORY_BYTES = 2**30
NICENESS = 10
MAX_PROBLEM_LENGTH = 1000
RETRIED_STATUSES = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS}
"""Statuses of a client error after which a retry may succeed."""
MIN_PERMANENT_REPLY = 500
"""Replies of SMTP from this number on are permanent."""


@dataclass(frozen=True)
class SendOutcome:
    """How a request ended."""

    problem: str = ""
    """One line; empty after a success."""
    is_permanent: bool = False


class RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Reports a redirect as an error: an event must not reach another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, which makes the redirect an HTTPError."""


def send_request(request: Mapping[str, Any]) -> SendOutcome:
    """Send a request once; errors of the server are an outcome."""
    send = {"http": _post, "smtp": _send_mail}[request["kind"]]
    try:
        return send(request)
    except urllib.error.URLError as error:
        return _describe_failure(error.reason)
    except Exception as error:  # noqa: BLE001 (an answer of a server may raise anything)
        return _describe_failure(error)


def _post(request: Mapping[str, Any]) -> SendOutcome:
    """Send an HTTP request; the proxy variables of the environment apply."""
    context = ssl.create_default_context(cafile=request["ca_file"])
    opener = urllib.request.build_opener(
        RefuseRedirects(), urllib.request.HTTPSHandler(context=context)
    )
    message = urllib.request.Request(  # noqa: S310 (the settings permit only http and https)
        request["url"], request["body"].encode(), request["headers"], method="POST"
    )
    try:
        with opener.open(message, timeout=request["timeout_seconds"]) as answer:
            return _judge_status(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return _judge_status(error.code)


def _judge_status(status: int) -> SendOutcome:
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return SendOutcome()
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return SendOutcome(f"status {status}, a redirect, which is not followed", is_permanent=True)
    is_client_error = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
    return SendOutcome(f"status {status}", is_client_error and status not in RETRIED_STATUSES)


def _send_mail(request: Mapping[str, Any]) -> SendOutcome:
    """Send an e-mail to all recipients; one of them that is refused is a permanent problem."""
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
    problem = f"refused: {', '.join(sorted(refused))}" if refused else ""
    return SendOutcome(problem, is_permanent=bool(refused))


def _describe_failure(error: object) -> SendOutcome:
    is_permanent = isinstance(error, ssl.SSLCertVerificationError | smtplib.SMTPNotSupportedError)
    if isinstance(error, smtplib.SMTPResponseException):
        is_permanent = error.smtp_code >= MIN_PERMANENT_REPLY
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        codes = [code for code, _ in error.recipients.values()]
        is_permanent = min(codes) >= MIN_PERMANENT_REPLY
    problem = f"{type(error).__name__}: {first_line(error)}"
    return SendOutcome(problem[:MAX_PROBLEM_LENGTH], is_permanent)


def main() -> None:
    """Send the request of standard input and print the outcome."""
    die_with_parent()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    request = parse_object(sys.stdin.buffer.read())
    signal.alarm(math.ceil(request["timeout_seconds"]) + 1)  # if nobody is left to kill it
    sys.stdout.write(json.dumps(asdict(send_request(request))))


if __name__ == "__main__":
    main()
