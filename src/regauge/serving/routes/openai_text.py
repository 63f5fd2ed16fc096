"""OpenAI's routes for text: `/v1/completions` and `/v1/chat/completions`.

An answer is one JSON document, or a stream of server-sent events. If a client disconnects,
generation ends.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import StreamingResponse

from regauge.serving.http_protocol import Call, RouteSpec, build_json_response, read_timeout
from regauge.serving.request_errors import (
    ContextLengthError,
    DeadlineError,
    InferenceError,
    InvalidRequestError,
    RequestError,
    UnavailableError,
)
from regauge.serving.routes.openai import format_openai_error
from regauge.serving.text_generation.openai_requests import ChatRequest, CompletionRequest
from regauge.serving.text_generation.text_requests import RequestTooLongError
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy as np
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from regauge.inference.export.text_stream import AnswerText
    from regauge.serving.text_generation.openai_requests import AnswerOptions
    from regauge.serving.text_generation.text_queue import TokenStream
    from regauge.serving.text_generation.text_requests import TokenEvent
    from regauge.serving.text_generation.text_version import TextVersion

KEEP_ALIVE_SECONDS = 15.0
"""Time without a token after which a comment keeps a stream's connection open."""
KEEP_ALIVE = b": keep-alive\n\n"
LAST_EVENT = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def create_completion(call: Call[CompletionRequest]) -> Response:
    return await _generate(call, CompletionFormat)


async def create_chat_completion(call: Call[ChatRequest]) -> Response:
    return await _generate(call, ChatFormat)


class CompletionFormat:
    """Documents for `/v1/completions`."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, model: TextVersion) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    def format_answer(self, answers: Sequence[Answer], texts: list[str], usage: Any) -> Any:
        """Return the document for complete answers."""
        choices = [
            self._format_choice(answer, self._format_text(text))
            for answer, text in zip(answers, texts, strict=True)
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def format_chunk(self, choices: list[Any], **usage: Any) -> bytes:
        """Return a stream event."""
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices, **usage}
        return format_event(chunk)

    def format_start(self, answer: Answer) -> list[Any]:
        """Return the choices in an answer's first chunk, if any."""
        del answer
        return []

    def format_part(self, answer: Answer, part: str) -> Any:
        """Return the choice for part of an answer; an empty part ends it."""
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
    """Documents for `/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def format_start(self, answer: Answer) -> list[Any]:
        """Return the choice that names the answer's role."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return [self._format_choice(answer, delta, is_last=False)]

    def _format_text(self, text: str) -> Any:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _format_delta(self, part: str) -> Any:
        return {"delta": {"content": part} if part else {}}


class AnswerStreamResponse(StreamingResponse):
    """An event stream that ends the generation when it is over, read or not."""

    def __init__(self, events: AsyncIterator[bytes], stack: AsyncExitStack) -> None:
        super().__init__(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


class Answer:
    """One answer to a prompt, as it is generated."""

    def __init__(self, index: int, text: AnswerText, stream: TokenStream) -> None:
        """Take the empty text, and the stream of tokens to decode."""
        self.index = index
        """Index in the request."""
        self.num_tokens = 0
        """How many tokens the answer has so far."""
        self.finish_reason: str | None = None
        """`stop` or `length` after the end."""
        self._text = text
        self._stream = stream

    async def read_parts(self) -> AsyncIterator[str]:
        """Yield the text's parts; raises RequestError if the answer fails."""
        while events := await self._stream.read():
            part = self._add(events)
            if self.finish_reason is not None:
                self._stream.close()
            if part:
                yield part
            if self.finish_reason is not None:
                return

    async def collect_text(self) -> str:
        return "".join([part async for part in self.read_parts()])

    def close(self) -> None:
        """Cancel the answer if it has not ended."""
        self._stream.close()

    def _add(self, events: Sequence[TokenEvent]) -> str:
        part = ""
        for event in events:
            if event.token is not None:
                part += self._text.add([event.token])
                self.num_tokens += 1
                if self._text.has_stopped:
                    self.finish_reason = "stop"
                    return part
            if event.finish_reason == "error":
                raise InferenceError(f"the model failed to generate: {event.message}")
            if event.finish_reason == "cancelled":
                raise UnavailableError("the request was cancelled by the server", retry_after=1)
            if event.finish_reason is not None:
                self.finish_reason = event.finish_reason
                part += self._text.finish()
        return part


async def merge_parts(
    answers: Sequence[Answer], idle_seconds: float
) -> AsyncIterator[tuple[Answer, str] | None]:
    """Yield parts of several answers as they arrive; an empty part ends an answer.

    Yields None if nothing arrived for some seconds. Raises RequestError if an answer fails.
    """
    parts: asyncio.Queue[tuple[Answer, str] | RequestError] = asyncio.Queue(maxsize=1)

    async def forward(answer: Answer) -> None:
        try:
            async for part in answer.read_parts():
                await parts.put((answer, part))
        except RequestError as error:
            await parts.put(error)
        else:
            await parts.put((answer, ""))

    tasks = [asyncio.create_task(forward(answer)) for answer in answers]
    num_open = len(tasks)
    try:
        while num_open:
            item: Any = None
            try:
                async with asyncio.timeout(idle_seconds):
                    item = await parts.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, RequestError):
                raise item
            num_open -= not item[1]
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _generate(call: Call[Any], formatter: type[CompletionFormat]) -> Response:
    options: CompletionRequest | ChatRequest = call.body
    timeout = read_timeout(call.request.headers)
    try:
        async with AsyncExitStack() as stack:
            name = call.choose_name(options.model)
            model = call.context.models.use_for_text(name)
            version = await stack.enter_async_context(model)
            prompts = await call.context.run_in_thread(options.encode_prompts, version)
            answers = _start_answers(stack, version, call, prompts, timeout)
            output = formatter(version)
            num_prompt_tokens = sum(map(len, prompts))
            if options.stream:
                shown_tokens = num_prompt_tokens if options.includes_usage else None
                events = _stream_events(version, answers, output, shown_tokens)
                return AnswerStreamResponse(events, stack.pop_all())
            texts = await _collect_texts(answers)
            version.num_answers += 1
            usage = _count_usage(answers, num_prompt_tokens)
            return build_json_response(output.format_answer(answers, texts, usage))
    except RequestTooLongError as error:
        raise ContextLengthError(str(error)) from None
    except DataError as error:
        raise InvalidRequestError(str(error)) from None


def _start_answers(
    stack: AsyncExitStack,
    model: TextVersion,
    call: Call[Any],
    prompts: Sequence[np.ndarray],
    timeout_seconds: float,
) -> list[Answer]:
    """Start answering all prompts; the stack ends the answers."""
    answers: list[Answer] = []
    options: AnswerOptions = call.body
    for prompt in prompts:
        generation = options.build_generation(model, prompt)
        for _ in range(options.num_answers):
            stream = model.queue.add(
                prompt,
                generation,
                len(answers),
                client=call.client,
                timeout_seconds=timeout_seconds,
            )
            answer = Answer(len(answers), model.build_answer(generation), stream)
            answers.append(answer)
            stack.callback(answer.close)
    return answers


async def _stream_events(
    version: TextVersion,
    answers: Sequence[Answer],
    output: CompletionFormat,
    num_prompt_tokens: int | None,
) -> AsyncIterator[bytes]:
    """Yield the answers' events; with `num_prompt_tokens`, usage follows at the end."""
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
        version.has_failed |= not isinstance(error, DeadlineError)
        _, document = format_openai_error(error)
        yield format_event(document)
        return
    version.num_answers += 1
    if num_prompt_tokens is not None:
        yield output.format_chunk([], usage=_count_usage(answers, num_prompt_tokens))
    yield LAST_EVENT


async def _collect_texts(answers: Sequence[Answer]) -> list[str]:
    """Return the answers' texts; raises the first failure."""
    return list(await asyncio.gather(*(answer.collect_text() for answer in answers)))


def _count_usage(answers: Sequence[Answer], num_prompt_tokens: int) -> dict[str, int]:
    num_new_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_new_tokens,
        "total_tokens": num_prompt_tokens + num_new_tokens,
    }


def format_event(document: Any) -> bytes:
    """Return a server-sent event with a JSON document."""
    return b"data: " + orjson.dumps(document) + b"\n\n"


ROUTES: tuple[RouteSpec[Any], ...] = (
    RouteSpec("POST", "/v1/completions", create_completion, CompletionRequest, "Continue texts."),
    RouteSpec(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        ChatRequest,
        "Answer a conversation.",
    ),
)
