"""Find the batch sizes whose outputs are bitwise independent of the other rows of a batch.

A library may sum a matrix product in another order for another batch size. So a bucket keeps only
the batch sizes that give every text the same bits as the largest batch does. The bits must not
depend on the position of a text or on the other texts. This property is called batch invariance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from regauge.artifacts.buckets import BucketBatch
from regauge.artifacts.manifest import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regauge.artifacts.records import Records
    from regauge.backends import Runner

    SyntheticRecords = Callable[[int, int, int], Records]


MIN_COMPARED_NUMBERS = 256
"""Output numbers to compare at least: a single score may agree by chance."""


class InvariantBuckets(NamedTuple):
    """The buckets, reduced to batch-invariant batch sizes."""

    buckets: tuple[Bucket, ...]
    num_texts: int
    """Number of texts that were compared."""


def check_batch_invariance(
    runner: Runner, buckets: Sequence[Bucket], synthetic_records: SyntheticRecords
) -> InvariantBuckets | None:
    """Return the batch-invariant batch sizes of each bucket.

    Returns None if outputs depend on the other rows or on the position, even at one batch size.
    `synthetic_records(count, min_length, max_length)` makes the records to compare.
    """
    invariant, num_texts, min_length = [], 0, 1
    for bucket in buckets:
        largest = bucket.batch_sizes[0]
        records = synthetic_records(largest, min_length, bucket.length)
        order = np.arange(largest)
        expected = _compute_batch(runner, bucket.length, largest, records, order)
        reversed_order = order[::-1]
        reordered = _compute_batch(runner, bucket.length, largest, records, reversed_order)[::-1]
        half = order[: -(-largest // 2)]
        half_empty = _compute_batch(runner, bucket.length, largest, records, half)
        same_order = np.array_equal(expected, reordered)
        if not same_order or not np.array_equal(expected[half], half_empty):
            return None
        rows = [
            size
            for size in bucket.batch_sizes
            if _matches_largest_batch(runner, bucket.length, size, records, expected)
        ]
        invariant.append(Bucket(length=bucket.length, batch_sizes=tuple(rows)))
        num_texts += largest
        min_length = bucket.length + 1
    return InvariantBuckets(tuple(invariant), num_texts)


def _matches_largest_batch(
    runner: Runner, length: int, size: int, records: Records, expected: np.ndarray
) -> bool:
    """Return whether batches of a size give the same bits as the largest batch.

    Records from the middle are computed in reverse order, so that each has another position. At
    least `MIN_COMPARED_NUMBERS` output numbers are compared, if there are that many.
    """
    rows_needed = -(-MIN_COMPARED_NUMBERS // expected.shape[1])
    batches = max(1, min(len(records), rows_needed) // size)
    start = (len(records) - batches * size) // 2
    for offset in range(start, start + batches * size, size):
        indices = np.arange(offset, offset + size)[::-1]
        outputs = _compute_batch(runner, length, size, records, indices)
        if not np.array_equal(outputs[::-1], expected[offset : offset + size]):
            return False
    return True


def _compute_batch(
    runner: Runner, length: int, num_rows: int, records: Records, indices: np.ndarray
) -> np.ndarray:
    """Return the outputs of some records in one batch, [records, width] fp32."""
    with torch.no_grad():
        output = runner(*records.build_inputs(BucketBatch(length, num_rows, indices)))
    outputs: np.ndarray = output.cpu().float().numpy()[: len(indices)].copy()
    return outputs
