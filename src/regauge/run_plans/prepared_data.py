"""Lengths of the rows of a run: of the prepared data, or else of the settings.

A plan from row counts is wrong by the ratio of the lengths. So the tokens and the length histogram
of the manifest decide, which `prepare` has written. Nothing here imports numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.errors import DataError
from regauge.json_files import DocumentShape, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MANIFEST = "manifest.json"
REMEDY = "run 'regauge prepare' again"
TOKENS, SEGMENTS, TRAIN = "tokens", "segments", "train"
LENGTH_MULTIPLE = 8
"""Lengths of batches are multiples of this number."""
MAX_CANDIDATES = 128
"""Most lengths among which the lengths of batches are chosen."""
DEFAULT_BUCKETS = 4
"""Lengths of batches of a task that pads, as `task.max_buckets`."""


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the rows that a run trains on."""

    length: float
    """Mean tokens of a sequence in a batch, padding included."""
    max_length: int
    """Tokens of the longest batch."""
    real_fraction: float
    """Share of the tokens that are not padding."""
    shapes: tuple[int, ...]
    """Lengths that batches are padded to."""
    source: str
    rows: int | None = None
    """Training rows; None if the data is not prepared."""
    tokens: int | None = None
    """Real tokens of the training rows."""
    sequences_per_row: int = 1
    """Texts of a row that the model encodes."""
    vocab_size: int | None = None


class _ColumnShape(DocumentShape):
    max_length: int
    kind: str = TOKENS
    lengths: dict[str, list[int]] = Field(default={})


class _SplitShape(DocumentShape):
    rows: int
    tokens: int


class _TokenizerShape(DocumentShape):
    vocab_size: int


class _ManifestShape(DocumentShape):
    columns: dict[str, _ColumnShape]
    splits: dict[str, _SplitShape]
    tokenizer: _TokenizerShape


def read_lengths(folder: Path, max_buckets: int = DEFAULT_BUCKETS) -> RowLengths | None:
    """Return the lengths of prepared rows; None if the folder has no prepared data.

    Raises DataError if the manifest is damaged, or if it has no training rows.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    document = read_json(path, REMEDY, _ManifestShape)
    manifest = _ManifestShape.model_validate(document)
    split = manifest.splits.get(TRAIN)
    if split is None or not split.rows:
        raise DataError(f"{folder} has no training rows", "prepare more text")
    columns = manifest.columns.values()
    texts = [column for column in columns if column.kind == TOKENS]
    if not texts:
        raise DataError(f"{folder} has no column of tokens", "plan a run on texts")
    common: dict[str, Any] = {
        "source": f"the prepared data in {folder}",
        "rows": split.rows,
        "tokens": split.tokens,
        "vocab_size": manifest.tokenizer.vocab_size,
    }
    histograms = [column.lengths.get(TRAIN, []) for column in texts]
    if any(column.kind == SEGMENTS for column in columns) or not any(map(sum, histograms)):
        longest = max(column.max_length for column in texts)
        real = min(split.tokens / max(split.rows * longest, 1), 1.0)
        return RowLengths(longest, longest, real, (longest,), **common)
    return _measure(histograms, split.rows, max_buckets, common)


def read_histogram(folder: Path) -> list[int]:
    """Return the length histogram of the training texts of prepared data.

    Rows of packed texts count with their full length. Raises DataError without prepared data.
    """
    document = read_json(folder / MANIFEST, REMEDY, _ManifestShape)
    columns = _ManifestShape.model_validate(document).columns.values()
    texts = [column for column in columns if column.kind == TOKENS]
    histograms = [column.lengths[TRAIN] for column in texts if any(column.lengths.get(TRAIN, []))]
    if histograms:
        return add_histograms(histograms)
    longest = max((column.max_length for column in texts), default=0)
    if not longest:
        raise DataError(f"{folder} has no column of tokens", "name a dataset of texts")
    return [*[0] * longest, 1]


def _measure(
    histograms: Sequence[Sequence[int]], rows: int, max_buckets: int, common: Mapping[str, Any]
) -> RowLengths:
    """Return the lengths of rows that are padded to a few lengths."""
    histogram = add_histograms(histograms)
    shapes = choose_lengths(histogram, max_buckets)
    sequences = sum(histogram)
    tokens = sum(length * count for length, count in enumerate(histogram))
    padded = sum(
        next(shape for shape in shapes if shape >= length) * count
        for length, count in enumerate(histogram)
        if count
    )
    return RowLengths(
        padded / sequences,
        shapes[-1],
        tokens / padded,
        shapes,
        sequences_per_row=max(round(sequences / rows), 1),
        **common,
    )


def add_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Return the sum of histograms, as long as the longest one."""
    total = [0] * max(map(len, histograms))
    for histogram in histograms:
        for length, count in enumerate(histogram):
            total[length] += count
    return total


def choose_lengths(histogram: Sequence[int], max_buckets: int) -> tuple[int, ...]:
    """Return at most `max_buckets` lengths that cover a histogram with the least padding.

    Entry i of the histogram is the number of texts with i tokens. Among `MAX_CANDIDATES` multiples
    of `LENGTH_MULTIPLE` the result is exact, by dynamic programming.
    """
    longest = max((length for length, count in enumerate(histogram) if count), default=1)
    step = LENGTH_MULTIPLE * -(-longest // (LENGTH_MULTIPLE * MAX_CANDIDATES))
    ends = range(step, longest + step, step)
    covered = [0, *accumulate(sum(histogram[max(end - step + 1, 0) : end + 1]) for end in ends)]
    covered = [0, *(count + histogram[0] for count in covered[1:])]
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        index: (covered[index] * end, (end,)) for index, end in enumerate(ends, start=1)
    }
    for _ in range(max_buckets - 1):
        extended = dict(best)
        for index, end in enumerate(ends, start=1):
            options = (
                (best[start][0] + (covered[index] - covered[start]) * end, (*best[start][1], end))
                for start in range(1, index)
            )
            extended[index] = min((best[index], *options), key=_order)
        best = extended
    return best[len(ends)][1]


def _order(choice: tuple[int, tuple[int, ...]]) -> tuple[int, int]:
    """Return the padded tokens and the number of lengths: fewer lengths are better at a tie."""
    return choice[0], len(choice[1])
