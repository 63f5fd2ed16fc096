"""A simulated clock and simulated workers for the real scheduler and dispatcher.

The clock moves only while the event loop waits, so a simulated minute takes as long as its events.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from regauge.inference.export.buckets import Buckets
from regauge.inference.export.manifest import Bucket
from regauge.inference.export.records import TextRecords
from regauge.models.settings import Generation
from regauge.serving import dispatcher as dispatcher_module
from regauge.serving import model_set, model_slot
from regauge.serving.batch_planner import BatchPlanner
from regauge.serving.dispatcher import ComputedRequest, Dispatcher, RequestOptions
from regauge.serving.scheduler import Priority, ScheduledBatch, Scheduler
from regauge.serving.text_generation import text_queue
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.text_client import BUSY_SHARE, SMOOTHING
from regauge.serving.text_generation.text_requests import EngineLimits, TokenEvent
from regauge.serving.wire import Message
from regauge.serving.workers.batch_worker import WorkerLostError

T = TypeVar("T")
LENGTHS = (8, 16, 32, 64, 128)
MAX_BATCH_TOKENS = 1024
SLICE_TOKENS = 64
"""Prompt tokens in a step of a simulated text worker."""


@dataclass(frozen=True)
class AffineTimes:
    """Times of batches: a fixed part, and a part for each token."""

    overhead_ms: float = 2.0
    token_ms: float = 0.01

    def milliseconds(self, length: int, rows: int) -> float:
        return self.overhead_ms + self.token_ms * length * rows


def build_buckets(
    lengths: Sequence[int] = LENGTHS,
    max_tokens: int = MAX_BATCH_TOKENS,
    *,
    needs_row_padding: bool = False,
) -> Buckets:
    """Return buckets whose batch sizes are all halves of the largest one."""
    shapes = []
    for length in lengths:
        rows = max(1, max_tokens // length)
        sizes = tuple(rows >> count for count in range(rows.bit_length()))
        shapes.append(Bucket(length=length, batch_sizes=sizes))
    return Buckets(tuple(shapes), needs_row_padding=needs_row_padding)


class _VirtualSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """A selector that moves the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the simulation waits for ever")
        self.now += max(0.0, timeout)
        return list(super().select(0))


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is simulated."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


class SimulatedWorker:
    """A worker that computes a batch in the expected time; its outputs are the first tokens."""

    def __init__(self, times: AffineTimes, slowness: float = 1.0) -> None:
        self.times = times
        self.slowness = slowness
        """Its time divided by the expected time."""
        self.batches: list[tuple[int, list[int]]] = []
        """The length and the first tokens of every batch, in order."""
        self.started_at: list[float] = []
        self.poison: frozenset[int] = frozenset()
        """First tokens that make a batch fail."""
        self.lethal: frozenset[int] = frozenset()
        """First tokens that end the worker."""
        self.pool: SimulatedPool | None = None
        self._waiting: deque[tuple[float, list[int], asyncio.Future[Message]]] = deque()

    @property
    def num_batches(self) -> int:
        return len(self._waiting)

    def compute(
        self, header: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> asyncio.Future[Message]:
        ids, lengths = arrays
        tokens = ids[np.cumsum(lengths) - lengths].tolist()
        assert lengths.max() <= header["length"]
        self.batches.append((header["length"], tokens))
        milliseconds = self.slowness * self.times.milliseconds(header["length"], len(tokens))
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting.append((milliseconds, tokens, answer))
        if len(self._waiting) == 1:
            self._start()
        return answer

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self.started_at.append(loop.time())
        loop.call_later(self._waiting[0][0] / 1e3, self._finish)

    def _finish(self) -> None:
        if not self._waiting:
            return
        milliseconds, tokens, answer = self._waiting.popleft()
        if self.lethal & set(tokens):
            self._end(answer)
            return
        if self._waiting:
            self._start()
        if self.poison & set(tokens):
            answer.set_result(Message({"type": "failure", "problem": "poison"}, []))
            return
        outputs = np.array([[token, token] for token in tokens], np.float32)
        answer.set_result(Message({"type": "outputs", "milliseconds": milliseconds}, [outputs]))

    def _end(self, answer: asyncio.Future[Message]) -> None:
        """Lose all batches; the pool replaces the worker."""
        answer.set_exception(WorkerLostError(is_running=True))
        for _, _, waiting in self._waiting:
            waiting.set_exception(WorkerLostError(is_running=False))
        self._waiting.clear()
        assert self.pool is not None
        self.pool.replace(self)


class SimulatedTextWorker:
    """A worker that generates a token of each answer per step; a step takes longer if it is full.

    An answer ends after as many tokens as its prompt says, or at its maximum. Prompts are read in
    the order of arrival, in slices that prolong the steps.
    """

    has_ended = False

    def __init__(self, places: int, step_seconds: float, prompt_token_seconds: float = 0.0) -> None:
        self.limits = EngineLimits(None, 1 << 31, places)
        self.prompt_token_seconds = prompt_token_seconds
        self._unread: dict[str, int] = {}
        self._num_sliced = 0
        self._full_step_seconds = step_seconds
        self.step_seconds = step_seconds
        """Time of a step in which all places are taken."""
        self.num_tokens = 0
        self._streams: dict[str, text_queue.TokenStream] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def send(self, stream: text_queue.TokenStream) -> None:
        self._streams[stream.request.request_id] = stream
        self._unread[stream.request.request_id] = len(stream.request.prompt) - 1
        self._start()

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._unread.pop(request_id, None)

    def _start(self) -> None:
        if self._timer is None and self._streams:
            seconds = self._full_step_seconds * (
                0.5 + 0.5 * self.num_requests / self.limits.max_running
            )
            self._num_sliced = min(SLICE_TOKENS, sum(self._unread.values()))
            seconds += self._num_sliced * self.prompt_token_seconds
            if self.num_requests >= BUSY_SHARE * self.limits.max_running:
                self.step_seconds += SMOOTHING * (seconds - self.step_seconds)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._step)

    def _read_slice(self) -> None:
        """Read the slice of the step that ends."""
        for name, count in list(self._unread.items()):
            num_read = min(count, self._num_sliced)
            self._unread[name] -= num_read
            self._num_sliced -= num_read

    def _step(self) -> None:
        self._timer = None
        self._read_slice()
        for name, stream in list(self._streams.items()):
            if self._unread[name]:
                continue
            self.num_tokens += 1
            length = min(int(stream.request.prompt[0]), stream.request.max_new_tokens)
            is_last = stream.num_tokens + 1 == length
            if is_last:
                self.forget(name)
            stream.put(TokenEvent(name, 7, "length" if is_last else None))
        self._start()


class TextSimulation:
    """The real queue of texts with simulated workers."""

    def __init__(
        self,
        *,
        places: int = 16,
        step_seconds: float = 0.05,
        prompt_token_seconds: float = 0.0,
        **times: Any,
    ) -> None:
        self.worker = SimulatedTextWorker(places, step_seconds, prompt_token_seconds)
        pool: Any = SimpleNamespace(ready=[self.worker])
        self.settings = TextServing(**times)
        self.queue = text_queue.TextQueue(pool, self.settings)

    async def send(self, tokens: int, client: Hashable = "client", **options: Any) -> float:
        """Return the seconds to the first token of an answer, after the whole answer."""
        loop = asyncio.get_running_loop()
        start, first = loop.time(), 0.0
        generation = Generation(max_new_tokens=options.pop("max_new_tokens", tokens))
        prompt = np.full(options.pop("prompt_tokens", 1), tokens, np.int32)
        stream = self.queue.add(prompt, generation, client=client, **options)
        try:
            while await stream.read():
                first = first or loop.time() - start
        finally:
            stream.close()
        return first


@dataclass
class SimulatedPool:
    """Workers that are replaced after some seconds."""

    ready: list[SimulatedWorker]
    start_seconds: float = 1.0
    num_replaced: int = 0
    dispatcher: Dispatcher | None = None

    def replace(self, worker: SimulatedWorker) -> None:
        self.ready.remove(worker)
        self.num_replaced += 1
        asyncio.get_running_loop().call_later(self.start_seconds, self._add, worker)

    def _add(self, worker: SimulatedWorker) -> None:
        self.ready.append(worker)
        assert self.dispatcher is not None
        self.dispatcher.fill_workers()


@dataclass
class ClientRecord:
    """What a client has seen."""

    latencies: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_refused: float = 0
    num_late: int = 0


class Simulation:
    """The real scheduler and dispatcher with simulated workers."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        times: AffineTimes | None = None,
        worker_times: AffineTimes | None = None,
        slowness: float = 1.0,
        max_wait_seconds: float = 2.0,
        mixes_lengths: bool = True,
    ) -> None:
        self.times = times or AffineTimes()
        self.buckets = build_buckets()
        self.planner = BatchPlanner(self.buckets, self.times, mixes_lengths=mixes_lengths)
        self.scheduler = Scheduler(self.planner, max_wait_seconds)
        measured = worker_times or self.times
        self.workers = [SimulatedWorker(measured, slowness) for _ in range(num_workers)]
        self.pool = SimulatedPool(list(self.workers))
        self.computed_ms: dict[Hashable, float] = {}
        """Milliseconds in full batches of the computed records of each client."""
        pool: Any = self.pool
        self.dispatcher = Dispatcher(self.scheduler, pool, 2, self._count)
        self.pool.dispatcher = self.dispatcher
        for worker in self.workers:
            worker.pool = self.pool

    def _count(self, batch: ScheduledBatch, milliseconds: float) -> None:
        del milliseconds
        for record in batch.records:
            client = record.request.client
            self.computed_ms[client] = self.computed_ms.get(client, 0.0) + record.cost

    async def send(
        self,
        lengths: Sequence[int],
        client: Hashable = "client",
        priority: Priority = "bulk",
        timeout_seconds: float = 30.0,
        first_tokens: Sequence[int] | None = None,
    ) -> ComputedRequest:
        """Compute records of these lengths and return the request."""
        tokens = first_tokens or [7] * len(lengths)
        lists = [
            np.full(length, token, np.int32) for length, token in zip(lengths, tokens, strict=True)
        ]
        padded = [self.buckets.find_length(length) for length in lengths]
        options = RequestOptions(client, priority, timeout_seconds)
        return await self.dispatcher.compute(TextRecords.from_lists(lists), padded, options)

    @property
    def capacity(self) -> float:
        """Milliseconds in full batches that all workers compute per second."""
        return 1e3 * len(self.workers) / self.workers[0].slowness


def run_simulated(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a simulated clock, which the server's queues read as well."""
    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner(loop_factory=SimulatedLoop) as runner,
    ):
        loop = runner.get_loop()
        for module in (dispatcher_module, text_queue, model_set, model_slot):
            patch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
        return runner.run(work)


def simulate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test a coroutine on a simulated clock."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        run_simulated(test(**fixtures))

    return run
