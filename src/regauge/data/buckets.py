"""Bucket lengths: the few lengths to pad batches to, so that their shapes repeat.

Entry i in a histogram is the number of texts with i tokens. Nothing here imports numpy.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from regauge.data.packing import LENGTH_MULTIPLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LENGTH_STEPS = ((32, 2), (64, 4), (128, 8), (256, 16), (512, 32), (1 << 30, 64))
"""(up to this length, distance between fine lengths); they cost about 4 % padding."""
MIN_FINE_LENGTH = 4


class BatchForm(NamedTuple):
    """How a global batch is split into model batches."""

    rows: int
    """Rows per global batch."""
    microbatch_rows: int
    has_any_shape: bool
    """Whether texts are packed into rows, because no shape is compiled."""
    processes: int = 1


class TokenCounts(NamedTuple):
    """Tokens in training batches."""

    rows: int
    """Rows, including those missing at the end of an epoch."""
    real: int
    computed: int
    """Tokens that the model computes, padding included."""

    @property
    def real_fraction(self) -> float:
        return self.real / self.computed


def list_fine_lengths(max_length: int) -> list[int]:
    """Return the lengths up to `max_length` to which serving pads batches of any shape."""
    lengths, length = [], MIN_FINE_LENGTH
    while length < max_length:
        lengths.append(length)
        length += next(step for limit, step in LENGTH_STEPS if length < limit)
    return [*lengths, max_length]


def choose_bucket_lengths(histogram: Sequence[int], max_buckets: int) -> tuple[int, ...]:
    """Return at most `max_buckets` lengths that cover a histogram with the least padding.

    The result is exact, by dynamic programming over multiples of `LENGTH_MULTIPLE`: a bucket costs
    length times number of texts.
    """
    lengths, counts = _list_candidates(histogram)
    cumulative = [0, *accumulate(counts)]
    cost = [0, *(length * count for length, count in zip(lengths, cumulative[1:], strict=True))]
    starts = [[0] * len(cost)]
    for _ in range(max_buckets - 1):
        cost, start = _add_bucket(cost, lengths, cumulative)
        starts.append(start)
    selected, end = [], len(lengths)
    while end > 0:
        selected.append(lengths[end - 1])
        end = starts.pop()[end]
    return tuple(reversed(selected))


def _add_bucket(
    cost: Sequence[int], lengths: Sequence[int], cumulative: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the costs with one more bucket, and where the last bucket starts.

    Entry i is about the first i lengths. The best start never falls with i, because costs have the
    quadrangle inequality. So the starts of both halves are on the two sides of the middle's.
    """
    best, starts = list(cost), [0] * len(cost)
    ranges = [(1, len(lengths), 0, len(lengths) - 1)]
    while ranges:
        low, high, first, last = ranges.pop()
        if low > high:
            continue
        middle = (low + high) // 2
        length, total = lengths[middle - 1], cumulative[middle]
        best[middle], starts[middle] = min(
            (cost[start] + (total - cumulative[start]) * length, start)
            for start in range(first, min(last, middle - 1) + 1)
        )
        ranges.append((low, middle - 1, first, starts[middle]))
        ranges.append((middle + 1, high, starts[middle], last))
    return best, starts


def find_bucket_length(length: int, bucket_lengths: tuple[int, ...]) -> int:
    """Return the smallest bucket length >= `length`."""
    return next(bucket_length for bucket_length in bucket_lengths if bucket_length >= length)


def sum_histograms(histograms: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sum of histograms, as long as the longest one."""
    histograms = list(histograms)
    total = [0] * max(map(len, histograms), default=0)
    for counts in histograms:
        for length, count in enumerate(counts):
            total[length] += count
    return tuple(total)


def longest_text_histogram(histograms: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the expected number of rows per longest text length.

    Assumes independent text lengths. Every length in a histogram counts at least once.
    """
    size = max([2, *(len(counts) for counts in histograms)])
    shares = [1.0] * size
    for counts in histograms:
        total = max(sum(counts), 1)
        extended = [*counts, *[0] * (size - len(counts))]
        shares = [
            share * (n / total) for share, n in zip(shares, accumulate(extended), strict=True)
        ]
    num_rows = max((sum(counts) for counts in histograms), default=0)
    occurring = sum_histograms(histograms) + (0,) * size
    expected = (after - before for before, after in zip([0.0, *shares], shares, strict=False))
    return tuple(
        max(round(share * num_rows), 1) if occurring[length] else 0
        for length, share in enumerate(expected)
    )


def joined_text_histogram(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...]:
    """Return the expected number of rows per length of two joined texts.

    Assumes independent text lengths. Every length in a histogram counts at least once.
    """
    total = max(sum(first), 1)
    return tuple(max(round(n / total), 1) if n else 0 for n in _convolve(first, second))


def _convolve(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Convolve counts: one product of integers with the counts as digits."""
    largest = max(sum(first), 1) * max(sum(second), 1)
    size = -(-largest.bit_length() // 8)  # bytes of a digit

    def pack(counts: Sequence[int]) -> int:
        return int.from_bytes(b"".join(n.to_bytes(size, "little") for n in counts), "little")

    digits = (pack(first) * pack(second)).to_bytes(size * (len(first) + len(second)), "little")
    return [
        int.from_bytes(digits[size * index : size * (index + 1)], "little")
        for index in range(len(first) + len(second) - 1)
    ]


def _list_candidates(histogram: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return candidate lengths, and how many texts lie between each one and the previous one."""
    counts: dict[int, int] = {}
    longest = 1
    for length, count in enumerate(histogram):
        if count:
            bucket = LENGTH_MULTIPLE * max(1, -(-length // LENGTH_MULTIPLE))
            counts[bucket] = counts.get(bucket, 0) + count
            longest = max(longest, length)
    top = LENGTH_MULTIPLE * -(-longest // LENGTH_MULTIPLE)
    counts.setdefault(top, 0)
    lengths = sorted(counts)
    return lengths, [counts[length] for length in lengths]
