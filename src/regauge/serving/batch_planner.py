"""Selects the records for the next batch from the head of a queue.

It picks the packing with the highest efficiency: the time the records need in full batches of their
own lengths, divided by the batch time. The first record in the queue is in every batch, so no
record starves.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.inference.export.buckets import Buckets

MIN_LIMITED_FACTOR = 2.0
"""A limited batch may take this many times as long as a single record of that length."""


MAX_INEFFICIENCY = 1.1


class BatchTimes(Protocol):
    """Measured time per batch shape."""

    def milliseconds(self, length: int, rows: int) -> float:
        """Return a batch's time in milliseconds."""
        ...


class Queueable(Protocol):
    """A record waiting to be computed."""

    @property
    def length(self) -> int:
        """Bucket length in tokens."""
        ...


class PlannedBatch(NamedTuple):
    """A batch to compute."""

    length: int
    """Tokens per row, padding included."""
    indices: list[int]
    """Queue indices of the records."""
    milliseconds: float
    """Expected time."""


class _Choice(NamedTuple):
    """A possible batch: the longest records that fit `length`, up to a number of rows."""

    efficiency: float
    length: int
    rows: int
    first: int
    """Index of the first record that fits, in descending order of length."""
    milliseconds: float


class _Records(NamedTuple):
    """The queue's records after the first, in descending order of length."""

    lengths: list[int]
    sums: list[float]
    """Summed costs of the first 0, 1, ... records."""
    firsts: list[int]
    """Length -> index of the first record."""


class BatchPlanner:
    """Plans batches for an artifact's buckets and times."""

    def __init__(self, buckets: Buckets, times: BatchTimes, *, mixes_lengths: bool) -> None:
        """Take the buckets and times; with `mixes_lengths`, a record may be padded to any bucket.

        Without it, padding depends on a record's own length alone, as batch invariance requires.
        """
        self._mixes_lengths = mixes_lengths
        self._needs_row_padding = buckets.needs_row_padding
        self._sizes = {bucket.length: bucket.batch_sizes for bucket in buckets.shapes}
        self._times = times
        self._cache: dict[tuple[int, int], float] = {}
        self._costs = {
            length: self.milliseconds(length, sizes[0]) / sizes[0]
            for length, sizes in self._sizes.items()
        }
        self.max_milliseconds = max(
            self.milliseconds(length, sizes[0]) for length, sizes in self._sizes.items()
        )
        """Expected time of the largest batch."""

    def cost(self, length: int) -> float:
        """Return a record's milliseconds in a full batch."""
        return self._costs[length]

    def milliseconds(self, length: int, rows: int) -> float:
        """Return a batch's expected time, including padding rows."""
        key = length, self._padded_rows(length, rows)
        if key not in self._cache:
            self._cache[key] = self._times.milliseconds(*key)
        return self._cache[key]

    def find_efficient_rows(self, length: int) -> int:
        """Return the smallest batch size within 1.1 times the shortest time per row."""
        times = {rows: self.milliseconds(length, rows) / rows for rows in self._sizes[length]}
        limit = MAX_INEFFICIENCY * min(times.values())
        return min(rows for rows, milliseconds in times.items() if milliseconds <= limit)

    def plan(self, queue: Sequence[Queueable], limit_ms: float) -> PlannedBatch:
        """Return the next batch from a nonempty queue in service order.

        The batch takes at most `limit_ms` milliseconds, or `MIN_LIMITED_FACTOR` times as long as a
        single record, whichever is longer.
        """
        leader = queue[0].length
        if self._mixes_lengths:
            order = sorted(range(1, len(queue)), key=lambda index: -queue[index].length)
        else:
            order = [index for index in range(1, len(queue)) if queue[index].length == leader]
        others = self._summarize([queue[index].length for index in order])
        firsts = {leader: len(order)}
        for first in reversed(others.firsts):
            firsts[max(leader, others.lengths[first])] = first
        best = max(
            self._choose_rows(leader, length, first, others, limit_ms)
            for length, first in firsts.items()
        )
        indices = [0, *order[best.first : best.first + best.rows - 1]]
        return PlannedBatch(best.length, sorted(indices), best.milliseconds)

    def _summarize(self, lengths: list[int]) -> _Records:
        sums = list(accumulate((self._costs[length] for length in lengths), initial=0.0))
        firsts = [
            index
            for index, length in enumerate(lengths)
            if not index or length != lengths[index - 1]
        ]
        return _Records(lengths, sums, firsts)

    def _choose_rows(
        self, leader: int, length: int, first: int, others: _Records, limit_ms: float
    ) -> _Choice:
        """Return the most efficient batch at one length: the leader, and others from `first` on.

        Between two declared sizes, time is linear in the rows. So efficiency peaks at a declared
        size, before a record of another length, or at the limit.
        """
        available = len(others.sums) - first
        sizes = self._sizes[length]
        limit_ms = max(limit_ms, MIN_LIMITED_FACTOR * self.milliseconds(length, 1))
        candidates = {min(available, size) for size in sizes}
        if not self._needs_row_padding:
            candidates.update(
                rows for start in others.firsts if 1 <= (rows := start - first + 1) <= sizes[0]
            )
            candidates.add(self._limit_rows(length, min(available, sizes[0]), limit_ms))
        start, costs = others.sums[first], self._costs[leader]
        choices = [
            _Choice(
                (costs + others.sums[first + rows - 1] - start) / milliseconds,
                length,
                rows,
                first,
                milliseconds,
            )
            for rows in candidates
            if (milliseconds := self.milliseconds(length, rows)) <= limit_ms or rows == 1
        ]
        return max(choices)

    def _limit_rows(self, length: int, max_rows: int, limit_ms: float) -> int:
        """Return the most rows, at least 1, that take at most `limit_ms` at one length."""
        if self.milliseconds(length, max_rows) <= limit_ms:
            return max_rows
        rows = range(1, max_rows + 1)
        key = partial(self.milliseconds, length)
        return max(1, bisect_right(rows, limit_ms, key=key))

    def _padded_rows(self, length: int, rows: int) -> int:
        if not self._needs_row_padding:
            return rows
        return min(size for size in self._sizes[length] if size >= rows)
