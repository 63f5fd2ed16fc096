"""Requests for text that wait for a place in a batch: admission, fair order and deadlines.

It does no I/O. A request is admitted if its first token is expected in time: the steps until a
place is free, times the measured time per step. Clients share the places by fair queueing. A client
may fill half of the time limit alone, and with others less, so that there is room for one more.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from heapq import heapify, heapreplace, nlargest
from operator import attrgetter
from typing import TYPE_CHECKING

from regauge.serving.request_errors import DeadlineError, OverloadedError, UnavailableError
from regauge.serving.scheduler import MARGIN, SMOOTHING, FairQueue, QueuedRecord, QueuedRequest
from regauge.serving.text_generation.prompt_slices import BUSY_FACTOR
from regauge.serving.text_generation.text_requests import TextRequest, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import numpy as np

    from regauge.models.settings import Generation
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_client import TextWorker
    from regauge.serving.workers.worker_pool import WorkerPool

RESERVED_SHARE = 8
"""One of this many places is kept for clients without an answer in progress."""
READING_FACTOR = BUSY_FACTOR / (BUSY_FACTOR - 1)
"""How much longer it takes to read prompts beside answers."""
SLACK_SHARE = 0.2
"""Time limit share kept for answers with an unexpected length: requests that would start in it are
taken as they arrived, and new ones are refused from half of it."""
TYPICAL_TOKENS = 512
"""Length of an answer that may be longer, until answers have been measured."""
MAX_RETRY_SECONDS = 60
"""Maximum wait advised to a refused client."""


class TokenStream:
    """One request's events."""

    def __init__(
        self, queue: TextQueue, request: TextRequest, record: QueuedRecord, deadline: float
    ) -> None:
        """Take the request, how it waits, and the deadline of the whole answer."""
        self.request = request
        self.record = record
        self.worker: TextWorker | None = None
        """The worker that has the request; None while it waits."""
        self.sent_at = 0.0
        """Time at which the worker got the request, on time.monotonic()."""
        self.num_tokens = 0
        """How many tokens have been generated."""
        self._queue = queue
        self._start = time.monotonic()
        self._deadline = deadline
        self._token_deadline = record.request.deadline
        self._events: deque[TokenEvent] = deque()
        self._has_news = asyncio.Event()
        self._has_ended = False
        self.is_lost = False
        """Whether the worker ended before the answer."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def waited_seconds(self) -> float:
        """How long ago the request arrived."""
        return time.monotonic() - self._start

    def put(self, event: TokenEvent) -> None:
        """Store an event without waiting for the reader."""
        self._token_deadline = time.monotonic() + self._queue.token_seconds
        if event.token is not None:
            self._queue.count_token(self)
            self.num_tokens += 1
        self._events.append(event)
        self._has_news.set()
        if event.finish_reason is not None:
            self._queue.finish(self)

    async def read(self) -> list[TokenEvent]:
        """Return all events since the last call, at least one; empty after the end.

        Raises DeadlineError if the next token is late or the deadline has passed, and
        UnavailableError if the worker ended.
        """
        if self._has_ended:
            return []
        await self._wait()
        events = list(self._events)
        self._events.clear()
        if not self.is_lost:
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
        self.is_lost = True
        self._has_news.set()
        self._queue.finish(self)

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self._has_ended = True
        self._queue.remove(self)


class TextQueue:
    """A model's requests for text."""

    def __init__(
        self,
        pool: WorkerPool[TextWorker],
        settings: TextServing,
        on_token: Callable[[TokenStream], object] = lambda _: None,
    ) -> None:
        self._on_token = on_token
        self._read_at = 0.0
        self.token_seconds = settings.token_seconds
        """Time limit for each token after the first."""
        self._pool = pool
        self._settings = settings
        self._queue = FairQueue(0.0)
        self._waiting: dict[QueuedRecord, TokenStream] = {}
        self._running: list[TokenStream] = []
        self._numbers = itertools.count()
        self._steps_ratio = 1.0
        self._num_measured = 1  # the expected steps count as a measurement

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def estimate_wait(self) -> float:
        """Return the expected seconds until a new request would get a place."""
        return self._estimate_starts(self._queue.records)[-1]

    def add(
        self,
        prompt: np.ndarray,
        generation: Generation,
        number: int = 0,
        *,
        client: Hashable = None,
        timeout_seconds: float = math.inf,
    ) -> TokenStream:
        """Queue a request; `prompt` is [tokens] int32.

        Raises OverloadedError if the first token would be late, UnavailableError without a worker,
        and DataError if the request does not fit the limits.
        """
        if not self._workers:
            raise UnavailableError("no process that generates text is ready", retry_after=1)
        limits = self._workers[0].limits
        generation = generation.model_copy(update={"stop": ()})
        count = generation.max_new_tokens or 1
        limits.check(prompt.tolist(), count)
        steps = len(prompt) / self._settings.max_batch_tokens + min(count, TYPICAL_TOKENS)
        self._check_room(client, steps, timeout_seconds, len(prompt))
        now = time.monotonic()
        seconds = self._settings.first_token_seconds if limits.has_streams else math.inf
        queued = QueuedRequest(client, "interactive", now + min(seconds, timeout_seconds))
        record = QueuedRecord(queued, 0, 0, steps, number=next(self._numbers))
        request = TextRequest(str(record.number), prompt, generation, number)
        stream = TokenStream(self, request, record, now + timeout_seconds)
        self._queue.add(record)
        self._waiting[record] = stream
        self.fill_workers()
        return stream

    def count_token(self, stream: TokenStream) -> None:
        """Take a token that a stream is about to count; the first one ends reading a prompt."""
        if not stream.num_tokens:
            self._read_at = time.monotonic()
        self._on_token(stream)

    def fill_workers(self) -> None:
        """Send waiting requests to workers with room."""
        while (choice := self._select()) is not None:
            index, worker = choice
            [record] = self._queue.take([index])
            stream = self._waiting.pop(record)
            stream.worker, stream.sent_at = worker, time.monotonic()
            self._running.append(stream)
            worker.send(stream)

    def finish(self, stream: TokenStream) -> None:
        """Give the place of a request that has ended to the next one."""
        if stream in self._running:
            self._running.remove(stream)
            if stream.is_lost:
                return
            self._num_measured += 1
            ratio = stream.num_tokens / stream.record.cost
            weight = max(SMOOTHING, 1 / self._num_measured)
            self._steps_ratio += weight * (ratio - self._steps_ratio)
        self.fill_workers()

    def remove(self, stream: TokenStream) -> None:
        """Cancel a request unless it has ended."""
        if self._waiting.pop(stream.record, None) is not None:
            self._queue.remove(stream.record.request)
        elif stream in self._running and stream.worker is not None:
            self._running.remove(stream)
            stream.worker.forget(stream.request.request_id)
            self.fill_workers()

    @property
    def _workers(self) -> list[TextWorker]:
        return [worker for worker in self._pool.ready if not worker.has_ended]

    def _select(self) -> tuple[int, TextWorker] | None:
        """Return the index of the next request, and its worker; None without a place.

        It is the first in fair order, or in the order of arrival if that would make one late.
        """
        records = self._queue.records
        if not records or not any(map(_count_places, self._workers)):
            return None
        arrived = sorted(records, key=attrgetter("number"))
        clients: set[Hashable] = set()
        for record in arrived if self._is_any_late(arrived) else records:
            client = record.request.client
            if client not in clients and (worker := self._find_worker(client)) is not None:
                return records.index(record), worker
            clients.add(client)
        return None

    def _is_any_late(self, arrived: Sequence[QueuedRecord]) -> bool:
        """Return whether a first token is nearly late if requests start in this order."""
        slack = SLACK_SHARE * self._settings.first_token_seconds
        token_seconds, reading = self._prompt_token_seconds, self._estimate_reading(0)
        reading -= sum(map(self._count_prompt_tokens, arrived)) * token_seconds
        now = time.monotonic() + slack
        for start, record in zip(self._estimate_starts(arrived), arrived, strict=False):
            seconds = self._count_prompt_tokens(record) * token_seconds
            reading += seconds
            if now + max(start + seconds, reading) > record.request.deadline:
                return True
        return False

    def _count_prompt_tokens(self, record: QueuedRecord) -> int:
        return self._waiting[record].num_prompt_tokens

    def _find_worker(self, client: Hashable) -> TextWorker | None:
        """Return the worker with the most places for a client, or None without a place."""
        is_running = any(item.record.request.client == client for item in self._running)

        def count_places(worker: TextWorker) -> int:
            reserved = worker.limits.max_running // RESERVED_SHARE if is_running else 0
            return _count_places(worker) - reserved

        worker = max(self._workers, key=count_places, default=None)
        return None if worker is None or count_places(worker) <= 0 else worker

    def _check_room(
        self, client: Hashable, steps: float, timeout_seconds: float, num_prompt_tokens: int
    ) -> None:
        """Raise OverloadedError if the first token, or the last one before a timeout, is late."""
        earlier = [record for record in self._queue.records if record.request.client == client]
        reading_seconds = self._estimate_reading(num_prompt_tokens)
        is_read_in_time = reading_seconds <= self._settings.first_token_seconds
        if not earlier and is_read_in_time and self._find_worker(client) is not None:
            return
        step_seconds = self._step_seconds * self._steps_ratio
        client_seconds = sum(record.cost for record in earlier) * step_seconds / self._num_places
        own_seconds = num_prompt_tokens * self._prompt_token_seconds
        wait = max(self.estimate_wait() + client_seconds + own_seconds, reading_seconds)
        limit = min(self._settings.first_token_seconds, timeout_seconds - steps * step_seconds)
        is_full = self.num_waiting >= self._settings.max_queued_requests
        if is_full or wait > (1 - SLACK_SHARE / 2) * limit:
            message = f"{self.num_waiting} requests wait for {wait:.1f} s; try again later"
            seconds = min(max(1, math.ceil(wait - max(limit, 0))), MAX_RETRY_SECONDS)
            raise OverloadedError(message, retry_after=seconds)

    def _estimate_reading(self, num_prompt_tokens: int) -> float:
        """Return the seconds until all prompts up to a new one have been read; alone, 0.

        Beside running answers, prompts are read in a part of each step.
        """
        unread = [stream for stream in self._running if not stream.num_tokens]
        streams = [*self._waiting.values(), *unread]
        if not streams:
            return 0.0
        num_prompt_tokens += sum(stream.num_prompt_tokens for stream in streams)
        seconds = num_prompt_tokens * self._prompt_token_seconds / len(self._workers)
        start = max(self._read_at, min((item.sent_at for item in unread), default=math.inf))
        return max(0.0, seconds - max(0.0, time.monotonic() - start))

    @property
    def _prompt_token_seconds(self) -> float:
        """Expected time to read a prompt token beside running answers, with a margin."""
        rates = [worker.prompt_token_seconds for worker in self._workers]
        return MARGIN * READING_FACTOR * sum(rates) / max(1, len(rates))

    @property
    def _step_seconds(self) -> float:
        """Expected time per token of each answer, with a margin."""
        workers = self._workers
        return MARGIN * sum(worker.step_seconds for worker in workers) / max(1, len(workers))

    @property
    def _num_places(self) -> int:
        """Number of places for clients with an answer in progress."""
        counts = [worker.limits.max_running for worker in self._workers]
        return max(1, sum(count - count // RESERVED_SHARE for count in counts))

    def _estimate_steps(self, stream: TokenStream) -> float:
        """Return how many more tokens a running answer is expected to have.

        An answer that is longer than expected may last half as long again.
        """
        expected = stream.record.cost * self._steps_ratio
        longest = stream.request.max_new_tokens - stream.num_tokens
        return max(1.0, expected - stream.num_tokens, min(longest, expected / 2))

    def _estimate_starts(self, records: Sequence[QueuedRecord]) -> list[float]:
        """Return the seconds until each record, in this order, and one more get a place."""
        places = self._num_places
        steps = nlargest(places, map(self._estimate_steps, self._running))
        steps += [0.0] * (places - len(steps))
        heapify(steps)
        step_seconds, starts = self._step_seconds, []
        for record in records:
            starts.append(steps[0] * step_seconds)
            heapreplace(steps, steps[0] + record.cost * self._steps_ratio)
        return [*starts, steps[0] * step_seconds]


def _count_places(worker: TextWorker) -> int:
    return worker.limits.max_running - worker.num_requests
