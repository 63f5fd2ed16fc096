"""Request failures, each with an HTTP status."""

from __future__ import annotations


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
