"""`prepare` phase 4: writes the encoded pieces as shards for each split, with statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from regauge.data import dataset
from regauge.data.columns import ColumnStats, ValueStats, compute_norms
from regauge.data.prepare import encode
from regauge.system.files import sha256

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from regauge.data.layouts import Layout

MAX_TOKENS_PER_SHARD = 2**25
"""Maximum tokens per shard: 128 MiB per column."""
SPLITS = {name: decision for decision, name in encode.SPLIT_NAMES.items()}
"""Split -> record decision."""


def write_split(
    layout: Layout,
    name: str,
    folder: Path,
    tables: Iterator[pa.Table],
    texts: tuple[dataset.FileInfo, ...],
) -> tuple[dataset.SplitInfo, ColumnStats]:
    """Write row tables as shards; return their manifest entry and the column statistics."""
    value_stats = {field: ValueStats(kind) for field, kind in layout.value_kinds().items()}
    histograms = {
        field: np.zeros(limit + 1, dtype=np.int64) for field, limit in layout.token_limits().items()
    }
    shards: list[dataset.ShardInfo] = []
    rows_per_shard = max(1, MAX_TOKENS_PER_SHARD // sum(layout.token_limits().values()))
    for index, table in enumerate(_regroup(tables, rows_per_shard)):
        lengths = layout.count_lengths(table)
        for field, row_lengths in lengths.items():
            histograms[field] += np.bincount(row_lengths, minlength=len(histograms[field]))
        for field, stats in value_stats.items():
            cells = table.column(field).combine_chunks()
            stats.add(compute_norms(cells) if stats.kind == "vector" else _flatten(cells))
        path = folder / f"{name}-{index:05d}.arrow"
        shards.append(_write_shard(path, table, layout.count_tokens(table, lengths)))
    info = dataset.SplitInfo(
        rows=sum(shard.rows for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=tuple(shards),
        text_files=texts,
    )
    return info, ColumnStats(histograms, value_stats)


def write_texts(
    layout: Layout, name: str, folder: Path, encoded: Iterator[pa.RecordBatch]
) -> tuple[dataset.FileInfo, ...]:
    """Write a held-out split's texts before truncation, in row order."""
    columns = layout.row_text_columns()
    if SPLITS[name] != encode.HELDOUT or not columns:
        return ()
    path = folder / f"{name}-texts-00000.arrow"
    schema, num_rows = pa.schema(columns), 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        split_batches = (_select_split(batch, SPLITS[name]) for batch in encoded)
        for texts in layout.build_row_texts(batch for batch in split_batches if batch.num_rows):
            writer.write_table(texts)
            num_rows += texts.num_rows
    return (dataset.FileInfo(file=path.name, rows=num_rows, sha256=sha256(path)),)


def build_rows(
    layout: Layout, pad_id: int, split: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.Table]:
    """Yield one split's rows as tables, in source order."""
    return layout.build_rows((_select_split(batch, SPLITS[split]) for batch in batches), pad_id)


def _select_split(batch: pa.RecordBatch, decision: int) -> pa.RecordBatch:
    return batch.filter(pc.equal(batch.column(0), pa.scalar(decision, pa.uint8())))


def _regroup(tables: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yield tables of `num_rows` rows; the last one may be shorter."""
    waiting: list[pa.Table] = []
    num_waiting = 0
    for table in tables:
        waiting.append(table)
        num_waiting += table.num_rows
        while num_waiting >= num_rows:
            joined = pa.concat_tables(waiting)
            yield joined.slice(0, num_rows)
            waiting, num_waiting = [joined.slice(num_rows)], num_waiting - num_rows
    if num_waiting:
        yield pa.concat_tables(waiting)


def _flatten(array: pa.Array) -> np.ndarray:
    values: np.ndarray = (array.flatten() if pa.types.is_list(array.type) else array).to_numpy()
    return values


def _write_shard(path: Path, table: pa.Table, num_tokens: int) -> dataset.ShardInfo:
    """Write a shard as a single batch, so that readers can map it without a copy."""
    combined = table.combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, combined.schema) as writer:
        writer.write_table(combined, max_chunksize=max(combined.num_rows, 1))
    digest = sha256(path)
    return dataset.ShardInfo(file=path.name, rows=table.num_rows, tokens=num_tokens, sha256=digest)
