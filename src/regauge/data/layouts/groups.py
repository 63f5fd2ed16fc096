"""A row of all records of one group, such as a query and the documents it was shown with.

Records of a group follow one another in the source, as in files for learning to rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regauge.data import dataset
from regauge.data.columns import WHOLE, Found, category
from regauge.data.layouts import Unfit
from regauge.data.layouts._of_records import KEYS, OfRecords
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from regauge.data.layouts import Encoded, Lengths
    from regauge.data.settings import RowLayout, Split

KEY = ""
"""The name of the column of keys, which no field has."""


class Groups(OfRecords):
    """Texts that a group shares, and lists of the other texts and of values, one of each record.

    Of a held-out row the whole texts are kept as well.
    """

    kind: ClassVar[str] = "groups"
    keys: ClassVar[tuple[str, ...]] = (*KEYS, "group", "shared", "members")

    @classmethod
    def check(cls, settings: RowLayout) -> None:
        super().check(settings)
        if settings.group is None:
            raise ValueError("layout 'groups' needs group, the field that records of a row share")
        for name in settings.shared:
            if name not in settings.fields:
                raise ValueError(f"'{name}' is shared and has no limit in fields")

    def check_split(self, split: Split) -> None:
        if split.by != self.settings.group:
            raise ValueError(f'a group must not be parted: set split.by = "{self.settings.group}"')

    def columns(self) -> list[pa.Field]:
        return [pa.field(KEY, pa.int64()), *super().columns()]

    def rows(self, encoded: Encoded) -> Iterator[list[Any]]:
        """Yield the key and the cells of a record."""
        key = encoded.record.get(str(self.settings.group))
        if key is None:
            raise Unfit(f"no field '{self.settings.group}'")
        for cells in super().rows(encoded):
            yield [category(key), *cells]

    def laid_out(self, encoded: Iterable[pa.RecordBatch], pad: int) -> Iterator[pa.Table]:
        """Yield a row for the records of each group; raises DataError where one is in parts."""
        del pad
        seen: set[int] = set()
        names = [field.name for field in self.columns()[1:]]
        for records in _groups(encoded, range(2, 2 + len(names)), names):
            self._check(records, seen)
            yield self._rows(records)

    def kept(self) -> list[pa.Field]:
        return [pa.field(name, WHOLE) for name in self.settings.fields]

    def kept_of_row(self) -> list[pa.Field]:
        """Return a column for each text, of lists where a group does not share it."""
        shared = self.settings.shared
        return [
            pa.field(name, WHOLE if name in shared else pa.list_(WHOLE))
            for name in self.settings.fields
        ]

    def laid_texts(self, encoded: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        names = list(self.settings.fields)
        first = 1 + len(self.columns())
        for records in _groups(encoded, range(first, first + len(names)), names):
            yield self._rows(records).cast(pa.schema(self.kept_of_row()))

    def lengths(self, rows: pa.Table) -> Lengths:
        """Return the tokens of each row's texts: of a list of them the longest."""
        return {name: _longest(rows.column(name)) for name in self.limits()}

    def tokens(self, rows: pa.Table, lengths: Lengths) -> int:
        """Return the tokens of all texts, that of a shared one once."""
        del lengths
        columns = (rows.column(name).combine_chunks() for name in self.limits())
        return sum(len(pc.list_flatten(cells, recursive=True)) for cells in columns)

    def fields(self, found: dict[str, Found]) -> dict[str, dataset.Field]:
        listed = {"members": self.settings.members}
        return {
            name: field if name in self.settings.shared else field.model_copy(update=listed)
            for name, field in super().fields(found).items()
        }

    def _check(self, records: pa.Table, seen: set[int]) -> None:
        """Raise DataError for a group that was seen before, and count what is left out."""
        starts, sizes = _runs(records)
        keys = records.column(KEY).to_numpy()[starts].tolist()
        before = len(seen)
        seen.update(keys)
        if len(seen) < before + len(keys):
            raise DataError(
                f"records of one '{self.settings.group}' do not follow one another",
                f"sort the source by '{self.settings.group}'",
            )
        most = self.settings.members
        if left := int(np.maximum(sizes - most, 0).sum()):
            self.left_out[f"beyond {most} of one '{self.settings.group}'"] += left

    def _rows(self, records: pa.Table) -> pa.Table:
        """Return a row for each run of records with one key."""
        starts, sizes = _runs(records)
        places = np.arange(records.num_rows) - np.repeat(starts, sizes)
        kept = places < self.settings.members
        offsets = np.zeros(len(starts) + 1, np.int32)
        np.cumsum(np.minimum(sizes, self.settings.members), out=offsets[1:])
        members = records.filter(pa.array(kept)).combine_chunks()
        return pa.table(
            {
                name: records.column(name).take(starts)
                if name in self.settings.shared
                else _listed(members.column(name), offsets)
                for name in records.column_names[1:]
            }
        )


def _groups(
    encoded: Iterable[pa.RecordBatch], columns: range, names: list[str]
) -> Iterator[pa.Table]:
    """Yield the records of whole groups: their keys, and some of the columns by these names."""
    waiting: list[pa.Table] = []
    for batch in encoded:
        mine = pa.Table.from_batches([batch.select([1, *columns])])
        waiting.append(mine.rename_columns([KEY, *names]))
        *whole, last = _cuts(waiting)
        if whole:
            records = pa.concat_tables(waiting).combine_chunks()
            yield records.slice(0, last)
            waiting = [records.slice(last)]
    if waiting and (left := pa.concat_tables(waiting).combine_chunks()).num_rows:
        yield left


def _runs(records: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs of records with one key begin, and how long each is."""
    starts = np.array(_cuts([records]), np.int64)
    return starts, np.diff([*starts.tolist(), records.num_rows])


def _cuts(tables: list[pa.Table]) -> list[int]:
    """Return where runs of records with one key begin; that of the last may go on."""
    keys = np.concatenate([table.column(KEY).to_numpy() for table in tables])
    return [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist()]


def _listed(cells: pa.ChunkedArray, offsets: np.ndarray) -> pa.Array:
    """Return cells as lists of them."""
    return pa.ListArray.from_arrays(pa.array(offsets), _whole(cells))


def _whole(cells: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array whose offsets begin at 0."""
    return pa.concat_arrays(cells.chunks) if cells.num_chunks else cells.combine_chunks()


def _longest(cells: pa.ChunkedArray) -> np.ndarray:
    """Return the most tokens of each row's texts."""
    whole = cells.combine_chunks()
    counts: np.ndarray = pc.list_value_length(whole).to_numpy()
    if not pa.types.is_list(whole.type.value_type):
        return counts
    texts = pc.list_value_length(whole.flatten()).to_numpy()
    return np.maximum.reduceat(texts, np.cumsum([0, *counts[:-1].tolist()]))
