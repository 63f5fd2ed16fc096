"""Buckets: an artifact's batch x length shapes, and how records are batched into them.

A text's bucket depends on its length alone, so padding never depends on the other texts.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regauge.data.buckets import list_fine_lengths
from regauge.inference.export.manifest import Bucket

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from regauge.inference.export.artifact import Artifact
    from regauge.inference.export.export_settings import BucketSettings

BATCH_OVERHEAD_ROWS = 2
"""Fixed cost per batch, in rows of about the same time."""
HOST_BATCH_TOKENS, DEVICE_BATCH_TOKENS = 2048, 4096
"""Default token limits per batch on CPUs and on other devices."""
NUM_STATIC_BUCKETS = 6
"""Buckets with separate graphs: lengths halve from the longest down."""
SAMPLED_ROWS = 8
"""Rows per batch when tokens are drawn."""
ROWS_MULTIPLE = 8
"""Batch sizes above this number are multiples of it."""


class BucketBatch(NamedTuple):
    """Records to compute together."""

    length: int
    """Tokens per row, padding included."""
    num_rows: int
    """Batch size; rows after the last record are empty."""
    record_indices: np.ndarray  # [at most num_rows] int64


@dataclass(frozen=True)
class Buckets:
    shapes: tuple[Bucket, ...]
    """In ascending order of length."""
    needs_row_padding: bool
    """Whether a batch must have a declared batch size, with empty rows if records are missing.

    Otherwise a batch may have any size up to the largest one.
    """
    has_fixed_rows: bool = False
    """Whether all batches of a length have the largest batch size."""

    @property
    def max_length(self) -> int:
        """Longest bucket length in tokens."""
        return self.shapes[-1].length

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """All bucket lengths in tokens, ascending."""
        return tuple(bucket.length for bucket in self.shapes)

    def find_length(self, num_tokens: int) -> int:
        """Return the smallest bucket length for a record of `num_tokens` tokens.

        Raises ValueError if the record is longer than every bucket.
        """
        self._check_longest(num_tokens)
        return self.lengths[bisect_left(self.lengths, num_tokens)]

    def make_batches(
        self, lengths: np.ndarray, halvings: int = 0, record_indices: np.ndarray | None = None
    ) -> Iterator[BucketBatch]:
        """Yield batches that together hold each record once.

        `lengths` are every record's tokens, [records] int64. `record_indices` selects the records,
        by default all. Longer records come first; equal lengths keep their order. The largest batch
        size is halved `halvings` times. Raises ValueError if a record is longer than every bucket.
        """
        indices = np.arange(len(lengths)) if record_indices is None else np.sort(record_indices)
        self._check_longest(lengths[indices].max(initial=0))
        bucket_of = np.searchsorted(self.lengths, lengths[indices])
        for index in range(len(self.shapes) - 1, -1, -1):
            members = indices[bucket_of == index]
            members = members[np.argsort(-lengths[members], kind="stable")]
            yield from self._split_members(self.shapes[index], members, halvings)

    def make_bucket_batches(
        self, length: int, record_indices: np.ndarray, halvings: int = 0
    ) -> Iterator[BucketBatch]:
        """Yield batches in one bucket that together hold the records once, in this order.

        Each batch is as large as possible, with as few empty rows as possible. The largest batch
        size is halved `halvings` times. Raises ValueError if no bucket has this `length`.
        """
        if length not in self.lengths:
            raise ValueError(f"no bucket has a length of {length} tokens")
        sizes = self._list_sizes(self.shapes[self.lengths.index(length)], halvings)
        for offset in range(0, len(record_indices), sizes[0]):
            members = record_indices[offset : offset + sizes[0]]
            fitting = (size for size in reversed(sizes) if size >= len(members))
            yield BucketBatch(
                length, next(fitting) if self.needs_row_padding else len(members), members
            )

    def make_empty_batches(self) -> list[BucketBatch]:
        """Return a batch without records for each declared shape."""
        no_records = np.empty(0, np.int64)
        return [
            BucketBatch(bucket.length, rows, no_records)
            for bucket in self.shapes
            for rows in bucket.batch_sizes
        ]

    def _split_members(
        self, bucket: Bucket, members: np.ndarray, halvings: int
    ) -> Iterator[BucketBatch]:
        sizes = self._list_sizes(bucket, halvings)
        offset = 0
        while offset < len(members):
            remaining = len(members) - offset
            if self.needs_row_padding:
                rows = _next_batch_size(sizes, remaining)
            else:
                rows = min(sizes[0], remaining)
            yield BucketBatch(bucket.length, rows, members[offset : offset + rows])
            offset += rows

    def _list_sizes(self, bucket: Bucket, halvings: int) -> tuple[int, ...]:
        """Return a bucket's batch sizes after some halvings, in descending order.

        Without row padding this is the largest batch size only.
        """
        if not self.needs_row_padding:
            return (max(1, bucket.batch_sizes[0] >> halvings),)
        allowed = bucket.batch_sizes[min(halvings, len(bucket.batch_sizes) - 1) :]
        return allowed[:1] if self.has_fixed_rows else allowed

    def _check_longest(self, num_tokens: int) -> None:
        """Raise ValueError if a record of `num_tokens` tokens is longer than every bucket."""
        if num_tokens > self.max_length:
            raise ValueError(f"a row of {num_tokens} tokens is longer than {self.max_length}")


def select_buckets(artifact: Artifact, *, batch_invariant: bool) -> Buckets:
    """Return an artifact's buckets.

    When tokens are drawn, batch-invariant batches have one number of rows, because another number
    may change the last bits of logits, and so a drawn token.
    """
    manifest = artifact.manifest
    if artifact.generation.is_sampled and batch_invariant:
        return fix_rows(manifest.buckets, SAMPLED_ROWS)
    has_sizes = batch_invariant and manifest.batch_invariance is not None
    needs_padding = has_sizes or not manifest.compiled.backend.has_dynamic_shapes
    return Buckets(manifest.buckets, needs_row_padding=needs_padding)


def fix_rows(shapes: Iterable[Bucket], num_rows: int) -> Buckets:
    """Return buckets with the same lengths whose batches all have `num_rows` rows."""
    sizes = list_halves(num_rows)
    fixed = tuple(Bucket(length=shape.length, batch_sizes=sizes) for shape in shapes)
    return Buckets(fixed, needs_row_padding=True, has_fixed_rows=True)


def _next_batch_size(allowed: tuple[int, ...], remaining: int) -> int:
    """Return the next batch size.

    All remaining records go into one batch with empty rows if that costs less than several full
    batches. `allowed` are the batch sizes in descending order.
    """
    full = next((rows for rows in allowed if rows <= remaining), None)
    padded = min((rows for rows in allowed if rows >= remaining), default=None)
    if full is None or padded is None:
        return padded or full or allowed[-1]
    cost, rest = 0, remaining
    for rows in allowed:
        count, rest = divmod(rest, rows)
        cost += count * (rows + BATCH_OVERHEAD_ROWS)
    return padded if padded + BATCH_OVERHEAD_ROWS <= cost + rest else full


def resolve_buckets(
    settings: BucketSettings, max_length: int, *, on_host: bool, is_fast: bool = False
) -> BucketSettings:
    """Return the settings with the device's default limit.

    With `is_fast`, any graph gets a static graph's default lengths. `max_length` is the longest
    text in tokens.
    """
    default = HOST_BATCH_TOKENS if on_host else DEVICE_BATCH_TOKENS
    lengths = tuple(_static_lengths(max_length)) if is_fast else ()
    updates = {
        "max_batch_tokens": settings.max_batch_tokens or default,
        "lengths": settings.lengths or lengths,
    }
    return settings.model_copy(update=updates)


def build_buckets(
    settings: BucketSettings, max_length: int, *, has_dynamic_shapes: bool
) -> tuple[Bucket, ...]:
    """Return the buckets for texts of at most `max_length` tokens, with their batch sizes.

    A dynamic graph serves every batch size, so a bucket has all halves of the largest one. A static
    graph serves one, so a bucket has the largest batch size and 1. `settings` come from
    `resolve_buckets`.
    """
    lengths = settings.lengths or (
        list_fine_lengths(max_length) if has_dynamic_shapes else _static_lengths(max_length)
    )
    lengths = sorted({min(length, max_length) for length in lengths} | {max_length})
    max_rows = {length: _max_rows(settings, length) for length in lengths}
    list_sizes = list_halves if has_dynamic_shapes else _max_and_one
    return tuple(
        Bucket(length=length, batch_sizes=list_sizes(max_rows[length])) for length in lengths
    )


def _max_and_one(rows: int) -> tuple[int, ...]:
    return (rows, 1) if rows > 1 else (1,)


def list_halves(rows: int) -> tuple[int, ...]:
    """Return a number of rows and all halves, rounded down, in descending order to 1."""
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def spread_buckets(buckets: Sequence[Bucket], count: int) -> list[Bucket]:
    """Return at most `count` buckets with evenly spread lengths, by ratio; the ends are included.

    `buckets` are in ascending order of length.
    """
    lengths = np.log([bucket.length for bucket in buckets])
    targets = np.linspace(lengths[0], lengths[-1], count)
    nearest = {int(np.abs(lengths - target).argmin()) for target in targets}
    return [buckets[index] for index in sorted(nearest)]


def _static_lengths(max_length: int) -> list[int]:
    halves = (max_length >> n for n in range(NUM_STATIC_BUCKETS))
    return [max(ROWS_MULTIPLE, -(-half // ROWS_MULTIPLE) * ROWS_MULTIPLE) for half in halves]


def _max_rows(settings: BucketSettings, length: int) -> int:
    max_batch_tokens = settings.max_batch_tokens or DEVICE_BATCH_TOKENS
    rows = max(1, min(settings.max_batch_size, max_batch_tokens // length))
    return rows - rows % ROWS_MULTIPLE if rows > ROWS_MULTIPLE else rows
