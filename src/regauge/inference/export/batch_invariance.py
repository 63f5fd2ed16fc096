"""Finds the batch sizes whose outputs are bitwise independent of the batch's other rows.

A library may sum a matrix product in another order for another batch size. So a bucket keeps only
the batch sizes that give every text the same bits as the largest batch. The bits must not depend on
a text's position or on the other texts. This property is called batch invariance.

A graph for any shape is first checked at a few lengths. Rows meet only in linear layers' matrix
products. A library selects the kernel for such a product by its number of tokens, rows x length.
All batch sizes from the shortest to the longest length cover the range of these numbers. If all
outputs agree, the lengths in between run the same kernels. If any output differs, the kernel
depends on the number of tokens, and every length is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from regauge.inference.backends import to_array
from regauge.inference.export.buckets import BucketBatch, spread_buckets
from regauge.inference.export.manifest import Bucket
from regauge.system import stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from regauge.inference.backends import Runner
    from regauge.inference.export.records import Records

    SyntheticRecords = Callable[[int, int, int], Records]


NUM_SPREAD_LENGTHS = 10
"""How many lengths to check first if there are more."""
MIN_COMPARED_NUMBERS = 256
"""Minimum output numbers to compare: a single score may agree by chance."""


class InvariantBuckets(NamedTuple):
    """Buckets reduced to batch-invariant batch sizes."""

    buckets: tuple[Bucket, ...]
    num_texts: int
    """How many texts were compared."""


def check_batch_invariance(
    runner: Runner,
    buckets: Sequence[Bucket],
    synthetic_records: SyntheticRecords,
    on_bucket: Callable[[], None] = lambda: None,
) -> InvariantBuckets | None:
    """Return each bucket's batch-invariant batch sizes.

    Returns None if outputs depend on the other rows or on the position, even at one batch size.
    `synthetic_records(count, min_length, max_length)` makes the records to compare. `on_bucket` is
    called after each checked bucket.
    """
    spread = list(buckets)
    if len(buckets) > NUM_SPREAD_LENGTHS:
        spread = spread_buckets(buckets, NUM_SPREAD_LENGTHS)
    invariant = _check_buckets(runner, spread, synthetic_records, on_bucket)
    if invariant is None:
        return None
    num_texts = sum(bucket.batch_sizes[0] for bucket in spread)
    if invariant == spread:
        return InvariantBuckets(tuple(buckets), num_texts)
    known = {bucket.length: bucket for bucket in invariant}
    others = [bucket for bucket in buckets if bucket.length not in known]
    checked = _check_buckets(runner, others, synthetic_records, on_bucket)
    if checked is None:
        return None
    known |= {bucket.length: bucket for bucket in checked}
    num_texts += sum(bucket.batch_sizes[0] for bucket in others)
    return InvariantBuckets(tuple(known[bucket.length] for bucket in buckets), num_texts)


def _check_buckets(
    runner: Runner,
    buckets: Sequence[Bucket],
    synthetic_records: SyntheticRecords,
    on_bucket: Callable[[], None],
) -> list[Bucket] | None:
    """Return buckets reduced to batch-invariant sizes; None if a largest batch is not."""
    invariant, min_length = [], 1
    for bucket in buckets:
        stop_signals.check_stop()
        largest, *smaller = bucket.batch_sizes
        records = synthetic_records(largest, min_length, bucket.length)
        expected = _compute_batch(runner, bucket.length, largest, records, np.arange(largest))
        moved = _move_records(largest)
        outputs = _compute_batch(runner, bucket.length, largest, records, moved)
        if not np.array_equal(expected[moved], outputs):
            return None
        rows = [
            size
            for size in smaller
            if _matches_largest_batch(runner, bucket.length, size, records, expected)
        ]
        invariant.append(Bucket(length=bucket.length, batch_sizes=(largest, *rows)))
        min_length = bucket.length + 1
        on_bucket()
    return invariant


def _move_records(num_rows: int) -> np.ndarray:
    """Return the second half of some record indices, in another order.

    In a batch of `num_rows`, these records have other positions and other neighbors than in the
    batch of all records, and the remaining rows are empty.
    """
    return np.roll(np.arange(num_rows // 2, num_rows)[::-1], 1)


def _matches_largest_batch(
    runner: Runner, length: int, size: int, records: Records, expected: np.ndarray
) -> bool:
    """Return whether batches of a size give the same bits as the largest batch.

    Records from the middle are computed in reverse order, so that each has another position. At
    least `MIN_COMPARED_NUMBERS` output numbers are compared, if there are enough.
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
    """Compute some records in one batch, [records, width] fp32."""
    with torch.no_grad():
        output = runner(*records.build_inputs(BucketBatch(length, num_rows, indices)))
    return to_array(output)[: len(indices)].copy()
