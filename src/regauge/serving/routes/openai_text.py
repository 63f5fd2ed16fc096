"""OpenAI's routes for text: `/v1/completions` and `/v1/chat/completions`.

An answer is one JSON document, or a stream of server-sent events. A client that disconnects ends
the generation of its answers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

import orjson
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from regauge.errors import DataError
from regauge.serving.request_errors import (
    DeadlineError,
    InferenceError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    TooLargeError,
    UnavailableError,
    UnknownModelError,
)
from regauge.serving.text_generation.answers import Answer, merge_parts
from regauge.serving.text_generation.openai_requests import (
    ChatRequest,
    CompletionRequest,
    FieldError,
)
from regauge.serving.text_generation.text_requests import RequestTooLongError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from regauge.serving.text_generation.served_text_model import ServedTextModel

TIMEOUT_HEADER = "Regauge-Timeout-Ms"
KEEP_ALIVE_SECONDS = 15.0
"""Time without a token after which a comment keeps the connection of a stream open."""
KEEP_ALIVE = b": keep-alive\n\n"
LAST_EVENT = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
CLIENT_CLOSED = 499
"""Status of a request whose client has disconnected; nobody reads it."""
JSON = "application/json"
ERROR_CODES: dict[int, str] = {
    UnknownModelError.status: "model_not_found",
    TooLargeError.status: "context_length_exceeded",
    OverloadedError.status: "overloaded",
}
ERROR_TYPES: dict[int, str] = {
    InferenceError.status: "server_error",
    OverloadedError.status: "rate_limit_error",
    RequestError.status: "server_error",
    UnavailableError.status: "server_error",
    DeadlineError.status: "server_error",
}
"""The `type` of an error by its status; for any other one it is `invalid_request_error`."""


class TextContext(Protocol):
    """What the routes need of the server."""

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request."""

    @property
    def timeout_seconds(self) -> float | None:
        """Time in which a request is answered; the header lowers it."""

    def use_text_model(self, name: str | None) -> AbstractAsyncContextManager[ServedTextModel]:
        """Keep a model loaded while a request is answered; None is the default model.

        Raises UnknownModelError, or UnavailableError.
        """


def build_routes(context: TextContext) -> list[Route]:
    """Return the routes of text generation."""

    async def complete(request: Request) -> Response:
        return await _answer(request, context, CompletionRequest, CompletionFormat)

    async def chat(request: Request) -> Response:
        return await _answer(request, context, ChatRequest, ChatFormat)

    return [
        Route("/v1/completions", _report_errors(complete), methods=["POST"]),
        Route("/v1/chat/completions", _report_errors(chat), methods=["POST"]),
    ]


class CompletionFormat:
    """The documents of `/v1/completions`."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, model: ServedTextModel) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    def format_answer(self, answers: Sequence[Answer], texts: list[str], usage: Any) -> Any:
        """Return the document of complete answers."""
        choices = [
            self._format_choice(answer, self._format_text(text))
            for answer, text in zip(answers, texts, strict=True)
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def format_chunk(self, choices: list[Any], **usage: Any) -> bytes:
        """Return an event of a stream."""
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices, **usage}
        return format_event(chunk)

    def format_start(self, answer: Answer) -> list[Any]:
        """Return the choices of the first chunk of an answer; empty if there is none."""
        del answer
        return []

    def format_part(self, answer: Answer, part: str) -> Any:
        """Return the choice of a part of an answer; an empty part is its end."""
        content = self._format_delta(part)
        return self._format_choice(answer, content, is_last=not part)

    def _format_choice(self, answer: Answer, content: Any, *, is_last: bool = True) -> Any:
        reason = answer.finish_reason if is_last else None
        return {"index": answer.index, **content, "logprobs": None, "finish_reason": reason}

    def _format_text(self, text: str) -> Any:
        return {"text": text}

    def _format_delta(self, part: str) -> Any:
        return {"text": part}


class ChatFormat(CompletionFormat):
    """The documents of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def format_start(self, answer: Answer) -> list[Any]:
        """Return the choice that names the role of the answer."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._format_choice(answer, delta, is_last=False)]

    def _format_text(self, text: str) -> Any:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _format_delta(self, part: str) -> Any:
        return {"delta": {"content": part} if part else {}}


class AnswerStreamResponse(StreamingResponse):
    """A stream of events that ends the generation when it is over, read or not."""

    def __init__(self, events: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        async with self._stack:
            await super().__call__(scope, receive, send)


async def _answer(
    request: Request,
    context: TextContext,
    schema: type[CompletionRequest | ChatRequest],
    formatter: type[CompletionFormat],
) -> Response:
    """Generate the answers of a request; raises RequestError or DataError."""
    options = schema.parse(await _read_body(request, context.max_body_bytes))
    timeout_seconds = _read_timeout(request, context.timeout_seconds)
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(context.use_text_model(options.model))
        prompts = options.encode_prompts(model)
        answers: list[Answer] = []
        for prompt in prompts:
            generation = options.build_generation(model, prompt)
            for _ in range(options.num_answers):
                answer = Answer(model, len(answers), prompt, generation, timeout_seconds)
                answers.append(answer)
                stack.callback(answer.close)
        num_prompt_tokens = sum(map(len, prompts))
        output = formatter(model)
        if options.stream:
            usage = num_prompt_tokens if options.includes_usage else None
            events = _stream_events(answers, output, usage)
            return AnswerStreamResponse(events, stack.pop_all())
        texts = await _run_while_connected(request, _collect_texts(answers))
        if texts is None:
            return Response(status_code=CLIENT_CLOSED)
        document = output.format_answer(answers, texts, _count_usage(answers, num_prompt_tokens))
        return Response(orjson.dumps(document), media_type=JSON)


async def _stream_events(
    answers: Sequence[Answer], output: CompletionFormat, num_prompt_tokens: int | None
) -> AsyncIterator[bytes]:
    """Yield the events of answers; the number of prompt tokens asks for usage at the end."""
    empty: dict[str, Any] = {} if num_prompt_tokens is None else {"usage": None}
    for answer in answers:
        if choices := output.format_start(answer):
            yield output.format_chunk(choices, **empty)
    try:
        async for item in merge_parts(answers, KEEP_ALIVE_SECONDS):
            if item is None:
                yield KEEP_ALIVE
            else:
                yield output.format_chunk([output.format_part(*item)], **empty)
    except RequestError as error:
        yield format_event(_describe_error(error.message, error.status, None))
        return
    if num_prompt_tokens is not None:
        yield output.format_chunk([], usage=_count_usage(answers, num_prompt_tokens))
    yield LAST_EVENT


async def _collect_texts(answers: Sequence[Answer]) -> list[str]:
    """Return the texts of answers; the first failure is raised."""
    return list(await asyncio.gather(*(answer.collect_text() for answer in answers)))


async def _run_while_connected(request: Request, work: Awaitable[list[str]]) -> list[str] | None:
    """Return the result of work, or None if the client disconnects before; work is cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected; the body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request; raises TooLargeError."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise TooLargeError(f"the body has more than {max_bytes} bytes")
    return bytes(body)


def _read_timeout(request: Request, default: float | None) -> float | None:
    """Return the seconds in which a request is answered; raises InvalidRequestError."""
    value = request.headers.get(TIMEOUT_HEADER)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or not int(value):
        raise InvalidRequestError(f"{TIMEOUT_HEADER} is not a positive number of milliseconds")
    seconds = int(value) / 1000
    return seconds if default is None else min(seconds, default)


def _count_usage(answers: Sequence[Answer], num_prompt_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    num_new_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


def format_event(document: Any) -> bytes:
    """Return a server-sent event with a JSON document."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


def _report_errors(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that answers with an error of OpenAI's schema if a request fails."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            name = error.field if isinstance(error, FieldError) else None
            retry = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
            document = _describe_error(error.message, error.status, name)
            status, headers = error.status, retry
        except DataError as error:
            error_class = (
                TooLargeError if isinstance(error, RequestTooLongError) else InvalidRequestError
            )
            status, headers = error_class.status, {}
            document = _describe_error(str(error), status, None)
        return Response(orjson.dumps(document), status, headers, JSON)

    return handle


def _describe_error(message: str, status: int, field: str | None) -> dict[str, Any]:
    """Return the document of an error."""
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    code = ERROR_CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
