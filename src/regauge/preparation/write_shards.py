"""The last phase of `prepare`: encoded pieces become the shards of each split, and are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regauge.data import dataset
from regauge.data.columns import Found, Summary
from regauge.files import sha256
from regauge.preparation import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.data.layouts import Layout

SLOTS_PER_SHARD = 2**25
"""Tokens that a shard has room for: 128 MiB a column."""
SPLITS = {"train": encode.TRAIN, "heldout": encode.HELDOUT}


def write_split(
    layout: Layout,
    name: str,
    folder: Path,
    encoded: Iterator[pa.Table],
    texts: tuple[dataset.File, ...],
) -> tuple[dataset.Split, Found]:
    """Write tables of rows as shards; return their facts and what their columns hold."""
    values = {field: Summary(kind) for field, kind in layout.values().items()}
    histograms = {
        field: np.zeros(limit + 1, dtype=np.int64) for field, limit in layout.limits().items()
    }
    written: list[dataset.Shard] = []
    for number, table in enumerate(_cut(encoded, rows_per_shard(layout))):
        lengths = layout.lengths(table)
        for field, found in lengths.items():
            histograms[field] += np.bincount(found, minlength=len(histograms[field]))
        for field, summary in values.items():
            summary.add(_flat(table.column(field)))
        path = folder / f"{name}-{number:05d}.arrow"
        written.append(_write(path, table, layout.tokens(table, lengths)))
    facts = dataset.Split(
        rows=sum(shard.rows for shard in written),
        tokens=sum(shard.tokens for shard in written),
        shards=tuple(written),
        texts=texts,
    )
    return facts, Found(histograms, values)


def write_texts(
    layout: Layout, name: str, folder: Path, encoded: Iterator[pa.RecordBatch]
) -> tuple[dataset.File, ...]:
    """Write the whole texts that are kept of a split's rows, in the order of these."""
    columns = layout.kept_of_row()
    if SPLITS[name] != encode.HELDOUT or not columns:
        return ()
    path = folder / f"{name}-texts-00000.arrow"
    schema, rows = pa.schema(columns), 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        mine = (_of_split(batch, SPLITS[name]) for batch in encoded)
        for texts in layout.laid_texts(batch for batch in mine if batch.num_rows):
            writer.write_table(texts)
            rows += texts.num_rows
    return (dataset.File(file=path.name, rows=rows, sha256=sha256(path)),)


def rows_per_shard(layout: Layout) -> int:
    """Return how many rows fill a shard: a function of the layout alone."""
    return max(1, SLOTS_PER_SHARD // sum(layout.limits().values()))


def rows_of(
    layout: Layout, pad: int, split: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.Table]:
    """Yield the rows of one split as tables, in the order of the source."""
    return layout.laid_out((_of_split(batch, SPLITS[split]) for batch in batches), pad)


def _of_split(batch: pa.RecordBatch, decision: int) -> pa.RecordBatch:
    return batch.filter(pc.equal(batch.column(0), pa.scalar(decision, pa.uint8())))


def _cut(tables: Iterator[pa.Table], count: int) -> Iterator[pa.Table]:
    """Yield tables of `count` rows, the last one shorter."""
    held: list[pa.Table] = []
    rows = 0
    for table in tables:
        held.append(table)
        rows += table.num_rows
        while rows >= count:
            whole = pa.concat_tables(held)
            yield whole.slice(0, count)
            held, rows = [whole.slice(count)], rows - count
    if rows:
        yield pa.concat_tables(held)


def _flat(cells: pa.ChunkedArray) -> np.ndarray:
    """Return the values of a column, one behind the other."""
    whole = cells.combine_chunks()
    values: np.ndarray = (whole.flatten() if pa.types.is_list(whole.type) else whole).to_numpy()
    return values


def _write(path: Path, table: pa.Table, tokens: int) -> dataset.Shard:
    """Write one shard as a single batch, so that a reader maps it and copies nothing."""
    whole = table.combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=max(whole.num_rows, 1))
    digest = sha256(path)
    return dataset.Shard(file=path.name, rows=table.num_rows, tokens=tokens, sha256=digest)
