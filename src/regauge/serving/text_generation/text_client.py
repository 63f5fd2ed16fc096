"""The asyncio side of a text worker: admission, deadlines and cancellation of requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from regauge.serving.request_errors import (
    DeadlineError,
    InferenceError,
    OverloadedError,
    UnavailableError,
)
from regauge.serving.text_generation.text_requests import EngineLimits, TextRequest, TokenEvent
from regauge.serving.wire import encode_message, read_message
from regauge.system.errors import ChildError, PreflightError

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    import numpy as np

    from regauge.models.settings import Generation
    from regauge.serving.text_generation.settings import TextServing

RECENT_SECONDS = 30.0
"""The time over which ended requests are counted, to estimate the wait of a new one."""
MAX_RETRY_SECONDS = 60
"""Longest wait that a refused client is advised."""


class TextHeartbeat(NamedTuple):
    """The last heartbeat of a worker."""

    steps: int
    """Number of steps since the start."""
    step_seconds: float
    """How long the current step takes; 0 between steps."""
    running: int
    """Number of requests that are computed."""
    waiting: int
    """Number of requests that wait in the worker."""


class TokenStream:
    """The events of one request, as an asynchronous iterator and context manager.

    Leaving the context cancels a request that has not ended.
    """

    def __init__(self, client: TextWorkerClient, request_id: str, deadline: float | None) -> None:
        self._client = client
        self._request_id = request_id
        self._deadline = deadline
        self._events: deque[TokenEvent] = deque()
        self._has_news = asyncio.Event()
        self.has_ended = False
        """Whether the last event was read."""

    def put(self, event: TokenEvent) -> None:
        """Store an event for the reader; the reader is never waited for."""
        self._events.append(event)
        self._has_news.set()

    async def read(self) -> list[TokenEvent]:
        """Return all events since the last call, at least one; empty after the end.

        Raises DeadlineError after the deadline, and InferenceError if the worker ended.
        """
        if self.has_ended:
            return []
        await self._wait()
        events = list(self._events)
        self._events.clear()
        self._has_news.clear()
        self.has_ended = events[-1].finish_reason is not None
        return events

    async def _wait(self) -> None:
        """Wait for events until the deadline."""
        remaining = None if self._deadline is None else self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(remaining):
                await self._has_news.wait()
        except TimeoutError:
            self.close()
            message = "the answer was not complete in time; allow more time, or lower max_tokens"
            raise DeadlineError(message) from None
        if not self._events:
            message = "the process that generated the answer ended; send the request again"
            raise InferenceError(message)

    def end(self) -> None:
        """Let the reader fail, because the worker ended."""
        self._has_news.set()

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self.has_ended = True
        self._client.forget(self._request_id)

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel the request unless it has ended."""
        self.close()


def _check_ready(header: dict[str, Any]) -> None:
    """Raise ChildError if the first message of a worker is its error."""
    if header["type"] == "error":
        raise ChildError(header["code"], f"{header['error']}; {header['remedy']}")


class TextWorkerClient:
    """Sends requests to a worker process over a socket, and distributes its events."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: EngineLimits,
        settings: TextServing,
    ) -> None:
        self.limits = limits
        """The limits of the engine."""
        self.heartbeat = TextHeartbeat(0, 0.0, 0, 0)
        """The last heartbeat."""
        self.num_tokens = 0
        """Number of tokens that the worker has generated."""
        self.last_message = time.monotonic()
        """When the last message arrived, by `time.monotonic`."""
        self._reader = reader
        self._writer = writer
        self._settings = settings
        self._streams: dict[str, TokenStream] = {}
        self._numbers = itertools.count()
        self._ends: deque[float] = deque()
        self._error: str | None = None
        self._task = asyncio.create_task(self._receive(), name="text-worker-events")

    @classmethod
    async def connect(cls, connection: socket.socket, settings: TextServing) -> Self:
        """Return the client of a worker after it has loaded its model.

        Raises ChildError with the error of the worker, and PreflightError if it ends without one.
        """
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            header = (await read_message(reader)).header
            _check_ready(header)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()
            problem = "a worker ended while it loaded the model"
            raise PreflightError(problem, "see its messages above") from None
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, EngineLimits(**header["limits"]), settings)

    @property
    def is_alive(self) -> bool:
        """Whether the worker is connected."""
        return self._error is None

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def start_answer(
        self,
        prompt: np.ndarray,
        generation: Generation,
        number: int = 0,
        timeout_seconds: float | None = None,
    ) -> TokenStream:
        """Send a request and return its stream; `prompt` is [tokens] int32.

        Raises OverloadedError if too many requests wait, UnavailableError without a worker, and
        DataError if the request does not fit the limits.
        """
        generation = generation.model_copy(update={"stop": ()})
        self.limits.check(prompt.tolist(), generation.max_new_tokens or 1)
        self._check_room()
        request = TextRequest(str(next(self._numbers)), prompt, generation, number)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        stream = TokenStream(self, request.request_id, deadline)
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
        """Cancel a request that has not ended."""
        if self._streams.pop(request_id, None) is not None and self.is_alive:
            self._writer.write(encode_message({"type": "cancel", "id": request_id}))

    async def wait_until_lost(self) -> None:
        """Return when the worker has ended."""
        await asyncio.shield(self._task)

    def request_end(self) -> None:
        """Ask the worker to end; requests that it has fail."""
        if self.is_alive:
            self._writer.write(encode_message({"type": "shutdown"}))

    async def close(self) -> None:
        """Close the connection, which ends the worker; requests that it has fail."""
        self._writer.close()
        await self._task
        with contextlib.suppress(OSError):  # the worker may close the connection first
            await self._writer.wait_closed()

    def _check_room(self) -> None:
        """Raise an error if a new request must not be sent."""
        if self._error is not None:
            raise UnavailableError(self._error, retry_after=1)
        room = self.limits.max_running + self._settings.max_queued_requests
        if self.num_requests >= room:
            message = f"{self.num_requests} requests are running or waiting; try again later"
            raise OverloadedError(message, retry_after=self._estimate_wait())

    def _estimate_wait(self) -> int:
        """Return the seconds until the queue is a half shorter, at the rate of the last time."""
        start = time.monotonic() - RECENT_SECONDS
        while self._ends and self._ends[0] < start:
            self._ends.popleft()
        rate = len(self._ends) / RECENT_SECONDS
        if not rate:
            return MAX_RETRY_SECONDS
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(self.num_requests / 2 / rate)))

    async def _receive(self) -> None:
        """Distribute the messages of the worker until it ends."""
        message = "the worker process ended"
        try:
            while True:
                header = (await read_message(self._reader)).header
                self.last_message = time.monotonic()
                if header["type"] == "failed":
                    message = f"the worker process ended: {header['message']}"
                self._handle(header)
        except (asyncio.IncompleteReadError, OSError):
            self._error = message
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()

    def _handle(self, header: dict[str, Any]) -> None:
        """Handle a message of the worker."""
        if header["type"] == "heartbeat":
            values = {name: header[name] for name in TextHeartbeat._fields}
            self.heartbeat = TextHeartbeat(**values)
        for values in header.get("events", ()):
            event = TokenEvent(*values)
            stream = self._streams.get(event.request_id)
            self.num_tokens += event.token is not None
            if event.finish_reason is not None:
                self._ends.append(self.last_message)
                self._streams.pop(event.request_id, None)
            if stream is not None:
                stream.put(event)
