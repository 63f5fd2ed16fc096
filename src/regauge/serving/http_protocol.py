"""Turns HTTP requests into route calls, and failures into answers.

Each protocol formats errors in its own way. Everything else is the same for all routes: API keys,
body limits, JSON, deadlines, priorities, and metrics.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
import zlib
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from regauge.serving.dispatcher import RequestOptions
from regauge.serving.model_set import RECORD_KINDS
from regauge.serving.model_slot import TRIAL, CanaryTrial
from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import (
    FieldError,
    InvalidRequestError,
    MediaTypeError,
    OverloadedError,
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    UnknownModelError,
)
from regauge.serving.web_origins import check_origin
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Executor
    from contextlib import AbstractAsyncContextManager

    from regauge.models.io_spec import OutputKind
    from regauge.serving.api_keys import ApiKeys
    from regauge.serving.model_set import ModelSet
    from regauge.serving.model_version import ModelVersion, Outputs
    from regauge.serving.scheduler import Priority
    from regauge.serving.server_metrics import ServerMetrics
    from regauge.serving.settings import Serve

    FormatError = Callable[[RequestError], tuple[int, dict[str, Any]]]
    """Returns a protocol's status and document for a failure."""

TIMEOUT_HEADER, PRIORITY_HEADER = "regauge-timeout-ms", "regauge-priority"
ID_HEADER = "X-Request-Id"
REQUEST_ID = re.compile(r"[!-~]{1,128}")
TRUNCATED_HEADER = "regauge-truncated-records"
"""Answer header with the number of truncated records."""
PRIORITIES: tuple[Priority, ...] = ("interactive", "bulk")
MODEL_KEY = "regauge.model"
"""Key in a request's scope: the model named in the path."""
DISCONNECTED = 499
"""Status in the metrics after a client has left."""


T = TypeVar("T")
State = Literal["starting", "ready", "draining"]
OVERLOAD_SECONDS = 2.0
"""How long after a refusal the server reports overload."""


@dataclass
class ServerContext:
    """A server's state."""

    settings: Serve
    models: ModelSet
    metrics: ServerMetrics
    api_keys: ApiKeys
    executor: Executor
    """Threads for long work, such as tokenizing long texts."""
    state: State = "starting"
    body_bytes: int = 0
    """Total size of the bodies being received or processed."""
    refused_at: float = -math.inf
    """Time of the last refusal due to overload."""
    tasks: dict[tuple[str, int], set[asyncio.Task[object]]] = field(default_factory=dict)
    """Connection address -> tasks answering requests."""

    async def run_in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, function, *arguments)

    @property
    def has_refused(self) -> bool:
        """Whether a request was refused due to overload in the last seconds."""
        return time.monotonic() - self.refused_at < OVERLOAD_SECONDS

    @property
    def is_overloaded(self) -> bool:
        """Whether every model would refuse a new request."""
        limit = self.settings.queue.max_wait_seconds
        versions = self.models.loaded_versions
        return bool(versions) and all(version.is_overloaded(limit) for version in versions)


B = TypeVar("B", bound=RequestBody)
C = TypeVar("C", bound=RequestBody)


class EmptyBody(RequestBody):
    """A request without a JSON body."""

    @classmethod
    def parse(cls, raw_body: bytes, headers: Mapping[str, str]) -> Self:
        del raw_body, headers
        return cls()


class SlowBodyError(RequestError):
    """The body did not arrive in time."""

    status = 408


@dataclass(frozen=True)
class Call(Generic[B]):
    """A request to a route, with the parsed body."""

    context: ServerContext
    """Server state."""
    request: Request
    """The request, whose body is already read."""
    body: B
    """Parsed body."""
    raw_body: bytes
    """Body bytes."""
    client: Any
    """Client for fair sharing of the processors."""

    def use_model(
        self,
        name: str | None,
        kinds: Sequence[OutputKind] = RECORD_KINDS,
        num_texts: int | None = None,
    ) -> AbstractAsyncContextManager[ModelVersion]:
        """Keep a model loaded within the block; see `ModelSet.use_for_records`."""
        return self.context.models.use_for_records(self.choose_name(name), kinds, num_texts)

    def choose_name(self, name: str | None) -> str | None:
        """Return the model named by the path or the body; raises UnknownModelError for two."""
        prefix: str | None = self.request.scope.get(MODEL_KEY)
        if prefix is not None and name not in {None, prefix}:
            problem = f"the path names the model '{prefix}', but the request '{str(name)[:80]}'"
            raise UnknownModelError(problem)
        return prefix or name

    def with_body(self, schema: type[C], raw_body: bytes) -> Call[C]:
        """Return a call to another route; raises InvalidRequestError for an invalid body."""
        body = schema.parse(raw_body, self.request.headers)
        return Call(self.context, self.request, body, raw_body, self.client)

    def build_options(
        self,
        num_records: int,
        *,
        priority: Priority | None = None,
        timeout_seconds: float | None = None,
    ) -> RequestOptions:
        """Return how to serve a request with this many records.

        `priority` and `timeout_seconds` come from the body and take precedence over the headers.
        Raises InvalidRequestError for a wrong header or without records, and TooLargeError for too
        many.
        """
        queue, headers = self.context.settings.queue, self.request.headers
        if not num_records:
            raise InvalidRequestError("the request does not contain an input")
        if num_records > queue.max_request_records:
            problem = f"{num_records} records are over the limit of {queue.max_request_records}"
            raise TooLargeError(problem)
        automatic = "interactive" if num_records <= queue.interactive_records else "bulk"
        name = priority or headers.get(PRIORITY_HEADER, automatic)
        if name not in PRIORITIES:
            raise InvalidRequestError(f"{PRIORITY_HEADER} is not one of {', '.join(PRIORITIES)}")
        timeout = min(read_timeout(headers), queue.timeout_seconds)
        if timeout_seconds is not None:
            timeout = min(timeout, timeout_seconds)
        return RequestOptions(self.client, "bulk" if name == "bulk" else "interactive", timeout)


@dataclass(frozen=True)
class RouteSpec(Generic[B]):
    """A route: method, path, and the function that answers requests."""

    method: str
    """GET or POST."""
    path: str
    """Path, with parameters in starlette's notation."""
    handle: Callable[[Call[B]], Awaitable[Response]]
    """Answers a request; raises RequestError."""
    body: type[B]
    """Body schema."""
    summary: str
    """What it does, for the OpenAPI page."""
    max_body_bytes: float = math.inf
    """Maximum body, if it is smaller than `serve.http.max_body_bytes`."""
    query: tuple[str, ...] = ()
    """Names of the query parameters; a request with another one is refused."""

    def check_query(self, names: Sequence[str]) -> None:
        """Raise FieldError for query parameters without an effect."""
        for name in names:
            if name not in self.query:
                remedy = f"it reads {', '.join(self.query)}" if self.query else "it reads none"
                problem = f"this path does not read the query parameter '{name[:80]}'"
                raise FieldError(f"{problem}; {remedy}", name[:80])
            if names.count(name) > 1:
                raise FieldError(f"the query parameter '{name}' occurs twice", name)

    @property
    def is_probe(self) -> bool:
        """Whether load balancers and monitors call it; metrics then leave it out."""
        return self.path in OPEN_PATHS or self.path.endswith(("/ready", "/metrics"))


def build_route(context: ServerContext, spec: RouteSpec[Any], format_error: FormatError) -> Route:
    """Build a route that checks the API key, formats failures, and counts the answers."""

    async def endpoint(request: Request) -> Response:
        start = time.perf_counter()
        status, trial = DISCONNECTED, CanaryTrial()
        try:
            response = await _answer(context, spec, request, trial)
            status = response.status_code
        except RequestError as error:
            response = build_error_response(error, format_error)
            status = response.status_code
            if isinstance(error, OverloadedError):
                context.refused_at = time.monotonic()
        except ClientDisconnect:
            raise
        except Exception:  # noqa: BLE001 - one request fails, and the server continues
            logger.exception("%s %s failed (%s)", spec.method, spec.path, read_request_id(request))
            failure = RequestError("internal server error; see the server log")
            response = build_error_response(failure, format_error)
            status = response.status_code
        finally:
            seconds = time.perf_counter() - start
            if not spec.is_probe:
                context.metrics.count_request(spec.path, trial.model, status, seconds)
            log_request(context, request, status, seconds)
        response.headers[ID_HEADER] = read_request_id(request)
        return response

    return Route(spec.path, endpoint, methods=[spec.method], name=spec.path)


def read_request_id(request: Request) -> str:
    """Return the client's id for a request, or a random one."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get(ID_HEADER, "")
        request.state.request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    request_id: str = request.state.request_id
    return request_id


def log_request(context: ServerContext, request: Request, status: int, seconds: float) -> None:
    """Log a request until the start of its answer, if the settings ask for it."""
    if context.settings.http.access_log:
        client = request.client.host if request.client else "-"
        path, request_id = request.scope["path"], read_request_id(request)
        message = "%s %s %r %d %.1f ms %s"
        logger.info(message, client, request.method, path, status, 1e3 * seconds, request_id)


async def _answer(
    context: ServerContext, spec: RouteSpec[Any], request: Request, trial: CanaryTrial
) -> Response:
    is_open = spec.path in OPEN_PATHS
    if not is_open:
        check_origin(context.settings, request.headers)
    client = _authenticate(context, request, is_open=is_open)
    spec.check_query([name for name, _ in request.query_params.multi_items()])
    start = time.perf_counter()
    limit = min(spec.max_body_bytes, context.settings.http.max_body_bytes)
    async with receive_body(context, request, limit) as raw_body:
        body = spec.body.parse(raw_body, request.headers)
        context.metrics.add_phase("read", time.perf_counter() - start)
        call = Call(context, request, body, raw_body, client)
        return await trial.run(partial(spec.handle, call))


CHALLENGE = 'Bearer, Basic realm="API key as the password"'
"""Schemes of API keys; a browser asks for the password, so the search page opens."""
OPEN_PATHS = frozenset({"/health", "/ping", "/v2/health/live", "/v2/health/ready"})
"""Paths without an API key, for load balancers."""


def build_error_response(error: RequestError, format_error: FormatError) -> Response:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = CHALLENGE
    if isinstance(error, MediaTypeError):
        headers["Accept-Encoding"] = "gzip, deflate"
    if isinstance(error, SlowBodyError):
        headers["Connection"] = "close"
    status, document = format_error(error)
    return build_json_response(document, status=status, headers=headers)


def build_json_response(
    document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON answer; the document may contain numpy arrays."""
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, "application/json")


def build_output_response(context: ServerContext, document: Any, outputs: Outputs) -> Response:
    """Return an answer with outputs; a header counts the truncated records."""
    start = time.perf_counter()
    if (trial := TRIAL.get()) is not None:
        trial.num_failures += len(outputs.failures)
    count = int(outputs.is_truncated.sum())
    headers = {TRUNCATED_HEADER: str(count)} if count else None
    response = build_json_response(document, headers=headers)
    context.metrics.add_phase("serialize", time.perf_counter() - start)
    return response


def _authenticate(context: ServerContext, request: Request, *, is_open: bool) -> Any:
    """Return the client: an API key, or an address on a server without keys."""
    if not context.api_keys.is_required:
        return request.client and request.client.host
    client = context.api_keys.find_client(request.headers.get("authorization"))
    if client is None and not is_open:
        raise UnauthorizedError("a valid API key is required")
    return client


@asynccontextmanager
async def receive_body(
    context: ServerContext, request: Request, max_bytes: float
) -> AsyncIterator[bytes]:
    """Receive a request's body; the bytes are counted until the end of the block.

    Raises UnavailableError, OverloadedError, TooLargeError or SlowBodyError.
    """
    if request.method == "GET":
        yield b""
        return
    limits = context.settings.http
    if context.state == "starting":
        raise UnavailableError("the server is starting", retry_after=1)
    if context.is_overloaded:
        raise OverloadedError("the queue is full", retry_after=1)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        _check_size(int(declared), max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            async for chunk in request.stream():
                _check_size(len(body) + len(chunk), max_bytes)
                _count_bytes(context, len(chunk))
                body += chunk
    except TimeoutError:
        context.body_bytes -= len(body)
        problem = f"the body did not arrive within {limits.body_timeout_seconds:g} s"
        raise SlowBodyError(problem) from None
    except BaseException:
        context.body_bytes -= len(body)
        raise
    try:
        yield _decompress(bytes(body), request.headers, int(max_bytes))
    finally:
        context.body_bytes -= len(body)


def _decompress(body: bytes, headers: Mapping[str, str], limit: int) -> bytes:
    """Return a body without its content encoding.

    Raises MediaTypeError, TooLargeError, or InvalidRequestError for a damaged body.
    """
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in {"gzip", "x-gzip", "deflate"}:
        raise MediaTypeError(f"content encoding '{encoding[:80]}' is not gzip or deflate")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # detects the header of gzip or zlib
    try:
        content = decoder.decompress(body, limit + 1)
    except zlib.error:
        raise InvalidRequestError(f"the body is not valid {encoding}") from None
    _check_size(len(content), limit)
    if not decoder.eof:
        raise InvalidRequestError(f"the {encoding} body is incomplete")
    return content


def _check_size(size: int, limit: float) -> None:
    if size > limit:
        raise TooLargeError(f"the body is over the limit of {limit:.0f} bytes")


def _count_bytes(context: ServerContext, count: int) -> None:
    """Count received bytes; raises OverloadedError if all bodies together are too large."""
    if context.body_bytes + count > context.settings.http.max_total_body_bytes:
        raise OverloadedError("too many bytes are being received", retry_after=1)
    context.body_bytes += count


def read_timeout(headers: Mapping[str, str]) -> float:
    """Return the seconds in which the client wants an answer; infinity if it does not say."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return math.inf
    try:
        seconds = float(text) / 1e3
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"{TIMEOUT_HEADER} is not a positive number")
    return seconds
