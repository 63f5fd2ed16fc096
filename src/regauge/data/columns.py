"""Arrow columns for rows: lists of token ids, and values.

A value is an integer or a vector (which every record has), a float or a category. The last two may
be missing: a missing float is NaN, and a missing category is MISSING. A category is stored as a
hash of its text. That needs no list of categories, so new ones may occur after training.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regauge.data.classes import NO_CLASS, LabelClasses, Spelling, list_class_texts
from regauge.data.dataset import ColumnInfo
from regauge.data.randomness import mix_bits
from regauge.data.values import (
    INT64,
    Value,
    format_key,
    parse_float,
    parse_integer,
    read_integer,
)

TOKENS_TYPE = pa.list_(pa.int32())
MARKS_TYPE = pa.list_(pa.uint8())
"""0 or 1 per token."""
TEXT_TYPE = pa.large_string()
"""A text before truncation."""
ValueKind = Literal["integer", "float", "category", "label", "vector"]
VALUE_TYPES: dict[ValueKind, pa.DataType] = {
    "integer": pa.int64(),
    "float": pa.float64(),
    "category": pa.int64(),
    "label": pa.list_(pa.string()),
    "vector": pa.list_(pa.float32()),
}
"""Value kind -> Arrow type in encoded records. A label has its classes' texts."""
VALUE_RANGES = {
    "integer": "an integer of 64 bits",
    "float": "a finite number",
    "vector": "a list of numbers that are finite in fp32",
}
"""Value kind -> description for messages."""
MISSING = NO_CLASS
"""Cell for a missing category."""
MAX_CATEGORIES = 2**20
"""Maximum distinct categories to count per column."""


def build_fixed_list_column(values: np.ndarray, list_type: pa.DataType) -> pa.ListArray:
    """Return an array, [cells, values per cell], as one Arrow column with a list type."""
    num_cells, width = values.shape
    offsets = pa.array(np.arange(num_cells + 1, dtype=np.int32) * width, pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), list_type.value_type))


def build_column(cells: list[Any], arrow_type: pa.DataType) -> pa.Array:
    """Return cells as one Arrow column; lists of numbers are arrays."""
    if not pa.types.is_list(arrow_type) or pa.types.is_string(arrow_type.value_type):
        return pa.array(cells, arrow_type)
    flat = np.concatenate(cells) if cells else np.zeros(0, dtype=np.int32)
    offsets = np.cumsum([0, *map(len, cells)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, arrow_type.value_type))


def encode_value(
    value: Value | None, kind: ValueKind, spelling: Spelling = None
) -> int | float | list[str] | np.ndarray:
    """Return a record's value as a column cell; None is a missing value.

    A whole float is an integer, and a number's text is a number. Raises TypeError if the value does
    not fit the column's kind.
    """
    if kind == "category":
        return MISSING if value is None else hash_category(value)
    if kind == "label":
        return list_class_texts(value, spelling)
    if kind == "vector":
        return _encode_vector(value)
    if isinstance(value, str):  # as in a CSV file, whose values are texts
        with suppress(ValueError):
            value = parse_integer(value) if kind == "integer" else parse_float(value)
    if kind == "float":
        if value is None:
            return math.nan
        with suppress(OverflowError):
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value)
    elif (number := read_integer(value)) is not None and number in INT64:
        return number
    raise TypeError(f"{type(value).__name__} {str(value)[:80]} is not {VALUE_RANGES[kind]}")


def _encode_vector(value: Value | None) -> np.ndarray:
    """Return a list of numbers as fp32, [size]; raises TypeError for any other value."""
    if isinstance(value, list) and value and all(type(item) in {int, float} for item in value):
        with suppress(OverflowError), np.errstate(over="ignore"):
            vector = np.array(value, np.float64).astype(np.float32)
            if np.isfinite(vector).all():
                return vector
    raise TypeError(f"{type(value).__name__} {str(value)[:80]} is not {VALUE_RANGES['vector']}")


def compute_norms(vectors: pa.Array) -> np.ndarray:
    """Return the Euclidean norm of each vector in a column, [rows]."""
    sizes = pc.list_value_length(vectors).to_numpy()
    squares = np.square(vectors.flatten().to_numpy().astype(np.float64))
    starts = np.cumsum(sizes) - sizes
    return np.sqrt(np.add.reduceat(squares, starts)) if len(sizes) else np.zeros(0)


def hash_category(value: Value) -> int:
    """Hash a value to 0 … 2^63 - 1; equal numbers and their texts have the same hash."""
    digest = hashlib.blake2b(format_key(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def find_embedding_rows(hashes: np.ndarray, count: int) -> np.ndarray:
    """Return each hash's embedding row, in 1 to `count`; 0 for MISSING."""
    with np.errstate(over="ignore"):
        words = mix_bits(hashes.astype(np.uint64)) % np.uint64(count)
    return np.where(hashes < 0, 0, words.astype(np.int64) + 1)


class ValueStats:
    """Statistics of one column in one split; for vectors, of their norms."""

    def __init__(self, kind: ValueKind) -> None:
        self.kind = kind
        self.count = self.num_missing = 0
        self.minimum, self.maximum = math.inf, -math.inf
        self.mean = self._sum_of_squares = 0.0
        self.categories: dict[int, int] | None = {} if kind in ("category", "label") else None
        """Category or class -> number of rows; None if there are too many to count."""

    def add(self, values: np.ndarray) -> None:
        """Add values, [count]; merges the moments with the formula in Chan et al., 1979."""
        is_missing = np.isnan(values) if self.kind == "float" else values == MISSING
        if self.kind in {"integer", "vector"}:
            is_missing = np.zeros(len(values), bool)
        self.num_missing += int(is_missing.sum())
        present = values[~is_missing]
        if self.kind in ("category", "label"):
            self._count_categories(present)
        if self.kind == "category":
            self.count += len(present)
        elif len(present):
            self._merge(present.astype(np.float64))

    @property
    def std(self) -> float:
        """Standard deviation without missing values."""
        return math.sqrt(self._sum_of_squares / self.count)

    def _merge(self, values: np.ndarray) -> None:
        self.minimum = min(self.minimum, values.min())
        self.maximum = max(self.maximum, values.max())
        mean, total = float(values.mean()), self.count + len(values)
        difference = mean - self.mean
        self._sum_of_squares += float(np.square(values - mean).sum())
        self._sum_of_squares += difference * difference * self.count * len(values) / total
        self.mean += difference * len(values) / total
        self.count = total

    def _count_categories(self, hashes: np.ndarray) -> None:
        for category, count in zip(*np.unique(hashes, return_counts=True), strict=True):
            if self.categories is None:
                return
            self.categories[int(category)] = self.categories.get(int(category), 0) + int(count)
            if len(self.categories) > MAX_CATEGORIES:
                self.categories = None


class ColumnStats(NamedTuple):
    """Column statistics for one split."""

    lengths: dict[str, np.ndarray]
    """Token column -> length histogram."""
    values: dict[str, ValueStats]
    """Value column -> statistics."""


def describe_column(
    kind: ValueKind, stats_by_split: dict[str, ValueStats], classes: LabelClasses | None = None
) -> ColumnInfo:
    """Return a value column's manifest entry from its statistics by split, train first.

    `classes` are a label's.
    """
    missing = {split: stats.num_missing for split, stats in stats_by_split.items()}
    ranges = {
        split: (float(stats.minimum), float(stats.maximum))
        for split, stats in stats_by_split.items()
        if math.isfinite(stats.minimum) and math.isfinite(stats.maximum)
    }
    column = ColumnInfo(
        max_length=1,
        kind="integer" if kind == "label" else kind,
        num_missing=missing,
        ranges=ranges,
    )
    if classes is not None:
        column = column.model_copy(update=_describe_classes(classes, stats_by_split))
    train = next(iter(stats_by_split.values()), None)
    if train is None or not train.count:
        return column
    if kind == "category":
        known = train.categories
        if known is None:
            return column
        unseen = [
            count
            for stats in stats_by_split.values()
            for category, count in (stats.categories or {}).items()
            if category not in known
        ]
        return column.model_copy(update={"num_distinct": len(known), "num_unseen": sum(unseen)})
    update = {
        "min": float(train.minimum),
        "max": float(train.maximum),
        "mean": float(train.mean),
        "std": float(train.std),
    }
    return column.model_copy(update=update)


def _describe_classes(
    classes: LabelClasses, stats_by_split: dict[str, ValueStats]
) -> dict[str, Any]:
    """Return a label's entries: its kind, and each class's name and number of rows."""
    counts = {split: stats.categories or {} for split, stats in stats_by_split.items()}
    names = classes.names
    numbers = chain.from_iterable(counts.values()) if names is None else range(len(names))
    num_classes = 1 + max(numbers, default=-1)
    return {
        "kind": "integers" if classes.is_list else "integer",
        "class_names": names,
        "class_counts": {
            split: tuple(by_class.get(number, 0) for number in range(num_classes))
            for split, by_class in counts.items()
        },
    }


def value_ranges(column: ColumnInfo) -> dict[str, tuple[float, float]]:
    """Return split -> (minimum, maximum); manifests from older versions have only "train"."""
    if column.ranges or column.min is None or column.max is None:
        return column.ranges
    return {"train": (column.min, column.max)}
