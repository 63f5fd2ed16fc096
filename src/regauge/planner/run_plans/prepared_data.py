"""Lengths of the rows of a run: of the prepared data, or else of the settings.

A plan from row counts is wrong by the ratio of the lengths. So the tokens and the length histogram
of the manifest decide, which `prepare` has written. Nothing here imports numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.data.buckets import (
    choose_bucket_lengths,
    count_batch_tokens,
    joined_text_histogram,
    longest_text_histogram,
    sum_histograms,
)
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.system.json_files import DocumentShape, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from regauge.data.buckets import BatchForm
    from regauge.planner.run_plans.task_texts import TaskTexts

MANIFEST = "manifest.json"
REMEDY = "run 'regauge prepare' again"
TOKENS, TRAIN = "tokens", "train"
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
    """Texts of a row that the model encodes, with those of missing candidates."""
    vocab_size: int | None = None


class _ColumnShape(DocumentShape):
    max_length: int
    kind: str = TOKENS
    lengths: dict[str, list[int]] = Field(default={})
    max_group_size: int = 1


class _SplitShape(DocumentShape):
    rows: int
    tokens: int


class _TokenizerShape(DocumentShape):
    vocab_size: int


class _ManifestShape(DocumentShape):
    columns: dict[str, _ColumnShape]
    splits: dict[str, _SplitShape]
    tokenizer: _TokenizerShape


def read_lengths(
    folder: Path, texts: TaskTexts, form: BatchForm, max_buckets: int = DEFAULT_BUCKETS
) -> RowLengths | None:
    """Return the lengths of the rows that a task trains on; None without prepared data.

    `form` is how its global batch is split, which decides the padding.

    Raises DataError if the manifest is damaged, or if it has no training rows or no lengths of
    texts, and SettingsError if the data lacks a text field of the task.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    document = read_json(path, REMEDY, _ManifestShape)
    manifest = _ManifestShape.model_validate(document)
    split = manifest.splits.get(TRAIN)
    if split is None or not split.rows:
        raise DataError(f"{folder} has no training rows", "prepare more text")
    columns = {name: item for name, item in manifest.columns.items() if item.kind == TOKENS}
    if not columns:
        raise DataError(f"{folder} has no column of tokens", "plan a run on texts")
    for name in texts.all_fields:
        if name not in columns:
            problem = f"the data in {folder} has no text field '{name}'"
            raise SettingsError(problem, did_you_mean(name, sorted(columns)))
    common: dict[str, Any] = {
        "source": f"the prepared data in {folder}",
        "rows": split.rows,
        "tokens": split.tokens,
        "vocab_size": manifest.tokenizer.vocab_size,
    }
    if texts.padding == "whole":
        halves = [columns[name].max_length for name in texts.fields]
        longest = sum(halves) or max(column.max_length for column in columns.values())
        real = min(split.tokens / max(split.rows * longest, 1), 1.0)
        return RowLengths(longest, longest, real, (longest,), **common)
    if not any(any(columns[name].lengths.get(TRAIN, ())) for name in texts.all_fields):
        raise DataError(f"the manifest in {folder} has no lengths of texts", REMEDY)
    return _measure(columns, texts, split.rows, (form, max_buckets), common)


def read_histogram(folder: Path) -> Sequence[int]:
    """Return the length histogram of the training texts of prepared data.

    Rows of packed texts count with their full length. Raises DataError without prepared data.
    """
    document = read_json(folder / MANIFEST, REMEDY, _ManifestShape)
    columns = _ManifestShape.model_validate(document).columns.values()
    texts = [column for column in columns if column.kind == TOKENS]
    histograms = [column.lengths[TRAIN] for column in texts if any(column.lengths.get(TRAIN, []))]
    if histograms:
        return sum_histograms(histograms)
    longest = max((column.max_length for column in texts), default=0)
    if not longest:
        raise DataError(f"{folder} has no column of tokens", "name a dataset of texts")
    return [*[0] * longest, 1]


def _measure(
    columns: Mapping[str, _ColumnShape],
    texts: TaskTexts,
    rows: int,
    batches: tuple[BatchForm, int],
    common: Mapping[str, Any],
) -> RowLengths:
    """Return the lengths of rows that are padded to a few lengths.

    All splits decide the lengths, as in training. The training texts decide the padding. `batches`
    are the form of a batch and the maximum number of lengths.
    """
    form, max_buckets = batches
    fields = [columns[name] for name in texts.all_fields]
    everything = [sum_histograms(column.lengths.values()) for column in fields]
    trained = [column.lengths.get(TRAIN, []) for column in fields]
    shapes = choose_bucket_lengths(_combine(everything, texts), max_buckets)
    candidates = [columns[name].max_group_size for name in texts.candidate_fields]
    sequences = texts.count_sequences(max(candidates, default=1))
    form = form._replace(has_any_shape=form.has_any_shape and texts.can_pack)
    if form.has_any_shape and texts.padding == "longest":  # missing candidates take no place
        histogram = sum_histograms(trained)
        texts_per_row = max(round(sum(histogram) / rows), 1)
        length = count_batch_tokens(histogram, shapes, form, texts_per_row)
        length *= sum(histogram) / (rows * sequences)
    else:
        texts_per_row = len(texts.all_fields) if texts.padding == "separate" else 1
        length = count_batch_tokens(_combine(trained, texts), shapes, form, texts_per_row)
    tokens = sum(size * count for counts in trained for size, count in enumerate(counts))
    real = tokens / max(length * sequences * rows, 1)
    return RowLengths(
        length, shapes[-1], min(real, 1.0), shapes, sequences_per_row=sequences, **common
    )


def _combine(histograms: Sequence[Sequence[int]], texts: TaskTexts) -> Sequence[int]:
    """Return the number of texts by the length that decides their bucket."""
    if texts.padding == "longest":
        return longest_text_histogram(histograms)
    if texts.padding == "joined":
        return reduce(joined_text_histogram, histograms)
    return sum_histograms(histograms)
