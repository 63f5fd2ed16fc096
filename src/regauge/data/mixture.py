"""Mixtures: several datasets as one, in exact shares over any number of steps.

Rows are numbered one dataset after the other. A row used again in the next pass over its dataset
gets a higher number, so the random numbers differ. A step's rows depend on the step alone, not on
earlier steps or the world size.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.config import describe_first_difference
from regauge.data.buckets import sum_histograms
from regauge.data.columns import value_ranges
from regauge.data.dataset import (
    ColumnInfo,
    Dataset,
    DatasetManifest,
    DatasetRows,
    SplitInfo,
    read_manifest,
)
from regauge.data.randomness import Permutation
from regauge.data.row_order import RowOrder
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from regauge.data.settings import DataSettings, MixEntry

_CELL_FORMAT = {"kind", "max_length", "max_group_size", "class_names", "prompt"}
"""Column attributes for the format and meaning of cells."""


def read_data_manifest(data: DataSettings) -> DatasetManifest:
    """Read a run's manifest: one dataset's, or merged from all mixed ones."""
    manifest = read_manifest(Path(data.path))
    if not data.mix:
        return manifest
    mixed_manifests = [read_manifest(Path(entry.path)) for entry in data.mix]
    for entry, mixed_manifest in zip(data.mix, mixed_manifests, strict=True):
        _check_compatible(data, manifest, entry, mixed_manifest)
    return _merge_manifests(data, [manifest, *mixed_manifests])


def open_data(data: DataSettings) -> Dataset:
    """Open the rows a run trains on; raises DataError if the datasets are incompatible."""
    return Mixture(data) if data.mix else Dataset(Path(data.path))


def build_row_order(
    data: DataSettings, manifest: DatasetManifest, batch_rows: int, seed: int
) -> RowOrder:
    num_rows = manifest.splits["train"].rows
    if not data.mix:
        return RowOrder(num_rows, batch_rows, seed, manifest.fingerprint)
    mixed_sizes = [read_manifest(Path(entry.path)).splits["train"].rows for entry in data.mix]
    shares = [Fraction(str(entry.fraction)) for entry in data.mix]
    sizes = [num_rows - sum(mixed_sizes), *mixed_sizes]
    return MixedRowOrder(
        sizes, shares, batch_rows=batch_rows, seed=seed, fingerprint=manifest.fingerprint
    )


class Mixture(Dataset):
    """Datasets with the same layout and tokenizer; held-out rows are evaluated separately."""

    def __init__(self, data: DataSettings) -> None:
        main = Dataset(Path(data.path))
        self.folder = main.folder
        self.manifest = read_data_manifest(data)
        self._datasets = {"": main} | {entry.name: Dataset(Path(entry.path)) for entry in data.mix}

    def rows(self, name: str) -> DatasetRows:
        """Return all datasets' training rows, or the first one's held-out rows."""
        if name == "train":
            return _ConcatenatedRows([dataset.rows(name) for dataset in self._datasets.values()])
        return self._datasets[""].rows(name)

    def heldout_sets(self) -> dict[str, Dataset]:
        return self._datasets


class MixedRowOrder(RowOrder):
    """A mixture's row order: every mixed dataset has an exact share of the rows.

    After s steps of B rows, floor(s B share) rows of a dataset have been used. Their usage counts
    differ by at most one. An epoch is one pass over the first dataset.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        shares: Sequence[Fraction],
        *,
        batch_rows: int,
        seed: int,
        fingerprint: str,
    ) -> None:
        super().__init__(sum(sizes), batch_rows, seed, fingerprint)
        self._sizes, self._shares = tuple(sizes), tuple(shares)
        first_share = 1 - sum(shares, Fraction(0))
        self.steps_per_epoch = math.ceil(sizes[0] / (batch_rows * first_share))
        self._permutation = lru_cache(maxsize=4 * len(sizes))(self._build_dataset_permutation)

    def epoch(self, step: int) -> int:
        """Return 0: the row number includes the pass over the dataset."""
        del step
        return 0

    def batch(self, step: int, offset: int = 0) -> np.ndarray:
        """Return a global batch's row numbers, [batch_rows], one dataset after the other."""
        used_before, used_after = self._count_used(step), self._count_used(step + 1)
        first_numbers = np.cumsum([0, *self._sizes[:-1]])
        spans = zip(used_before, used_after, first_numbers, strict=True)
        return np.concatenate(
            [
                self._number_rows(dataset, np.arange(start, stop) + offset, first_number)
                for dataset, (start, stop, first_number) in enumerate(spans)
            ]
        )

    def _count_used(self, step: int) -> list[int]:
        """Return how many rows of each dataset the steps before `step` use."""
        total = step * self.batch_rows
        mixed = [int(total * share) for share in self._shares]
        return [total - sum(mixed), *mixed]

    def _number_rows(
        self, dataset: int, positions: np.ndarray, first_number: np.int64
    ) -> np.ndarray:
        """Return the row numbers at positions in the endless sequence of passes over a dataset."""
        passes, positions_in_pass = np.divmod(positions, self._sizes[dataset])
        numbers = passes * self.num_rows + first_number
        for pass_number in np.unique(passes).tolist():
            is_in_pass = passes == pass_number
            permutation = self._permutation(dataset, pass_number)
            numbers[is_in_pass] += permutation(positions_in_pass[is_in_pass])
        return numbers

    def _build_dataset_permutation(self, dataset: int, pass_number: int) -> Permutation:
        return Permutation(self._sizes[dataset], *self._key, dataset, pass_number)


class _ConcatenatedRows(DatasetRows):
    """The rows of several datasets, one dataset after the other; larger numbers wrap around."""

    def __init__(self, datasets: Sequence[DatasetRows]) -> None:
        self._datasets = tuple(datasets)
        self._starts = np.cumsum([0, *(len(rows) for rows in datasets)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read_column(self, name: str) -> np.ndarray:
        return np.concatenate([rows.read_column(name) for rows in self._datasets])

    def take(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        wrapped = np.fromiter(numbers, np.int64) % len(self)
        indices = np.searchsorted(self._starts, wrapped, side="right") - 1
        local_numbers = wrapped - self._starts[indices]
        pairs = zip(indices.tolist(), local_numbers.tolist(), strict=True)
        return [self._datasets[index].take([number])[0] for index, number in pairs]


def _check_compatible(
    data: DataSettings, manifest: DatasetManifest, entry: MixEntry, mixed: DatasetManifest
) -> None:
    for key in ("layout", "tokenizer"):
        values = [document.model_dump()[key] for document in (manifest, mixed)]
        if values[0] != values[1]:
            difference = describe_first_difference(key, *values)
            raise DataError(
                f"{entry.path} is incompatible with {data.path}: {difference}",
                f'prepare it with tokenizer.path = "{data.path}/tokenizer" and the same rows',
            )
    formats = [
        {name: column.model_dump(include=_CELL_FORMAT) for name, column in document.columns.items()}
        for document in (manifest, mixed)
    ]
    if formats[0] != formats[1]:
        difference = describe_first_difference("columns", *formats)
        raise DataError(
            f"{entry.path} is incompatible with {data.path}: {difference}",
            "prepare it with the same rows",
        )
    if not mixed.splits["train"].rows:
        raise DataError(f"{entry.path} has no training rows", "remove it from data.mix")


def _merge_manifests(data: DataSettings, manifests: list[DatasetManifest]) -> DatasetManifest:
    """Return one manifest with summed counts and histograms, and all shards' hashes.

    Values are normalized with the first dataset's statistics.
    """
    first = manifests[0]
    train = [manifest.splits["train"] for manifest in manifests]
    merged_train = SplitInfo(
        rows=sum(split.rows for split in train),
        tokens=sum(split.tokens for split in train),
        shards=tuple(shard for split in train for shard in split.shards),
    )
    columns = {
        name: _merge_columns([manifest.columns[name] for manifest in manifests])
        for name in first.columns
    }
    shares = {entry.path: str(entry.fraction) for entry in data.mix}
    return first.model_copy(
        update={
            "columns": columns,
            "splits": {**first.splits, "train": merged_train},
            "settings": {**first.settings, "mix": shares},
        }
    )


def _merge_columns(columns: list[ColumnInfo]) -> ColumnInfo:
    first = columns[0]
    missing: Counter[str] = Counter()
    ranges: dict[str, tuple[float, float]] = {}
    for column in columns:
        missing.update(column.num_missing)
        for split, (minimum, maximum) in value_ranges(column).items():
            merged_minimum, merged_maximum = ranges.get(split, (minimum, maximum))
            ranges[split] = (min(merged_minimum, minimum), max(merged_maximum, maximum))
    lengths = {
        split: sum_histograms(column.lengths.get(split, ()) for column in columns)
        for split in first.lengths
    }
    counts = {
        split: sum_histograms(column.class_counts.get(split, ()) for column in columns)
        for split in first.class_counts
    }
    return first.model_copy(
        update={
            "lengths": lengths,
            "num_missing": dict(missing),
            "ranges": ranges,
            "class_counts": counts,
        }
    )
