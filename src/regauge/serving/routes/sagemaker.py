"""SageMaker's container contract: `/ping` and `/invocations`.

The form of a body decides which API answers it. Contract source:
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from regauge.serving.http_protocol import Call, EmptyBody, RouteSpec, build_route
from regauge.serving.request_errors import InvalidRequestError, MediaTypeError, TooLargeError
from regauge.serving.routes.health import show_health
from regauge.serving.routes.openai import EmbeddingsBody, create_embeddings
from regauge.serving.routes.openai_text import create_chat_completion, create_completion
from regauge.serving.routes.tei import AnyBody, answer_by_model, format_tei_error
from regauge.serving.text_generation.openai_requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import Route

    from regauge.serving.server_context import ServerContext

Options = TypeVar("Options", ChatRequest, CompletionRequest)
LINES_TYPES = ("application/jsonlines", "application/x-jsonlines", "application/x-ndjson")
JSON_TYPES = (
    "",
    "application/json",
    "application/octet-stream",  # clients that set no type
    "application/x-www-form-urlencoded",  # the default of curl
)


class InvocationBody(AnyBody):
    """Body of `/invocations`: that of another route."""

    input: Any = None
    """Input for `/v1/embeddings`."""
    prompt: Any = None
    """Prompt for `/v1/completions`."""
    messages: Any = None
    """Messages for `/v1/chat/completions`."""


def build_sagemaker_routes(context: ServerContext) -> list[Route]:
    return [build_route(context, spec, format_tei_error) for spec in list_sagemaker_routes()]


def list_sagemaker_routes() -> list[RouteSpec[Any]]:
    return [
        RouteSpec("GET", "/ping", show_health, EmptyBody, "Return the state, for SageMaker."),
        RouteSpec(
            "POST",
            "/invocations",
            _invoke,
            InvocationBody,
            "Answer a body of another route, for SageMaker.",
            parse=_parse_nothing,
        ),
    ]


def _parse_nothing(request: Request, raw_body: bytes) -> InvocationBody:
    """Return an empty body, because the content type decides how it is parsed."""
    del request, raw_body
    return InvocationBody()


async def _invoke(call: Call[InvocationBody]) -> Response:
    """Answer `/invocations`; each line of JSON lines is a body, answered separately."""
    kind = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in JSON_TYPES:
        return await _answer_body(call, call.raw_body)
    if kind not in LINES_TYPES:
        raise MediaTypeError(f"content type '{kind[:80]}' is not application/json or jsonlines")
    lines = [line for line in call.raw_body.splitlines() if line.strip()]
    limit = call.context.settings.queue.max_request_records
    if not lines:
        raise InvalidRequestError("the request has no line")
    if len(lines) > limit:
        raise TooLargeError(f"{len(lines)} lines are over the limit of {limit}")
    tasks = [asyncio.ensure_future(_answer_body(call, line)) for line in lines]
    try:
        responses = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    body = b"".join(bytes(response.body) + b"\n" for response in responses)
    return Response(body, media_type=kind)


async def _answer_body(call: Call[InvocationBody], raw_body: bytes) -> Response:
    """Answer a body through the route for its form."""
    parsed = call.with_body(InvocationBody, raw_body)
    if parsed.body.messages is not None:
        return await create_chat_completion(_with_options(call, ChatRequest.parse(raw_body)))
    if parsed.body.prompt is not None:
        return await create_completion(_with_options(call, CompletionRequest.parse(raw_body)))
    if parsed.body.input is not None:
        return await create_embeddings(call.with_body(EmbeddingsBody, raw_body))
    return await answer_by_model(call.with_body(AnyBody, raw_body))


def _with_options(call: Call[InvocationBody], options: Options) -> Call[Options]:
    """Return a call to a route that generates text."""
    return Call(call.context, call.request, options, call.raw_body, call.client)
