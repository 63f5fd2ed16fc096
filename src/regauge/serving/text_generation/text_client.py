"""The server's side of text generation: admission, deadlines and cancellation."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from regauge.serving.request_errors import (
    DeadlineError,
    OverloadedError,
    UnavailableError,
)
from regauge.serving.text_generation.text_requests import EngineLimits, TextRequest, TokenEvent
from regauge.serving.wire import encode_message
from regauge.serving.workers.worker_process import WorkerProcess

if TYPE_CHECKING:
    import numpy as np

    from regauge.models.settings import Generation
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.wire import Message

RECENT_SECONDS = 30.0
"""Period over which ended requests are counted, to estimate a new one's wait."""
MAX_RETRY_SECONDS = 60
"""Maximum wait advised to a refused client."""


class TokenStream:
    """One request's events."""

    def __init__(
        self, worker: TextWorker, request_id: str, times: TextServing, deadline: float
    ) -> None:
        """Take the time limits for tokens, and the deadline of the whole answer."""
        self._worker = worker
        self._request_id = request_id
        self._deadline = deadline
        self._token_seconds = times.token_seconds
        has_limits = worker.limits.has_streams
        self._token_deadline = (
            time.monotonic() + times.first_token_seconds if has_limits else math.inf
        )
        self._events: deque[TokenEvent] = deque()
        self._has_news = asyncio.Event()
        self._has_ended = False

    def put(self, event: TokenEvent) -> None:
        """Store an event without waiting for the reader."""
        self._token_deadline = time.monotonic() + self._token_seconds
        self._events.append(event)
        self._has_news.set()

    async def read(self) -> list[TokenEvent]:
        """Return all events since the last call, at least one; empty after the end.

        Raises DeadlineError if the next token is late or the deadline has passed, and
        InferenceError if the worker ended.
        """
        if self._has_ended:
            return []
        await self._wait()
        events = list(self._events)
        self._events.clear()
        self._has_news.clear()
        self._has_ended = events[-1].finish_reason is not None
        return events

    async def _wait(self) -> None:
        deadline = min(self._deadline, self._token_deadline)
        remaining = None if math.isinf(deadline) else deadline - time.monotonic()
        try:
            async with asyncio.timeout(remaining):
                await self._has_news.wait()
        except TimeoutError:
            self.close()
            message = "the next token was not generated in time; try again later"
            if deadline == self._deadline:
                message = (
                    "the answer was not complete in time; allow more time, or lower max_tokens"
                )
            raise DeadlineError(message) from None
        if not self._events:
            message = "the process that generated the answer ended; send the request again"
            raise UnavailableError(message, retry_after=1)

    def end(self) -> None:
        """Make the reader fail, because the worker ended."""
        self._has_news.set()

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self._has_ended = True
        self._worker.forget(self._request_id)


class TextWorker(WorkerProcess):
    """A worker process that generates text, and the requests sent to it."""

    exit_seconds = 5.0
    silence_problem = "did not produce a token"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.limits = EngineLimits(**self.ready_header["limits"])
        """Engine limits."""
        self.heartbeat: dict[str, Any] = {"step_seconds": 0.0, "running": 0, "waiting": 0}
        """The last heartbeat: how long the current step takes, and how many requests are running
        and waiting."""
        self.num_tokens = 0
        """How many tokens the worker has generated."""
        self._last_message = time.monotonic()
        self._streams: dict[str, TokenStream] = {}
        self._numbers = itertools.count()
        self._ends: deque[float] = deque()
        self._problem = "the worker process ended"

    @property
    def silent_seconds(self) -> float:
        """How long the current step takes, or the last message is ago, whichever is longer."""
        return max(time.monotonic() - self._last_message, float(self.heartbeat["step_seconds"]))

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    def start_answer(
        self,
        prompt: np.ndarray,
        generation: Generation,
        number: int = 0,
        timeout_seconds: float = math.inf,
    ) -> TokenStream:
        """Send a request and return its stream; `prompt` is [tokens] int32.

        Raises OverloadedError if too many requests wait, UnavailableError without a worker, and
        DataError if the request does not fit the limits.
        """
        generation = generation.model_copy(update={"stop": ()})
        self.limits.check(prompt.tolist(), generation.max_new_tokens or 1)
        self._check_room()
        request = TextRequest(str(next(self._numbers)), prompt, generation, number)
        deadline = time.monotonic() + timeout_seconds
        stream = TokenStream(self, request.request_id, self._settings.generation, deadline)
        self._streams[request.request_id] = stream
        header = {
            "type": "add",
            "id": request.request_id,
            "options": generation.model_dump(),
            "number": number,
        }
        self._writer.write(encode_message(header, [prompt]))
        return stream

    def forget(self, request_id: str) -> None:
        """Cancel an unfinished request."""
        if self._streams.pop(request_id, None) is not None and not self.has_ended:
            self._writer.write(encode_message({"type": "cancel", "id": request_id}))

    def fail_requests(self) -> None:
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()

    def _check_room(self) -> None:
        """Raise an error if a new request must not be sent."""
        if self.has_ended:
            raise UnavailableError(self._problem, retry_after=1)
        room = self.limits.max_running + self._settings.generation.max_queued_requests
        if self.num_requests >= room:
            message = f"{self.num_requests} requests are running or waiting; try again later"
            raise OverloadedError(message, retry_after=self._estimate_wait())

    def _estimate_wait(self) -> int:
        """Return the seconds until the queue is halved, at the recent rate."""
        start = time.monotonic() - RECENT_SECONDS
        while self._ends and self._ends[0] < start:
            self._ends.popleft()
        rate = len(self._ends) / RECENT_SECONDS
        if not rate:
            return MAX_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(self.num_requests / 2 / rate)))

    def _handle(self, message: Message) -> None:
        header = message.header
        self._last_message = time.monotonic()
        if header["type"] == "failed":
            self._problem = f"the worker process ended: {header['message']}"
        elif header["type"] == "heartbeat":
            self.heartbeat = header
        for values in header.get("events", ()):
            event = TokenEvent(*values)
            stream = self._streams.get(event.request_id)
            self.num_tokens += event.token is not None
            if event.finish_reason is not None:
                self._ends.append(self._last_message)
                self._streams.pop(event.request_id, None)
            if stream is not None:
                stream.put(event)
