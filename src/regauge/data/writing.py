"""The last phase of `prepare`: encoded pieces become the shards of each split, and are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regauge.data import encoding, packing, shards

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.data.settings import RowLayout

SLOTS_PER_SHARD = 2**25
"""Tokens that a shard has room for: 128 MiB a column."""
ROWS_AT_A_TIME = 4096
SPLITS = {"train": encoding.TRAIN, "heldout": encoding.HELDOUT}
Lengths = dict[str, np.ndarray]


def write_split(
    layout: RowLayout,
    name: str,
    folder: Path,
    encoded: Iterator[pa.Table],
    texts: tuple[shards.File, ...],
) -> tuple[shards.Split, Lengths]:
    """Write tables of rows as shards; return their facts and the histograms of lengths."""
    histograms = {
        field: np.zeros(limit + 1, dtype=np.int64) for field, limit in limits(layout).items()
    }
    written: list[shards.Shard] = []
    for number, table in enumerate(_cut(encoded, rows_per_shard(layout))):
        lengths = _lengths(layout, table)
        for field, found in lengths.items():
            histograms[field] += np.bincount(found, minlength=len(histograms[field]))
        tokens = sum(int(found.sum()) for found in lengths.values())
        path = folder / f"{name}-{number:05d}.arrow"
        written.append(_write(path, table, tokens))
    facts = shards.Split(
        rows=sum(shard.rows for shard in written),
        tokens=sum(shard.tokens for shard in written),
        shards=tuple(written),
        texts=texts,
    )
    return facts, histograms


def write_texts(
    layout: RowLayout, name: str, folder: Path, encoded: Iterator[pa.RecordBatch]
) -> tuple[shards.File, ...]:
    """Write the whole texts that are kept of a split's rows, in the order of these."""
    columns = encoding.whole_columns(layout)
    if SPLITS[name] != encoding.HELDOUT or not columns:
        return ()
    path = folder / f"{name}-texts-00000.arrow"
    schema, rows = pa.schema(columns), 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in encoded:
            mine = _of_split(batch, SPLITS[name])
            if mine.num_rows:
                texts = mine.columns[-len(columns) :]
                writer.write(pa.RecordBatch.from_arrays(texts, schema=schema))
                rows += mine.num_rows
    return (shards.File(file=path.name, rows=rows, sha256=shards.file_sha256(path)),)


def limits(layout: RowLayout) -> dict[str, int]:
    """Return the token columns of a row with their limits."""
    return {"tokens": layout.length} if layout.layout == "packed" else dict(layout.fields)


def rows_per_shard(layout: RowLayout) -> int:
    """Return how many rows fill a shard: a function of the layout alone."""
    return max(1, SLOTS_PER_SHARD // sum(limits(layout).values()))


def fields(layout: RowLayout, histograms: dict[str, Lengths]) -> dict[str, shards.Field]:
    """Return the columns for the manifest; `histograms` are by split."""
    result = {
        name: shards.Field(
            limit=limit,
            lengths={split: tuple(found[name].tolist()) for split, found in histograms.items()},
        )
        for name, limit in limits(layout).items()
    }
    if layout.layout == "packed":
        result["segments"] = shards.Field(limit=layout.length, kind="segments")
    return result | {name: shards.Field(limit=1, kind="number") for name in layout.numbers}


def rows_of(
    layout: RowLayout, pad: int, split: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.Table]:
    """Yield the rows of one split as tables, in the order of the source."""
    mine = (_of_split(batch, SPLITS[split]) for batch in batches)
    if layout.layout == "fields":
        row = list(range(1, 1 + len(encoding.row_columns(layout))))
        yield from (pa.Table.from_batches([batch.select(row)]) for batch in mine)
    else:
        yield from _packed(layout.length, pad, mine)


def _of_split(batch: pa.RecordBatch, decision: int) -> pa.RecordBatch:
    return batch.filter(pc.equal(batch.column(0), pa.scalar(decision, pa.uint8())))


def _packed(length: int, pad: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    ready: list[tuple[np.ndarray, np.ndarray]] = []
    for row in packing.pack(_chunks(batches), length):
        ready.append(packing.laid_out(row, length, pad))
        if len(ready) == ROWS_AT_A_TIME:
            yield _packed_table(ready)
            ready = []
    if ready:
        yield _packed_table(ready)


def _packed_table(rows: list[tuple[np.ndarray, np.ndarray]]) -> pa.Table:
    tokens, segments = zip(*rows, strict=True)
    columns = {"tokens": encoding.lists(list(tokens)), "segments": encoding.lists(list(segments))}
    return pa.table(columns)


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[np.ndarray]:
    for batch in batches:
        column = batch.column(1)
        values = column.values.to_numpy()
        offsets = column.offsets.to_numpy().tolist()
        for at in range(len(column)):
            yield values[offsets[at] : offsets[at + 1]]


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


def _lengths(layout: RowLayout, table: pa.Table) -> Lengths:
    if layout.layout == "packed":
        segments = table.column("segments").combine_chunks().flatten().to_numpy()
        real = (segments.reshape(table.num_rows, layout.length) > 0).sum(axis=1)
        return {"tokens": real}
    return {name: pc.list_value_length(table.column(name)).to_numpy() for name in layout.fields}


def _write(path: Path, table: pa.Table, tokens: int) -> shards.Shard:
    """Write one shard as a single batch, so that a reader maps it and copies nothing."""
    whole = table.combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=max(whole.num_rows, 1))
    digest = shards.file_sha256(path)
    return shards.Shard(file=path.name, rows=table.num_rows, tokens=tokens, sha256=digest)
