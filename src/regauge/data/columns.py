"""Arrow columns of rows: lists of token ids, and the values that stand beside them.

A value is a number (an integer that every record has), a real number or a category. The last two
may be missing: a real number is then NaN, a category MISSING. A category is kept as a hash of its
text, so that no list of them has to be known, and one that comes later needs no place in it.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from regauge.data.dataset import Field
from regauge.data.randomness import mix

TOKENS = pa.list_(pa.int32())
MARKS = pa.list_(pa.uint8())
"""Yes or no for each token."""
WHOLE = pa.large_string()
"""A text as it was read."""
Kind = Literal["number", "real", "category"]
VALUES: dict[Kind, pa.DataType] = {
    "number": pa.int64(),
    "real": pa.float64(),
    "category": pa.int64(),
}
"""The type of each kind of value."""
MISSING = -1
"""Stands for a category that a record does not have."""
COUNTED = 2**20
"""Categories that are told apart at most."""


def lists(values: list[np.ndarray], kind: pa.DataType = TOKENS) -> pa.ListArray:
    """Return arrays as one Arrow column of a type of lists."""
    flat = np.concatenate(values) if values else np.zeros(0, dtype=np.int32)
    return pa.ListArray.from_arrays(_offsets(values), pa.array(flat, kind.value_type))


def even_lists(values: np.ndarray, kind: pa.DataType = TOKENS) -> pa.ListArray:
    """Return [cells, values of each] as one Arrow column of a type of lists."""
    count, width = values.shape
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * width, pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), kind.value_type))


def column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return the cells of a column."""
    return lists(values, kind) if pa.types.is_list(kind) else pa.array(values, kind)


def value(found: object, kind: Kind) -> int | float:
    """Return a record's value as a cell of its column; raises TypeError for one of another kind.

    None is a value that is missing.
    """
    if kind == "category":
        return MISSING if found is None else category(found)
    if kind == "real":
        if isinstance(found, int | float | None):
            return math.nan if found is None else float(found)
    elif isinstance(found, int):
        return found
    raise TypeError(f"{type(found).__name__} is no {kind}")


def category(found: object) -> int:
    """Return the hash of a text or number, in 0 … 2^63 - 1: the same for `7` and "7"."""
    digest = hashlib.blake2b(str(found).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def buckets(hashes: np.ndarray, count: int) -> np.ndarray:
    """Return the embedding of each hash, in 1 to `count`; 0 where it is missing, below 0."""
    with np.errstate(over="ignore"):
        words = mix(hashes.astype(np.uint64)) % np.uint64(count)
    return np.where(hashes < 0, 0, words.astype(np.int64) + 1)


class Summary:
    """What the values of one column are, of one split."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.count = self.missing = 0
        self.least, self.most = math.inf, -math.inf
        self.mean = self._squares = 0.0
        self.categories: dict[int, int] | None = {} if kind == "category" else None

    def add(self, values: np.ndarray) -> None:
        """Take more values, [count]; moments are merged as by Chan et al., 1979."""
        absent = np.isnan(values) if self.kind == "real" else values == MISSING
        if self.kind == "number":
            absent = np.zeros(len(values), bool)
        self.missing += int(absent.sum())
        here = values[~absent]
        if self.kind == "category":
            self._tell_apart(here)
        elif len(here):
            self._merge(here.astype(np.float64))

    @property
    def deviation(self) -> float:
        """The standard deviation of the values that are there."""
        return math.sqrt(self._squares / self.count)

    def _merge(self, here: np.ndarray) -> None:
        self.least, self.most = min(self.least, here.min()), max(self.most, here.max())
        mean, total = float(here.mean()), self.count + len(here)
        apart = mean - self.mean
        self._squares += float(np.square(here - mean).sum())
        self._squares += apart * apart * self.count * len(here) / total
        self.mean += apart * len(here) / total
        self.count = total

    def _tell_apart(self, here: np.ndarray) -> None:
        self.count += len(here)
        for found, count in zip(*np.unique(here, return_counts=True), strict=True):
            if self.categories is None:
                return
            self.categories[int(found)] = self.categories.get(int(found), 0) + int(count)
            if len(self.categories) > COUNTED:
                self.categories = None


class Found(NamedTuple):
    """What the columns of one split hold."""

    lengths: dict[str, np.ndarray]
    """Histogram of the lengths of each column of tokens."""
    values: dict[str, Summary]


def described(kind: Kind, found: dict[str, Summary]) -> Field:
    """Return a column of values for the manifest; summaries are by split, to train on first."""
    missing = {split: each.missing for split, each in found.items()}
    ranges = {
        split: (float(each.least), float(each.most))
        for split, each in found.items()
        if math.isfinite(each.least) and math.isfinite(each.most)
    }
    field = Field(limit=1, kind=kind, missing=missing, ranges=ranges)
    train = next(iter(found.values()), None)
    if train is None or not train.count:
        return field
    if kind == "category":
        known = train.categories
        if known is None:
            return field
        late = [
            count
            for each in found.values()
            for category, count in (each.categories or {}).items()
            if category not in known
        ]
        return field.model_copy(update={"distinct": len(known), "unseen": sum(late)})
    names = ("least", "most", "mean", "deviation")
    return field.model_copy(update={name: float(getattr(train, name)) for name in names})


def reach(field: Field) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest value by split; older manifests tell of train alone."""
    if field.ranges or field.least is None or field.most is None:
        return field.ranges
    return {"train": (field.least, field.most)}


def _offsets(values: list[np.ndarray]) -> pa.Array:
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(each) for each in values], out=offsets[1:])
    return pa.array(offsets)
