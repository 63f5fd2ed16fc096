"""A model's queue: admission, priorities, fairness, deadlines and batches.

It does no I/O and reads no clock. A request is admitted if its expected wait fits its deadline.
Clients share the processors equally, by start-time fair queueing: a client's records are tagged
with the milliseconds it has used. Interactive requests come first, and bulk requests keep a small
share. If a request would be late in this order, the earliest deadline comes first.

A request that alone takes longer than the maximum wait is queued in slices, so later requests wait
for a slice only. Such requests may take up to half of the processors until their deadlines.

Fair queueing source: P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from itertools import accumulate, count
from typing import TYPE_CHECKING, Literal, NamedTuple

from regauge.serving.deadline_demand import DeadlineDemand

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from regauge.serving.batch_planner import BatchPlanner

Priority = Literal["interactive", "bulk"]
SHARES: dict[Priority, float] = {"interactive": 0.9, "bulk": 0.1}
"""Priority -> share of the processors when both have waiting records."""
WINDOW = 192
"""How many records at the head of the queue a batch is selected from."""
GUARD_SECONDS = 2.0
"""How long after an interactive request bulk batches are kept short."""
GUARD_MS = 4.0
"""Time of such a batch, in milliseconds."""
SMOOTHING = 0.1
"""Weight of the last batch in averages over recent batches."""
MIN_RETRY_SECONDS = 1
OVERHEAD_SECONDS = 0.002
"""Request time outside batches: two messages, and turns of the event loop."""
MAX_CLIENTS = 4096
"""Above this number, clients without waiting records are forgotten."""
MARGIN = 1.2
"""Factor on expected times when compared with deadlines."""
SLACK_BATCHES = 3
"""If a record can wait less than this many batches, the earliest deadline comes first."""
SLICED_SHARE = 0.5
"""Share of the time until its deadline that a sliced request may take; the rest is for others."""


class QueueFullError(Exception):
    """A request was refused, because it would wait too long."""

    def __init__(self, wait_seconds: float, limit_seconds: float) -> None:
        message = (
            f"the expected wait of {wait_seconds:.1f} s is over the limit of {limit_seconds:.1f} s"
        )
        super().__init__(message)
        self.retry_after = max(MIN_RETRY_SECONDS, math.ceil(wait_seconds - limit_seconds))
        """Seconds after which the queue is expected to have room."""


class WorkLimitError(Exception):
    """A request was refused, because even an idle server would answer it too late."""

    def __init__(self, seconds: float, limit_seconds: float, num_records: int) -> None:
        super().__init__(
            f"the request takes {seconds:.3g} s, and at most {limit_seconds:.3g} s are allowed"
        )
        self.num_records = num_records
        """How many of the first records fit the limit."""


@dataclass(eq=False)
class QueuedRequest:
    """The records of one request."""

    client: Hashable
    """Client for fair sharing of the processors."""
    priority: Priority
    deadline: float
    """Time at which the answer is due, in seconds on the caller's clock: the client's deadline, or
    earlier, the maximum wait."""
    num_waiting: int = 0
    """Records that wait for a worker."""
    is_cancelled: bool = False
    held: deque[QueuedRecord] = field(default_factory=deque)
    """Records in later slices, which are not in the queue yet."""
    queued_ms: float = 0.0
    """Cost for the records in the queue."""
    slice_tag: float = 0.0
    """Tag of the request's last slice."""
    slice_ms: float = 0.0
    """Cost of the records in that slice."""


@dataclass(eq=False, slots=True)
class QueuedRecord:
    """A record waiting to be computed."""

    request: QueuedRequest
    index: int
    """Index in the request."""
    length: int
    """Bucket length in tokens."""
    cost: float
    """Milliseconds in a full batch."""
    tag: float = 0.0
    number: int = 0
    num_failures: int = 0
    """How many batches with the record crashed a worker or failed."""

    @property
    def key(self) -> tuple[float, int]:
        """Service order."""
        return self.tag, self.number


class ScheduledBatch(NamedTuple):
    """Records to compute together."""

    length: int
    records: list[QueuedRecord]
    milliseconds: float
    """Expected time."""


@dataclass
class FairQueue:
    """Records of one priority, in service order: clients share the processors equally."""

    slice_ms: float
    """A request's records up to this cost are served at once, instead of taking turns with those of
    other clients record by record: then all requests would end late."""
    records: list[QueuedRecord] = field(default_factory=list)
    waiting_ms: float = 0.0
    virtual_time: float = 0.0
    """Tag of the last record taken."""
    client_tags: dict[Hashable, float] = field(default_factory=dict)
    """Client with waiting records -> tag of the next record."""
    max_clients: int = MAX_CLIENTS
    """Above this number, clients without waiting records are forgotten."""
    used: float = 0.0
    """Milliseconds used, divided by the share."""
    packing: float = 1.0
    """Time of recent batches divided by their records' time in full batches."""

    def add(self, record: QueuedRecord) -> None:
        """Insert a record, tagged with the processor time its client has used."""
        request, client = record.request, record.request.client
        used = max(self.virtual_time, self.client_tags.get(client, 0.0))
        if not request.slice_ms or request.slice_ms + record.cost > self.slice_ms:
            request.slice_tag, request.slice_ms = used, 0.0
        record.tag = request.slice_tag
        request.slice_ms += record.cost
        self.client_tags[client] = used + record.cost
        insort(self.records, record, key=lambda item: item.key)
        self.waiting_ms += record.cost

    def take(self, indices: Sequence[int]) -> list[QueuedRecord]:
        """Remove and return the records with these ascending indices."""
        taken = [self.records[index] for index in indices]
        for index in reversed(indices):
            del self.records[index]
        if indices[0] == 0:
            self.virtual_time = max(self.virtual_time, taken[0].tag)
        if len(self.client_tags) > self.max_clients:
            self._forget_clients()
        self.waiting_ms -= sum(record.cost for record in taken)
        if not self.records:
            self._reset()
        return taken

    def remove(self, request: QueuedRequest) -> list[QueuedRecord]:
        """Remove and return a request's records."""
        removed = [record for record in self.records if record.request is request]
        self.records = [record for record in self.records if record.request is not request]
        self.waiting_ms = sum(record.cost for record in self.records)
        if not self.records:
            self._reset()
        return removed

    def _forget_clients(self) -> None:
        """Forget clients without waiting records, as if they were new."""
        clients = {record.request.client for record in self.records}
        tags = self.client_tags.items()
        self.client_tags = {client: tag for client, tag in tags if client in clients}
        self.max_clients = max(MAX_CLIENTS, 2 * len(clients))

    def _reset(self) -> None:
        """Forget the clients: an empty queue owes them nothing."""
        self.client_tags.clear()
        self.virtual_time = self.waiting_ms = 0.0


class Scheduler:
    """A model's waiting records, and the time the workers need for them."""

    def __init__(self, planner: BatchPlanner, max_wait_seconds: float) -> None:
        self._planner = planner
        self._max_wait_seconds = max_wait_seconds
        self._queues: dict[Priority, FairQueue] = {
            "interactive": FairQueue(planner.max_milliseconds),
            "bulk": FairQueue(planner.max_milliseconds),
        }
        self._numbers = count()
        self._running_ms = 0.0
        self._interactive_until = -math.inf
        self._demand = DeadlineDemand()
        self._expected_ms = self._measured_ms = planner.max_milliseconds
        self._isolated: deque[QueuedRecord] = deque()
        self._num_held = 0
        self._held_ms = 0.0
        self.num_workers = 0
        """Number of workers computing batches."""
        self.time_ratio = 1.0
        """Measured over expected time of recent batches. Large batches count more, because small
        ones take many times as long as expected on a busy machine."""
        self.is_guarded = False
        """Whether bulk batches are kept short for interactive requests."""

    @property
    def num_waiting(self) -> int:
        waiting = sum(len(queue.records) for queue in self._queues.values())
        return waiting + len(self._isolated) + self._num_held

    @property
    def num_clients(self) -> int:
        """Number of clients whose processor use is known."""
        return sum(len(queue.client_tags) for queue in self._queues.values())

    def estimate_wait(self, priority: Priority, cost_ms: float = 0.0) -> float:
        """Return the expected seconds until a new request of this cost is answered."""
        interactive, bulk = self._queues["interactive"], self._queues["bulk"]
        waiting_ms = interactive.waiting_ms * interactive.packing
        if priority == "bulk":
            waiting_ms += bulk.waiting_ms * bulk.packing
        else:
            waiting_ms /= SHARES["interactive"]
        cost_ms *= self._queues[priority].packing
        return (waiting_ms + self._running_ms + cost_ms) * self._seconds_per_ms

    @property
    def _seconds_per_ms(self) -> float:
        """Expected seconds per millisecond of work, with all workers together."""
        return self.time_ratio / max(1, self.num_workers) / 1e3

    def check_room(self, priority: Priority, seconds: float, cost_ms: float = 0.0) -> None:
        """Raise QueueFullError if a new request would wait too long.

        `seconds` is the time until the deadline.
        """
        wait = self.estimate_wait(priority, cost_ms) + OVERHEAD_SECONDS
        limit = min(seconds, self._max_wait_seconds)
        is_empty = not self._running_ms and not self.num_waiting
        if wait > limit and not (is_empty and wait <= seconds):
            raise QueueFullError(wait, limit)

    def count_fitting(self, length: int, seconds: float) -> float:
        """Return how many records of a bucket length an idle server answers within a deadline."""
        record_seconds = self._planner.cost(length) * self._seconds_per_ms
        return max(1.0, self._limit_alone(seconds) // (MARGIN * record_seconds))

    def add(self, request: QueuedRequest, lengths: Sequence[int], now: float) -> None:
        """Add a request's records, given their bucket lengths.

        Raises QueueFullError, and WorkLimitError if an idle server would refuse it as well.
        """
        costs = [self._planner.cost(length) for length in lengths]
        seconds = request.deadline - now
        is_sliced = self._check_size(costs, seconds)
        self.check_room(request.priority, seconds, 0.0 if is_sliced else sum(costs))
        if not is_sliced and (self._running_ms or self.num_waiting):
            request.deadline = min(request.deadline, now + self._max_wait_seconds)
        self._demand.add(request.deadline, sum(costs))
        try:
            self._check_deadlines(request, now)
        finally:
            self._demand.remove(request.deadline, sum(costs))
        records = [
            QueuedRecord(request, index, length, cost)
            for index, (length, cost) in enumerate(zip(lengths, costs, strict=True))
        ]
        if is_sliced:
            self._hold(request, records)
            return
        for record in records:
            self.enqueue(record)

    def _check_size(self, costs: Sequence[float], seconds: float) -> bool:
        """Return whether a request is computed in slices.

        Raises WorkLimitError, and QueueFullError if it is too long beside other sliced ones.
        A request whose first record is over the limit is computed alone, or not at all.
        """
        pace = self._seconds_per_ms
        request_seconds = sum(costs) * pace
        limit = self._limit_alone(seconds)
        sums = list(accumulate(cost * pace for cost in costs))
        count = bisect_right(sums, limit - OVERHEAD_SECONDS)
        if 0 < count < len(costs):
            raise WorkLimitError(request_seconds, limit, count)
        if not count or request_seconds <= self._max_wait_seconds:
            return False
        if (total := request_seconds + self._held_ms * pace) > limit:
            raise QueueFullError(total, limit)
        return True

    def _limit_alone(self, seconds: float) -> float:
        """Return the longest time of a request on an idle server, given that until its deadline."""
        return max(min(seconds, self._max_wait_seconds), SLICED_SHARE * seconds)

    def _hold(self, request: QueuedRequest, records: Sequence[QueuedRecord]) -> None:
        """Add the records of a sliced request, ordered by length for efficient batches."""
        request.held.extend(sorted(records, key=lambda record: record.length))
        request.num_waiting += len(records)
        self._num_held += len(records)
        for record in records:
            self._held_ms += record.cost
            self._demand.add(request.deadline, record.cost)
        self._queue_slice(request)

    def _queue_slice(self, request: QueuedRequest) -> None:
        """Queue records that a request holds, until there are enough for a batch."""
        while request.held and request.queued_ms < self._planner.max_milliseconds:
            record = request.held.popleft()
            self._num_held -= 1
            self._held_ms -= record.cost
            self._insert(record)

    def isolate(self, record: QueuedRecord) -> None:
        """Add a record again as a separate batch, because its batch failed."""
        record.request.num_waiting += 1
        self._isolated.append(record)

    def cancel(self, request: QueuedRequest) -> None:
        """Remove a request's waiting records."""
        request.is_cancelled = True
        self._isolated = deque(item for item in self._isolated if item.request is not request)
        if request.num_waiting:
            self._num_held -= len(request.held)
            self._held_ms -= sum(record.cost for record in request.held)
            for record in (*self._queues[request.priority].remove(request), *request.held):
                self._demand.remove(request.deadline, record.cost)
            request.held.clear()
            request.num_waiting = 0

    def take_batch(self, now: float) -> ScheduledBatch | None:
        """Remove and return the next batch, or None if nothing waits."""
        if self._isolated:
            record = self._isolated.popleft()
            record.request.num_waiting -= 1
            milliseconds = self._planner.milliseconds(record.length, 1)
            self._running_ms += milliseconds
            return ScheduledBatch(record.length, [record], milliseconds)
        if not any(queue.records for queue in self._queues.values()):
            return None
        if self._queues["interactive"].records:
            self._interactive_until = now + GUARD_SECONDS
        self.is_guarded = now < self._interactive_until and bool(self._queues["bulk"].records)
        slack = self._demand.find_slack(now, *self._busy_and_pace())
        if slack.seconds < SLACK_BATCHES * self._batch_seconds:
            return self._take_urgent(slack.deadline)
        priority = self._select_priority()
        limit_ms = GUARD_MS if priority == "bulk" and self.is_guarded else math.inf
        window = range(min(WINDOW, len(self._queues[priority].records)))
        return self._take_from(priority, window, limit_ms)

    def _take_urgent(self, deadline: float) -> ScheduledBatch:
        """Return a batch of records with an earlier deadline than this, earliest first."""
        earliest: dict[Priority, list[int]] = {}
        for priority, queue in self._queues.items():
            by_deadline = partial(_by_deadline, queue.records)
            urgent = [
                index
                for index, record in enumerate(queue.records)
                if record.request.deadline < deadline
            ]
            if urgent:
                earliest[priority] = nsmallest(WINDOW, urgent, key=by_deadline)
        priority = min(
            earliest,
            key=lambda item: self._queues[item].records[earliest[item][0]].request.deadline,
        )
        return self._take_from(priority, earliest[priority], math.inf)

    def _take_from(
        self, priority: Priority, window: Sequence[int], limit_ms: float
    ) -> ScheduledBatch:
        """Return a batch with the first of some queue records, given by index."""
        queue = self._queues[priority]
        planned = self._planner.plan([queue.records[index] for index in window], limit_ms)
        records = queue.take(sorted(window[index] for index in planned.indices))
        queue.used += planned.milliseconds / SHARES[priority]
        if queue.records:
            packing = planned.milliseconds / sum(record.cost for record in records)
            queue.packing += SMOOTHING * (packing - queue.packing)
        for record in records:
            record.request.num_waiting -= 1
            self._demand.remove(record.request.deadline, record.cost)
            record.request.queued_ms -= record.cost
            self._queue_slice(record.request)
        self._running_ms += planned.milliseconds
        return ScheduledBatch(planned.length, records, planned.milliseconds)

    def finish(self, batch: ScheduledBatch, milliseconds: float | None) -> None:
        """Record the end of a batch, with the measured time or None if it failed."""
        self._running_ms = max(0.0, self._running_ms - batch.milliseconds)
        if milliseconds is not None:
            self._expected_ms += batch.milliseconds - SMOOTHING * self._expected_ms
            self._measured_ms += milliseconds - SMOOTHING * self._measured_ms
            self.time_ratio = self._measured_ms / self._expected_ms

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

    def enqueue(self, record: QueuedRecord) -> None:
        """Add a record; once more if its batch was not started."""
        record.request.num_waiting += 1
        self._demand.add(record.request.deadline, record.cost)
        self._insert(record)

    def _insert(self, record: QueuedRecord) -> None:
        record.number = next(self._numbers)
        record.request.queued_ms += record.cost
        self._queues[record.request.priority].add(record)

    @property
    def _batch_seconds(self) -> float:
        return self._planner.max_milliseconds * self.time_ratio / 1e3

    def _check_deadlines(self, request: QueuedRequest, now: float) -> None:
        """Raise QueueFullError if a new request would make a record late."""
        if not self.num_waiting:
            return
        slack = self._demand.find_slack(now, *self._busy_and_pace(), request.deadline)
        late_seconds = min(self.estimate_wait("bulk"), self._batch_seconds) - slack.seconds
        if late_seconds > 0:
            limit = request.deadline - now
            raise QueueFullError(limit + late_seconds, limit)

    def _busy_and_pace(self) -> tuple[float, float]:
        """Return the seconds until the workers are free, and the seconds per millisecond."""
        packing = max(queue.packing for queue in self._queues.values())
        pace = MARGIN * self._seconds_per_ms
        return self._running_ms * pace, packing * pace


def _by_deadline(records: Sequence[QueuedRecord], index: int) -> tuple[float, int]:
    """Sort key for records by deadline."""
    return records[index].request.deadline, index
