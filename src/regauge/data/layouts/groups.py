"""One row per record group, such as a query and the documents shown for it.

A group's records must be consecutive in the source, as in files for learning to rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regauge.data import dataset
from regauge.data.columns import TEXT_TYPE, ColumnStats, hash_category
from regauge.data.layouts import UnusableRecord
from regauge.data.layouts._of_records import RECORD_SETTINGS, RecordLayout
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from regauge.data.classes import LabelClasses
    from regauge.data.layouts import EncodedRecord, Lengths
    from regauge.data.settings import RowLayout, SplitSettings

KEY = ""
"""Group key column; no field has this name."""


class GroupsLayout(RecordLayout):
    """Texts shared by a group, and lists with the records' other texts and values.

    Held-out texts are also stored before truncation.
    """

    kind: ClassVar[str] = "groups"
    setting_names: ClassVar[tuple[str, ...]] = (
        *RECORD_SETTINGS,
        "group_by",
        "shared",
        "max_group_size",
    )

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        super().check_settings(settings)
        if settings.group_by is None:
            raise ValueError(
                "layout 'groups' needs group_by, the field that the records of a row share"
            )
        for name in settings.shared:
            if name not in settings.fields:
                raise ValueError(f"'{name}' is shared and has no limit in fields")

    def check_split(self, split: SplitSettings) -> None:
        if split.group_by != self.settings.group_by:
            raise ValueError(
                "records of a group must stay in one split;"
                f' set split.group_by = "{self.settings.group_by}"'
            )

    def set_classes(self, classes: dict[str, LabelClasses]) -> None:
        for name, label in classes.items():
            if label.is_list:
                remedy = "use the layout 'fields', or one class for each record"
                raise DataError(f"the records of a group have lists of classes in '{name}'", remedy)
        super().set_classes(classes)

    def encoded_columns(self) -> list[pa.Field]:
        return [pa.field(KEY, pa.int64()), *super().encoded_columns()]

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        key = encoded.record.get(str(self.settings.group_by))
        if key is None:
            raise UnusableRecord(f"no field '{self.settings.group_by}'")
        for cells in super().build_cells(encoded):
            yield [hash_category(key), *cells]

    def build_rows(self, encoded: Iterable[pa.RecordBatch], pad_id: int) -> Iterator[pa.Table]:
        """Yield one row per group; raises DataError if a group's records are not consecutive."""
        del pad_id
        earlier_keys: set[int] = set()
        names = [field.name for field in self.encoded_columns()[1:]]
        for records in _read_groups(encoded, range(2, 2 + len(names)), names):
            self._check_groups(records, earlier_keys)
            yield self._build_table(records)

    def record_text_columns(self) -> list[pa.Field]:
        return [pa.field(name, TEXT_TYPE) for name in self.settings.fields]

    def row_text_columns(self) -> list[pa.Field]:
        """Return a column for each text; it has lists unless the group shares the text."""
        shared = self.settings.shared
        return [
            pa.field(name, TEXT_TYPE if name in shared else pa.list_(TEXT_TYPE))
            for name in self.settings.fields
        ]

    def build_row_texts(self, encoded: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        names = list(self.settings.fields)
        first = 1 + len(self.encoded_columns())
        for records in _read_groups(encoded, range(first, first + len(names)), names):
            yield self._build_table(records).cast(pa.schema(self.row_text_columns()))

    def count_lengths(self, rows: pa.Table) -> Lengths:
        """Return the number of tokens in each row's texts; for a list, the maximum."""
        return {name: _max_lengths(rows.column(name)) for name in self.token_limits()}

    def count_tokens(self, rows: pa.Table, lengths: Lengths) -> int:
        """Return how many tokens all texts have; a shared text counts once."""
        del lengths
        columns = (rows.column(name).combine_chunks() for name in self.token_limits())
        return sum(len(pc.list_flatten(cells, recursive=True)) for cells in columns)

    def describe_columns(
        self, stats_by_split: dict[str, ColumnStats]
    ) -> dict[str, dataset.ColumnInfo]:
        update = {"max_group_size": self.settings.max_group_size}
        return {
            name: column if name in self.settings.shared else column.model_copy(update=update)
            for name, column in super().describe_columns(stats_by_split).items()
        }

    def _check_groups(self, records: pa.Table, earlier_keys: set[int]) -> None:
        """Raise DataError if a group occurred earlier, and count the records beyond the limit."""
        group_by, max_size = self.settings.group_by, self.settings.max_group_size
        starts, sizes = _find_runs(records)
        keys = records.column(KEY).to_numpy()[starts].tolist()
        num_earlier = len(earlier_keys)
        earlier_keys.update(keys)
        if len(earlier_keys) < num_earlier + len(keys):
            raise DataError(
                f"the records of one '{group_by}' are not consecutive",
                f"sort the source by '{group_by}'",
            )
        if num_left_out := int(np.maximum(sizes - max_size, 0).sum()):
            self.left_out[f"more than {max_size} records of one '{group_by}'"] += num_left_out

    def _build_table(self, records: pa.Table) -> pa.Table:
        """Return one row for each run of records with the same key."""
        starts, sizes = _find_runs(records)
        positions = np.arange(records.num_rows) - np.repeat(starts, sizes)
        is_kept = positions < self.settings.max_group_size
        offsets = np.zeros(len(starts) + 1, np.int32)
        np.cumsum(np.minimum(sizes, self.settings.max_group_size), out=offsets[1:])
        members = records.filter(pa.array(is_kept)).combine_chunks()
        return pa.table(
            {
                name: records.column(name).take(starts)
                if name in self.settings.shared
                else _build_lists(members.column(name), offsets)
                for name in records.column_names[1:]
            }
        )


def _read_groups(
    encoded: Iterable[pa.RecordBatch], columns: range, names: list[str]
) -> Iterator[pa.Table]:
    """Yield whole groups' records: the group keys, and the given columns by name."""
    waiting: list[pa.Table] = []
    for batch in encoded:
        table = pa.Table.from_batches([batch.select([1, *columns])])
        waiting.append(table.rename_columns([KEY, *names]))
        *complete, last = _find_starts(waiting)
        if complete:
            records = pa.concat_tables(waiting).combine_chunks()
            yield records.slice(0, last)
            waiting = [records.slice(last)]
    if waiting and (rest := pa.concat_tables(waiting).combine_chunks()).num_rows:
        yield rest


def _find_runs(records: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs of records with the same key start, and their lengths."""
    starts = np.array(_find_starts([records]), np.int64)
    return starts, np.diff([*starts.tolist(), records.num_rows])


def _find_starts(tables: list[pa.Table]) -> list[int]:
    """Return where runs of records with the same key start; the last run may be incomplete."""
    keys = np.concatenate([table.column(KEY).to_numpy() for table in tables])
    return [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist()]


def _build_lists(cells: pa.ChunkedArray, offsets: np.ndarray) -> pa.Array:
    # One array with offsets from 0; a column without chunks cannot be concatenated.
    values = pa.concat_arrays(cells.chunks) if cells.num_chunks else cells.combine_chunks()
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _max_lengths(cells: pa.ChunkedArray) -> np.ndarray:
    """Return the maximum tokens in each row's texts."""
    column = cells.combine_chunks()
    counts: np.ndarray = pc.list_value_length(column).to_numpy()
    if not pa.types.is_list(column.type.value_type):
        return counts
    text_lengths = pc.list_value_length(column.flatten()).to_numpy()
    return np.maximum.reduceat(text_lengths, np.cumsum([0, *counts[:-1].tolist()]))
