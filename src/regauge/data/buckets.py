"""Bucket lengths: the few lengths that batches are padded to, so that their shapes repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

LENGTH_MULTIPLE = 8
"""Bucket lengths are multiples of this number; matrix units compute these fastest."""


def choose_bucket_lengths(histogram: tuple[int, ...], max_buckets: int) -> tuple[int, ...]:
    """Return at most `max_buckets` lengths that cover a histogram with the least padding.

    Entry i of the histogram is the number of texts with i tokens. The result is exact. It is
    computed by dynamic programming over the multiples of `LENGTH_MULTIPLE`: the cost of a bucket is
    its length times its number of texts.
    """
    lengths, counts = _list_candidates(histogram)
    cumulative = np.concatenate([[0], np.cumsum(counts)])
    num_lengths = len(lengths)
    cost = np.full((max_buckets + 1, num_lengths + 1), np.inf)
    cost[:, 0] = 0
    previous = np.zeros((max_buckets + 1, num_lengths + 1), np.int64)
    for num_buckets in range(1, max_buckets + 1):
        for end in range(1, num_lengths + 1):
            costs = (
                cost[num_buckets - 1, :end]
                + (cumulative[end] - cumulative[:end]) * lengths[end - 1]
            )
            previous[num_buckets, end] = int(costs.argmin())
            cost[num_buckets, end] = costs.min()
    selected, end, num_buckets = [], num_lengths, max_buckets
    while end > 0:
        selected.append(int(lengths[end - 1]))
        end, num_buckets = int(previous[num_buckets, end]), num_buckets - 1
    return tuple(reversed(selected))


def real_token_fraction(histogram: tuple[int, ...], bucket_lengths: tuple[int, ...]) -> float:
    """Return the fraction of real tokens if each text is padded to its bucket length."""
    num_tokens = sum(length * count for length, count in enumerate(histogram))
    num_slots = sum(
        find_bucket_length(length, bucket_lengths) * count
        for length, count in enumerate(histogram)
        if count
    )
    return num_tokens / max(num_slots, 1)


def sum_histograms(histograms: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Return the sum of histograms, as long as the longest one."""
    total = np.zeros(max(map(len, histograms), default=0), np.int64)
    for counts in histograms:
        total[: len(counts)] += np.asarray(counts, np.int64)
    return total


def find_bucket_length(length: int, bucket_lengths: tuple[int, ...]) -> int:
    """Return the smallest bucket length that is not below a length."""
    return next(bucket_length for bucket_length in bucket_lengths if bucket_length >= length)


def _list_candidates(histogram: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidate lengths, and the number of texts between each one and the one before."""
    max_length = max([1, *(length for length, count in enumerate(histogram) if count)])
    lengths = np.arange(LENGTH_MULTIPLE, max_length + LENGTH_MULTIPLE, LENGTH_MULTIPLE)
    counts = np.zeros(len(lengths), np.int64)
    for length, count in enumerate(histogram):
        if count:
            counts[max(0, -(-length // LENGTH_MULTIPLE) - 1)] += count
    is_used = counts > 0
    is_used[-1] = True
    return lengths[is_used], counts[is_used]
