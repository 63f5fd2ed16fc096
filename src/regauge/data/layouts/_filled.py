"""Base for layouts with rows of one length, filled with chunks."""

from __future__ import annotations

from abc import ABC
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from regauge.data import dataset, packing
from regauge.data.columns import TOKENS_TYPE, ColumnStats, build_fixed_list_column
from regauge.data.layouts import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from regauge.data.layouts import Lengths

ROWS_PER_TABLE = 4096
SEGMENTS = "segments"


class FilledLayout(Layout, ABC):
    """Rows of `length` tokens; each record chunk is a segment, and the rest is padding."""

    def token_limits(self) -> dict[str, int]:
        return {"tokens": self.settings.length}

    def build_rows(self, encoded: Iterable[pa.RecordBatch], pad_id: int) -> Iterator[pa.Table]:
        rows = packing.pack_chunks(_split_chunks(encoded), self.settings.length)
        while batch := list(islice(rows, ROWS_PER_TABLE)):
            yield self._build_table(batch, pad_id)

    def _build_table(self, rows: list[list[np.ndarray]], pad_id: int) -> pa.Table:
        """Return chunk rows as columns: tokens, segments and the other encoded columns."""
        tokens, *others = self.encoded_columns()
        length = self.settings.length
        values, segments = packing.assemble_rows(rows, length, [pad_id, *(0 for _ in others)])
        fields = [tokens, pa.field(SEGMENTS, TOKENS_TYPE), *others]
        columns = zip(fields, (values[0], segments, *values[1:]), strict=True)
        return pa.table(
            {field.name: build_fixed_list_column(cells, field.type) for field, cells in columns}
        )

    def count_lengths(self, rows: pa.Table) -> Lengths:
        segments = rows.column(SEGMENTS).combine_chunks().flatten().to_numpy()
        num_tokens = (segments.reshape(rows.num_rows, self.settings.length) > 0).sum(axis=1)
        return {"tokens": num_tokens}

    def describe_columns(
        self, stats_by_split: dict[str, ColumnStats]
    ) -> dict[str, dataset.ColumnInfo]:
        segments = dataset.ColumnInfo(max_length=self.settings.length, kind="segments")
        return {**super().describe_columns(stats_by_split), SEGMENTS: segments}


def _split_chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[np.ndarray]:
    """Yield an array, [tokens, columns], for each chunk."""
    for batch in batches:
        columns = batch.columns[1:]
        values = np.stack([column.values.to_numpy() for column in columns], 1)
        offsets = columns[0].offsets.to_numpy().tolist()
        for index in range(batch.num_rows):
            yield values[offsets[index] : offsets[index + 1]]
