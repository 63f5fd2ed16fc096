"""Batch invariance: detection of the batch sizes that keep the bits of every text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regauge.inference.export.batch_invariance import (
    NUM_SPREAD_LENGTHS,
    InvariantBuckets,
    check_batch_invariance,
)
from regauge.inference.export.buckets import list_halves
from regauge.inference.export.manifest import Bucket
from regauge.inference.export.records import TextRecords
from unit.runners import CountingRunner, random_ids

MAX_ROWS = {4: 16, 8: 12, 20: 1}
BUCKETS = tuple(
    Bucket(length=length, batch_sizes=list_halves(rows)) for length, rows in MAX_ROWS.items()
)


def synthetic_records(count: int, min_length: int, max_length: int) -> TextRecords:
    ids = random_ids(count, max_length, seed=max_length, min_length=min_length)
    return TextRecords.from_lists(ids)


def check(runner: CountingRunner, buckets: tuple[Bucket, ...] = BUCKETS) -> InvariantBuckets | None:
    return check_batch_invariance(runner, buckets, synthetic_records)


def batch_sizes(result: InvariantBuckets | None) -> list[tuple[int, ...]]:
    assert result is not None
    return [bucket.batch_sizes for bucket in result.buckets]


class ChangedRunner(CountingRunner):
    """Changes the outputs of a batch, given its outputs and tokens."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._change = change

    def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
        return self._change(super().__call__(tokens, lengths, *features), tokens)


def depend_on_size(*sizes: tuple[int, int]) -> ChangedRunner:
    """Return a runner that differs in the last bit at some batch sizes, as other sums do."""
    factor = 1 + torch.finfo(torch.float32).eps
    return ChangedRunner(
        lambda outputs, tokens: outputs * factor if tuple(tokens.shape) in sizes else outputs
    )


def test_an_invariant_program_keeps_every_batch_size() -> None:
    runner = CountingRunner()
    result = check(runner)
    assert batch_sizes(result) == [(16, 8, 4, 2, 1), (12, 6, 3, 1), (1,)]
    assert result is not None
    assert [bucket.length for bucket in result.buckets] == [4, 8, 20]
    assert result.num_texts == sum(MAX_ROWS.values())
    shapes = {(rows, bucket.length) for bucket in BUCKETS for rows in bucket.batch_sizes}
    assert set(runner.shapes) == shapes


def test_only_batch_sizes_that_differ_are_removed() -> None:
    result = check(depend_on_size((4, 4), (1, 4), (3, 8)))
    assert batch_sizes(result) == [(16, 8, 2), (12, 6, 1), (1,)]


def test_if_the_largest_batch_size_differs_only_it_is_kept() -> None:
    assert batch_sizes(check(depend_on_size((16, 4)))) == [(16,), (12, 6, 3, 1), (1,)]


def test_only_declared_batch_sizes_are_computed() -> None:
    runner = CountingRunner()
    result = check(runner, (Bucket(length=4, batch_sizes=(9, 5)),))
    assert batch_sizes(result) == [(9, 5)]
    assert set(runner.shapes) == {(9, 4), (5, 4)}


def add_positions(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs + torch.arange(len(outputs))[:, None]


def add_means_of_pairs(outputs: Tensor, _: Tensor) -> Tensor:
    if len(outputs) != 16:  # only in the largest batch
        return outputs
    return outputs + outputs.view(8, 2, -1).mean(1).repeat_interleave(2, 0)


@pytest.mark.parametrize(
    ("change", "buckets"),
    [
        (lambda outputs, _: outputs + torch.roll(outputs, 1, 0), BUCKETS),
        (add_positions, BUCKETS),
        (add_means_of_pairs, BUCKETS[:1]),
    ],
    ids=["other rows", "position", "neighbor"],
)
def test_a_program_that_depends_on_other_rows_or_the_position_has_no_proof(
    change: Callable[[Tensor, Tensor], Tensor], buckets: tuple[Bucket, ...]
) -> None:
    assert check(ChangedRunner(change), buckets) is None


def test_one_bucket_without_a_proof_fails_the_check() -> None:
    def change(outputs: Tensor, tokens: Tensor) -> Tensor:
        return add_positions(outputs, tokens) if tokens.shape[1] == 8 else outputs

    assert check(ChangedRunner(change)) is None
    assert check(ChangedRunner(change), BUCKETS[:1]) is not None


def test_each_bucket_is_reported() -> None:
    lengths: list[int] = []
    runner = CountingRunner()
    check_batch_invariance(
        runner, BUCKETS, synthetic_records, lambda: lengths.append(runner.shapes[-1][1])
    )
    assert lengths == list(MAX_ROWS)


def test_texts_have_the_lengths_of_their_bucket() -> None:
    requests: list[tuple[int, int, int]] = []

    def record_request(count: int, min_length: int, max_length: int) -> TextRecords:
        requests.append((count, min_length, max_length))
        return synthetic_records(count, min_length, max_length)

    check_batch_invariance(CountingRunner(), BUCKETS, record_request)
    assert requests == [(16, 1, 4), (12, 5, 8), (1, 9, 20)]


MANY = tuple(Bucket(length=length, batch_sizes=(4, 2, 1)) for length in range(4, 28, 2))


def lengths_of(runner: CountingRunner) -> set[int]:
    return {length for _, length in runner.shapes}


def test_of_many_lengths_some_are_checked_with_all_their_batch_sizes() -> None:
    runner = CountingRunner()
    result = check(runner, MANY)
    assert result is not None
    assert result.buckets == MANY
    checked = lengths_of(runner)
    assert {MANY[0].length, MANY[-1].length} <= checked
    assert len(checked) <= NUM_SPREAD_LENGTHS < len(MANY)
    assert set(runner.shapes) == {(rows, length) for length in checked for rows in (4, 2, 1)}
    assert result.num_texts == 4 * len(checked)


def test_all_lengths_are_checked_if_a_size_of_one_differs() -> None:
    inner = next(bucket.length for bucket in MANY if bucket.length not in first_lengths())
    runner = depend_on_size((1, MANY[-1].length), (2, inner))
    result = check(runner, MANY)
    assert result is not None
    assert lengths_of(runner) == {bucket.length for bucket in MANY}
    sizes = {bucket.length: bucket.batch_sizes for bucket in result.buckets}
    expected = {bucket.length: bucket.batch_sizes for bucket in MANY}
    assert sizes == expected | {MANY[-1].length: (4, 2), inner: (4, 1)}
    assert result.num_texts == 4 * len(MANY)


def first_lengths() -> set[int]:
    """Return the lengths that are checked first."""
    runner = CountingRunner()
    check(runner, MANY)
    return lengths_of(runner)
