"""What the layouts share whose rows have one length and are filled with chunks."""

from __future__ import annotations

from abc import ABC
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from regauge.data import dataset, packing
from regauge.data.columns import TOKENS, Found, even_lists
from regauge.data.layouts import Layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from regauge.data.layouts import Lengths

ROWS_AT_A_TIME = 4096
SEGMENTS = "segments"


class Filled(Layout, ABC):
    """Rows of `length` tokens; each chunk of a record is a segment, and the rest is padding."""

    def limits(self) -> dict[str, int]:
        return {"tokens": self.settings.length}

    def laid_out(self, encoded: Iterable[pa.RecordBatch], pad: int) -> Iterator[pa.Table]:
        """Yield rows that are filled up with the chunks that wait."""
        rows = packing.pack(_chunks(encoded), self.settings.length)
        while ready := list(islice(rows, ROWS_AT_A_TIME)):
            yield self._table(ready, pad)

    def _table(self, rows: list[list[np.ndarray]], pad: int) -> pa.Table:
        """Return rows of chunks as tokens, segments, and what else is encoded."""
        tokens, *others = self.columns()
        length = self.settings.length
        values, segments = packing.laid_out(rows, length, [pad, *(0 for _ in others)])
        fields = [tokens, pa.field(SEGMENTS, TOKENS), *others]
        columns = zip(fields, (values[0], segments, *values[1:]), strict=True)
        return pa.table({field.name: even_lists(found, field.type) for field, found in columns})

    def lengths(self, rows: pa.Table) -> Lengths:
        segments = rows.column(SEGMENTS).combine_chunks().flatten().to_numpy()
        real = (segments.reshape(rows.num_rows, self.settings.length) > 0).sum(axis=1)
        return {"tokens": real}

    def fields(self, found: dict[str, Found]) -> dict[str, dataset.Field]:
        segments = dataset.Field(limit=self.settings.length, kind="segments")
        return {**super().fields(found), SEGMENTS: segments}


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[np.ndarray]:
    """Yield [tokens, columns] for each chunk."""
    for batch in batches:
        columns = batch.columns[1:]
        values = np.stack([column.values.to_numpy() for column in columns], 1)
        offsets = columns[0].offsets.to_numpy().tolist()
        for at in range(batch.num_rows):
            yield values[offsets[at] : offsets[at + 1]]
