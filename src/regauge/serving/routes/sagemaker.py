"""SageMaker's container contract: `/ping` and `/invocations`.

The fields of a request body select the API that answers it. Contract source:
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from starlette.responses import Response

from regauge.serving.http_protocol import Call, EmptyBody, RouteSpec
from regauge.serving.request_errors import InvalidRequestError, MediaTypeError, TooLargeError
from regauge.serving.routes.health import show_health
from regauge.serving.routes.openai import EmbeddingsBody, create_embeddings
from regauge.serving.routes.openai_text import create_chat_completion, create_completion
from regauge.serving.routes.tei import AnyBody, answer_by_model
from regauge.serving.text_generation.openai_requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

LINES_TYPES = ("application/jsonlines", "application/x-jsonlines", "application/x-ndjson")
JSON_TYPES = (
    "",
    "application/json",
    "application/octet-stream",  # clients that set no type
    "application/x-www-form-urlencoded",  # the default of curl
)


class _InvocationLine(AnyBody):
    """Body of another route."""

    input: Any = None
    """Input for `/v1/embeddings`."""
    prompt: Any = None
    """Prompt for `/v1/completions`."""
    messages: Any = None
    """Messages for `/v1/chat/completions`."""


class InvocationBody(_InvocationLine):
    """Body of `/invocations`: that of another route."""

    forms = (*AnyBody.forms, EmbeddingsBody, CompletionRequest, ChatRequest)

    @classmethod
    def parse(cls, raw_body: bytes, headers: Mapping[str, str]) -> Self:
        """Return an empty body, because the content type decides how it is parsed."""
        del raw_body, headers
        return cls()


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
        raise InvalidRequestError("the request does not contain a line")
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
    parsed = call.with_body(_InvocationLine, raw_body)
    if parsed.body.messages is not None:
        return await create_chat_completion(call.with_body(ChatRequest, raw_body))
    if parsed.body.prompt is not None:
        return await create_completion(call.with_body(CompletionRequest, raw_body))
    if parsed.body.input is not None:
        return await create_embeddings(call.with_body(EmbeddingsBody, raw_body))
    return await answer_by_model(call.with_body(AnyBody, raw_body))


ROUTES: tuple[RouteSpec[Any], ...] = (
    RouteSpec("GET", "/ping", show_health, EmptyBody, "Return the state, for SageMaker."),
    RouteSpec(
        "POST",
        "/invocations",
        _invoke,
        InvocationBody,
        "Answer a body of another route, for SageMaker.",
    ),
)
