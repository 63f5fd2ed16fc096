"""Request failures, each with an HTTP status."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationError

MAX_ERROR_TEXT = 300
"""Maximum characters in a message about a body."""
MAX_LOCATED_ERRORS = 1000
"""Errors of a body among which the first one is described."""


class RequestError(Exception):
    """A request that is not answered with outputs."""

    status = 500
    code = "server_error"
    """Kind of failure, as named in OpenAI's API."""

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        """Seconds after which the client should try again, or None."""
        self.field: str | None = None
        """The wrong body field, if it is one."""


class UnauthorizedError(RequestError):
    """The request lacks a valid API key."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """A web page of another origin sends the request."""

    status = 403
    code = "origin_not_allowed"


class NotFoundError(RequestError):
    """The server has nothing at this path."""

    status = 404
    code = "not_found"


class UnknownModelError(NotFoundError):
    """The server does not have a model by this name."""

    code = "model_not_found"


class TooLargeError(RequestError):
    """The body, a text or the number of records is over a limit."""

    status = 413
    code = "too_large"


class TooManyRecordsError(TooLargeError):
    """The records take too long for one request, even on an idle server."""

    def __init__(self, problem: str, num_records: int) -> None:
        remedy = f"send at most {num_records} of these records at once"
        super().__init__(f"{problem}; {remedy if num_records else 'shorten the first one'}")
        self.problem = problem
        self.num_records = num_records
        """How many of the first records are not too many."""


class ContextLengthError(TooLargeError):
    """A text is longer than the model reads."""

    code = "context_length_exceeded"


class MediaTypeError(RequestError):
    """The body has a content type or encoding that the route does not read."""

    status = 415


class InvalidRequestError(RequestError):
    """The request has a wrong form, or asks for something the model cannot do."""

    status = 422
    code = "invalid_request"


class FieldError(InvalidRequestError):
    """A key in the body is invalid."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


class InferenceError(RequestError):
    """The model failed to compute a record."""

    status = 424
    code = "inference_failed"


class OverloadedError(RequestError):
    """The request would wait too long."""

    status = 429
    code = "overloaded"


class UnavailableError(RequestError):
    """The server is starting, draining, or without a worker."""

    status = 503
    code = "unavailable"


class DeadlineError(RequestError):
    """The request was not answered in time."""

    status = 504
    code = "deadline_exceeded"


def describe_validation_error(error: ValidationError, raw_body: bytes) -> tuple[str, str | None]:
    """Return one line about the first error in a body, and its key.

    For a value that fits no alternative of a union, the alternative that fits furthest counts.
    """
    details = error.errors(include_url=False, include_context=False, include_input=False)
    document = None if details[0]["type"] == "json_invalid" else from_json(raw_body or b"{}")
    firsts: dict[tuple[int | str, ...], tuple[list[int], str, str | None]] = {}
    indices: dict[int, dict[str, int]] = {}
    for detail in details[:MAX_LOCATED_ERRORS]:
        position, names = _locate(document, detail["loc"], indices)
        message = detail["msg"][:1].lower() + detail["msg"][1:]
        text = f"{'.'.join(map(str, names))}: {message}" if names else message
        alternative = tuple(part for part in detail["loc"] if part not in names)
        first = position, text, str(names[0]) if names else None
        firsts[alternative] = min(firsts.get(alternative, first), first, key=itemgetter(0))
    start = min(position[:1] for position, _, _ in firsts.values())
    candidates = (first for first in firsts.values() if first[0][:1] == start)
    _, text, key = max(candidates, key=itemgetter(0))
    return text[:MAX_ERROR_TEXT], key


def _locate(
    document: Any, location: Sequence[int | str], indices: dict[int, dict[str, int]]
) -> tuple[list[int], list[int | str]]:
    """Return the indices and the names of the keys and items on the way to a location.

    A missing key follows all others. Names of a union's alternatives are left out. `indices` keeps
    the order of each object's keys, because a body may have thousands of wrong ones.
    """
    position: list[int] = []
    names: list[int | str] = []
    for part in location:
        if isinstance(document, dict):
            if (order := indices.get(id(document))) is None:
                order = {key: index for index, key in enumerate(document)}
                indices[id(document)] = order
            position.append(order.get(str(part), len(order)))
            document = document.get(part)
        elif isinstance(document, list) and isinstance(part, int):
            position.append(part)
            document = document[part]
        else:
            continue
        names.append(part)
    return position, names
