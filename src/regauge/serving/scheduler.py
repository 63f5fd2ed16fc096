"""The queue of a model: admission, priorities, fairness, deadlines and batches.

It does no I/O and reads no clock. A request is admitted if its expected wait fits its deadline.
Clients share the processors equally, by start-time fair queueing: the records of a client are
tagged with the milliseconds that it has used. Interactive requests come first, and bulk requests
keep a small share.

Source of the fair queueing: P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from regauge.serving.batch_planner import BatchPlanner

Priority = Literal["interactive", "bulk"]
SHARES: dict[Priority, float] = {"interactive": 0.9, "bulk": 0.1}
"""Share of the processors of each priority if both have waiting records."""
WINDOW = 192
"""Records of the queue that a batch is selected from."""
GUARD_SECONDS = 2.0
"""How long after an interactive request the batches of bulk requests are kept short."""
GUARD_MS = 4.0
"""Time of such a batch, in milliseconds."""
SMOOTHING = 0.1
"""Weight of a new measurement in the ratio of measured to expected times."""
MIN_RETRY_SECONDS = 1


class QueueFullError(Exception):
    """A request was refused, because it would wait too long."""

    def __init__(self, wait_seconds: float, limit_seconds: float) -> None:
        message = (
            f"the expected wait of {wait_seconds:.1f} s is over the limit of {limit_seconds:.1f} s"
        )
        super().__init__(message)
        self.retry_after = max(MIN_RETRY_SECONDS, math.ceil(wait_seconds - limit_seconds))
        """Seconds after which the queue is expected to have room."""


@dataclass(eq=False)
class QueuedRequest:
    """The records of one request."""

    client: Hashable
    """The client that shares the processors with others."""
    priority: Priority
    deadline: float
    """Time at which the answer is worthless, in seconds of the clock of the caller."""
    num_waiting: int = 0
    """Number of records in the queue."""
    is_cancelled: bool = False


@dataclass(eq=False, slots=True)
class QueuedRecord:
    """A record that waits to be computed."""

    request: QueuedRequest
    index: int
    """Its index in the request."""
    length: int
    """The length of its bucket, in tokens."""
    cost: float
    """Milliseconds in a full batch."""
    tag: float = 0.0
    number: int = 0
    num_failures: int = 0
    """Number of its batches that ended a worker or failed."""

    @property
    def key(self) -> tuple[float, int]:
        """The order of service."""
        return self.tag, self.number


class ScheduledBatch(NamedTuple):
    """Records to compute together."""

    length: int
    records: list[QueuedRecord]
    milliseconds: float
    """The expected time."""


@dataclass
class _PriorityQueue:
    """The records of one priority, in order of service."""

    records: list[QueuedRecord] = field(default_factory=list)
    waiting_ms: float = 0.0
    virtual_time: float = 0.0
    """Tag of the last record that was taken."""
    client_tags: dict[Hashable, float] = field(default_factory=dict)
    """Tag of the next record of each client with waiting records."""
    used: float = 0.0
    """Milliseconds that it has used, divided by its share."""

    def add(self, record: QueuedRecord) -> None:
        """Insert a record behind the records that its client has used the processors for."""
        client = record.request.client
        record.tag = max(self.virtual_time, self.client_tags.get(client, 0.0))
        self.client_tags[client] = record.tag + record.cost
        insort(self.records, record, key=lambda item: item.key)
        self.waiting_ms += record.cost

    def take(self, indices: Sequence[int]) -> list[QueuedRecord]:
        """Remove the records with these ascending indices and return them."""
        taken = [self.records[index] for index in indices]
        for index in reversed(indices):
            del self.records[index]
        self.virtual_time = max(self.virtual_time, taken[0].tag)
        self.waiting_ms -= sum(record.cost for record in taken)
        if not self.records:
            self._reset()
        return taken

    def remove(self, request: QueuedRequest) -> None:
        """Remove the records of a request."""
        self.records = [record for record in self.records if record.request is not request]
        self.waiting_ms = sum(record.cost for record in self.records)
        if not self.records:
            self._reset()

    def _reset(self) -> None:
        """Forget the clients: an empty queue owes nothing to any of them."""
        self.client_tags.clear()
        self.virtual_time = self.waiting_ms = 0.0


class Scheduler:
    """The waiting records of a model, and the time that its workers need for them."""

    def __init__(self, planner: BatchPlanner, max_wait_seconds: float) -> None:
        self._planner = planner
        self._max_wait_seconds = max_wait_seconds
        self._queues: dict[Priority, _PriorityQueue] = {
            "interactive": _PriorityQueue(),
            "bulk": _PriorityQueue(),
        }
        self._numbers = count()
        self._running_ms = 0.0
        self._interactive_until = -math.inf
        self._isolated: deque[QueuedRecord] = deque()
        self.num_workers = 0
        """Number of workers that compute batches."""
        self.time_ratio = 1.0
        """Measured time of recent batches divided by the expected time."""
        self.is_guarded = False
        """Whether bulk batches are kept short for interactive requests."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting records."""
        waiting = sum(len(queue.records) for queue in self._queues.values())
        return waiting + len(self._isolated)

    def estimate_wait(self, priority: Priority, cost_ms: float = 0.0) -> float:
        """Return the expected seconds until a new request of this cost is answered."""
        waiting_ms = self._queues["interactive"].waiting_ms
        if priority == "bulk":
            waiting_ms += self._queues["bulk"].waiting_ms
        else:
            waiting_ms /= SHARES["interactive"]
        total_ms = waiting_ms + self._running_ms + cost_ms
        return total_ms * self.time_ratio / max(1, self.num_workers) / 1e3

    def check_room(self, priority: Priority, seconds: float, cost_ms: float = 0.0) -> None:
        """Raise QueueFullError if a new request would wait too long.

        `seconds` is the time until its deadline.
        """
        wait, limit = self.estimate_wait(priority, cost_ms), min(seconds, self._max_wait_seconds)
        is_empty = not self._running_ms and not self.num_waiting
        if wait > limit and not (is_empty and wait <= seconds):
            raise QueueFullError(wait, limit)

    def add(self, request: QueuedRequest, lengths: Sequence[int], now: float) -> None:
        """Add the records of a request, given their bucket lengths; raises QueueFullError."""
        costs = [self._planner.cost(length) for length in lengths]
        self.check_room(request.priority, request.deadline - now, sum(costs))
        queue = self._queues[request.priority]
        for index, (length, cost) in enumerate(zip(lengths, costs, strict=True)):
            queue.add(self._number(QueuedRecord(request, index, length, cost)))
        request.num_waiting = len(lengths)

    def requeue(self, record: QueuedRecord) -> None:
        """Add a record again whose batch was not started."""
        record.request.num_waiting += 1
        self._queues[record.request.priority].add(self._number(record))

    def isolate(self, record: QueuedRecord) -> None:
        """Add a record again as a batch of its own, because its batch failed."""
        record.request.num_waiting += 1
        self._isolated.append(record)

    def cancel(self, request: QueuedRequest) -> None:
        """Remove the waiting records of a request."""
        request.is_cancelled = True
        self._isolated = deque(item for item in self._isolated if item.request is not request)
        if request.num_waiting:
            self._queues[request.priority].remove(request)
            request.num_waiting = 0

    def take_batch(self, now: float) -> ScheduledBatch | None:
        """Remove the next batch from the queue and return it; None if no record waits."""
        if self._isolated:
            record = self._isolated.popleft()
            record.request.num_waiting -= 1
            milliseconds = self._planner.milliseconds(record.length, 1)
            self._running_ms += milliseconds
            return ScheduledBatch(record.length, [record], milliseconds)
        active = [queue for queue in self._queues.values() if queue.records]
        if not active:
            return None
        if self._queues["interactive"].records:
            self._interactive_until = now + GUARD_SECONDS
        self.is_guarded = now < self._interactive_until
        priority = self._select_priority()
        queue = self._queues[priority]
        limit_ms = GUARD_MS if priority == "bulk" and self.is_guarded else math.inf
        planned = self._planner.plan(queue.records[:WINDOW], limit_ms)
        records = queue.take(planned.indices)
        queue.used += planned.milliseconds / SHARES[priority]
        for record in records:
            record.request.num_waiting -= 1
        self._running_ms += planned.milliseconds
        return ScheduledBatch(planned.length, records, planned.milliseconds)

    def finish(self, batch: ScheduledBatch, milliseconds: float | None) -> None:
        """Record that a batch has ended, with its measured time or None if it failed."""
        self._running_ms = max(0.0, self._running_ms - batch.milliseconds)
        if milliseconds is not None and batch.milliseconds > 0:
            ratio = milliseconds / batch.milliseconds
            self.time_ratio += SMOOTHING * (ratio - self.time_ratio)

    def _select_priority(self) -> Priority:
        """Return the priority that has used the least of its share."""
        interactive, bulk = self._queues["interactive"], self._queues["bulk"]
        if not bulk.records:
            return "interactive"
        if not interactive.records:
            # Time without competition is not charged later.
            interactive.used = bulk.used = max(interactive.used, bulk.used)
            return "bulk"
        return "interactive" if interactive.used <= bulk.used else "bulk"

    def _number(self, record: QueuedRecord) -> QueuedRecord:
        record.number = next(self._numbers)
        return record
