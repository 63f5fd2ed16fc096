"""Client errors: the message in an answer, and the exception for a status."""

from __future__ import annotations

import datetime as dt
import json
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from regauge.system.errors import DataError, RegaugeError, SettingsError, TransientError

RETRIED = frozenset((429, 502, 503, 504))
"""Statuses worth retrying."""
MAX_MESSAGE = 300
"""Maximum characters of a server's message in an error."""


def build_status_error(url: str, status: int, body: bytes) -> RegaugeError:
    """Return the exception for an error status, with the server's message."""
    message = f"{url} answers {status}: {read_message(status, body)}"
    if status in {401, 403}:
        return SettingsError(message, "set api_key to a key of this server")
    if status in {404, 405}:
        return SettingsError(message, "correct the url or the model")
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return DataError(message, "lower texts_per_request, or shorten the texts")
    if status in {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}:
        return TransientError(message, "lower in_flight, raise timeout_seconds or try again later")
    if status in RETRIED or status == HTTPStatus.FAILED_DEPENDENCY or status >= 500:  # noqa: PLR2004
        return TransientError(message, "see the log of the server")
    return DataError(message, "correct the request")


def read_message(status: int, body: bytes) -> str:
    """Extract an error message in OpenAI's form, TEI's form, or plain text."""
    text = body.decode(errors="replace").strip()
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if isinstance(document, dict):
        error = document.get("error") or document.get("detail") or document.get("message")
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error or text)
    words = " ".join(text.split())[:MAX_MESSAGE]
    return words or _find_phrase(status)


def _find_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no message"


def parse_retry_after(header: str | None, now: dt.datetime) -> float | None:
    """Return the seconds in a Retry-After header, a number or a date; None if unusable."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=dt.UTC)
    return max(0.0, (date - now).total_seconds())
