"""Computes requests: records become batches, and batch outputs become answers.

A record that fails, or whose batch crashes a worker, is recomputed in a separate batch, so it
cannot harm other records. If it fails alone, the request gets status 424.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.inference.export.engine import NON_FINITE
from regauge.inference.export.records import TextRecords
from regauge.serving.request_errors import (
    DeadlineError,
    InferenceError,
    OverloadedError,
    TooManyRecordsError,
    UnavailableError,
)
from regauge.serving.scheduler import QueuedRequest, QueueFullError, WorkLimitError
from regauge.serving.workers.batch_worker import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from regauge.inference.export.records import Records
    from regauge.serving.scheduler import Priority, QueuedRecord, ScheduledBatch, Scheduler
    from regauge.serving.wire import Message
    from regauge.serving.workers.batch_worker import BatchWorker
    from regauge.serving.workers.worker_pool import WorkerPool

QUEUED_BATCHES = 2
"""Batches sent to a worker before the first is answered, so that it never waits."""
MAX_FAILURES = 2
"""How many workers a record may crash."""
SMOOTHING = 0.2
"""Weight of a new measurement in the mean time per text, for token vectors."""


@dataclass(eq=False)
class ComputedRequest(QueuedRequest):
    """A request being computed."""

    records: Records = field(kw_only=True)
    outputs: np.ndarray = field(kw_only=True)
    """Outputs of all records, [records, width] fp32."""
    answer: asyncio.Future[None] = field(kw_only=True)
    num_open: int = field(kw_only=True)
    """Number of records without outputs."""
    failures: dict[int, str] = field(default_factory=dict, kw_only=True)
    """Record index -> failure."""

    def finish_record(self, index: int, failure: str | None) -> None:
        """Mark a record as complete or failed."""
        if failure is not None:
            self.failures[index] = failure
        self.num_open -= 1
        if not self.num_open and not self.answer.done():
            self.answer.set_result(None)


@dataclass(frozen=True)
class RequestOptions:
    """Who sends a request, and how to serve it."""

    client: Hashable
    """Client for fair sharing of the processors."""
    priority: Priority
    timeout_seconds: float


class Dispatcher:
    """Connects a model's scheduler with the workers."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: WorkerPool[BatchWorker],
        output_size: int,
        on_batch: Callable[[ScheduledBatch, float], object],
    ) -> None:
        """Take the parts; `on_batch` is called with each batch and the milliseconds taken."""
        self._scheduler = scheduler
        self._pool = pool
        self._output_size = output_size
        self._on_batch = on_batch
        self._tasks: set[asyncio.Task[None]] = set()
        self._token_vectors = TokenVectorQueue(pool)

    def check_room(self, options: RequestOptions) -> None:
        """Raise OverloadedError or UnavailableError if new requests would be refused."""
        if not self._pool.ready:
            seconds = max(1, round(self._pool.start_seconds))
            raise UnavailableError("no worker is ready", retry_after=seconds)
        try:
            self._scheduler.check_room(options.priority, options.timeout_seconds)
        except QueueFullError as error:
            raise OverloadedError(str(error), retry_after=error.retry_after) from None

    async def compute(
        self, records: Records, lengths: Sequence[int], options: RequestOptions
    ) -> ComputedRequest:
        """Return a request with the outputs or the failure of every record.

        `lengths` are the records' bucket lengths. Raises OverloadedError, UnavailableError,
        DeadlineError or TooManyRecordsError. The records of a cancelled caller leave the queue.
        """
        self.check_room(options)
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        request = ComputedRequest(
            options.client,
            options.priority,
            now + options.timeout_seconds,
            records=records,
            outputs=np.zeros((len(records), self._output_size), np.float32),
            answer=loop.create_future(),
            num_open=len(records),
        )
        try:
            self._scheduler.add(request, lengths, now)
        except QueueFullError as error:
            raise OverloadedError(str(error), retry_after=error.retry_after) from None
        except WorkLimitError as error:
            raise TooManyRecordsError(str(error), error.num_records) from None
        self.fill_workers()
        timer = loop.call_later(options.timeout_seconds, _end_late, request)
        try:
            await request.answer
        finally:
            timer.cancel()
            if request.num_open:
                self._scheduler.cancel(request)
        return request

    async def compute_token_vectors(
        self, texts: Sequence[np.ndarray], options: RequestOptions
    ) -> list[np.ndarray]:
        """Return the token vectors of texts; see `TokenVectorQueue.compute`."""
        self.check_room(options)
        return await self._token_vectors.compute(texts, options)

    def fill_workers(self) -> None:
        """Send waiting batches to workers with room."""
        self._scheduler.num_workers = len(self._pool.ready)
        # Without a second batch the worker idles shortly; with it, an interactive request waits.
        limit = 1 if self._scheduler.is_guarded else QUEUED_BATCHES
        for worker in sorted(self._pool.ready, key=lambda item: item.num_batches):
            while worker.num_batches < limit:
                batch = self._scheduler.take_batch(time.monotonic())
                if batch is None:
                    return
                # Sent now, because the next turn of the loop must see that the worker has it.
                answer = self._send_batch(worker, batch)
                task = asyncio.get_running_loop().create_task(self._finish_batch(batch, answer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _send_batch(self, worker: BatchWorker, batch: ScheduledBatch) -> asyncio.Future[Message]:
        first = _request_of(batch.records[0]).records
        num_texts = first.texts_per_record if isinstance(first, TextRecords) else 0
        header = {"length": batch.length, "texts": num_texts}
        return worker.compute(header, gather_arrays(batch.records))

    async def _finish_batch(self, batch: ScheduledBatch, answer: asyncio.Future[Message]) -> None:
        milliseconds: float | None = None
        try:
            message = await answer
        except WorkerLostError as error:
            self._retry(batch.records, error)
        else:
            milliseconds = message.header.get("milliseconds")
            self._finish_records(batch.records, message)
        finally:
            self._scheduler.finish(batch, milliseconds)
        if milliseconds is not None:
            self._on_batch(batch, milliseconds)
        self.fill_workers()

    def _finish_records(self, records: Sequence[QueuedRecord], message: Message) -> None:
        """Complete a batch's records, or recompute them one by one if it failed."""
        if message.header["type"] == "failure":
            for record in records:
                if len(records) == 1:
                    _finish(record, message.header["problem"])
                else:
                    self._isolate(record)
            return
        [outputs] = message.arrays
        is_finite = np.isfinite(outputs).all(1)
        for row, record in enumerate(records):
            request = _request_of(record)
            request.outputs[record.index] = outputs[row]
            request.finish_record(record.index, None if is_finite[row] else NON_FINITE)

    def _retry(self, records: Sequence[QueuedRecord], error: WorkerLostError) -> None:
        """Recompute records after a worker ended; one that ended several workers fails."""
        for record in records:
            record.num_failures += error.is_running
            if record.num_failures >= MAX_FAILURES and len(records) == 1:
                _finish(record, "workers ended while they computed it")
            elif error.is_running:
                self._isolate(record)
            elif not record.request.is_cancelled:
                self._scheduler.enqueue(record)

    def _isolate(self, record: QueuedRecord) -> None:
        if not record.request.is_cancelled:
            self._scheduler.isolate(record)


def gather_arrays(records: Sequence[QueuedRecord]) -> list[np.ndarray]:
    """Return a batch's arrays: ids and lengths of each text field, then the features.

    The records may belong to several requests.
    """
    parts: list[list[np.ndarray]] = []
    for record in records:
        arrays = _request_of(record).records.slice_arrays(record.index)
        parts.append(arrays)
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _request_of(record: QueuedRecord) -> ComputedRequest:
    request: Any = record.request
    computed: ComputedRequest = request
    return computed


def _finish(record: QueuedRecord, failure: str) -> None:
    _request_of(record).finish_record(record.index, failure)


def _end_late(request: ComputedRequest) -> None:
    if not request.answer.done():
        request.answer.set_exception(DeadlineError("the request was not answered in time"))


class TokenVectorQueue:
    """Computes the token vectors of texts for one model.

    Workers compute them one text at a time, outside the scheduler's batches. At most one text per
    model is computed at once, so other requests wait for no more than one of them per batch.
    """

    def __init__(self, pool: WorkerPool[BatchWorker]) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        self._seconds = 0.0
        self.num_waiting = 0
        """Number of texts not computed yet."""

    async def compute(
        self, texts: Sequence[np.ndarray], options: RequestOptions
    ) -> list[np.ndarray]:
        """Return each text's token vectors, [tokens, width] fp32.

        A text is its ids, [tokens] int32. Raises OverloadedError, UnavailableError, DeadlineError,
        TooManyRecordsError, or InferenceError if a text fails.
        """
        self._check_room(len(texts), options)
        self.num_waiting += len(texts)
        computed: list[np.ndarray] = []
        try:
            async with asyncio.timeout(options.timeout_seconds):
                for index, ids in enumerate(texts):
                    async with self._turn:  # in the order of arrival, so requests alternate
                        computed.append(await self._compute_text(index, ids))
                    self.num_waiting -= 1
        except TimeoutError:
            raise DeadlineError("the request was not answered in time") from None
        finally:
            self.num_waiting -= len(texts) - len(computed)
        return computed

    def _check_room(self, count: int, options: RequestOptions) -> None:
        """Raise OverloadedError, or TooManyRecordsError if a request is late without others."""
        seconds = (self.num_waiting + count) * self._seconds
        limit = options.timeout_seconds
        if seconds <= limit:
            return
        problem = f"the expected time of {seconds:.1f} s is over the limit of {limit:.1f} s"
        if 0 < (num_fitting := int(limit / self._seconds)) < count:
            raise TooManyRecordsError(problem, num_fitting)
        raise OverloadedError(problem, retry_after=max(1, round(seconds - limit)))

    async def _compute_text(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Compute one text; again if the worker ends."""
        for _ in range(MAX_FAILURES):
            if not self._pool.ready:
                seconds = max(1, round(self._pool.start_seconds))
                raise UnavailableError("no worker is ready", retry_after=seconds)
            worker = min(self._pool.ready, key=lambda item: item.num_batches)
            try:
                message = await worker.compute({"type": "token_vectors"}, [ids])
            except WorkerLostError:
                continue
            if message.header["type"] == "failure":
                raise InferenceError(f"record {index} failed: {message.header['problem']}")
            self._seconds += SMOOTHING * (message.header["milliseconds"] / 1e3 - self._seconds)
            [vectors] = message.arrays
            return vectors
        raise InferenceError(f"record {index} failed: workers ended while they computed it")
