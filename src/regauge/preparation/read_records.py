"""Phase one of `prepare`: a piece becomes a file of records, each with its hash and signature.

    read/000007.arrow           records: file, place, fields (JSON), hash, perhaps a signature
    read/000007.rejected.jsonl  what could not be used
    read/000007.json            counts; its presence says that the piece is done

A file is written aside and renamed, so that what bears a piece's name is whole.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa

from regauge.data import duplicates
from regauge.data.sources import Record, Rejected, Skipped, legible
from regauge.errors import DataError
from regauge.files import replacing, write_atomic
from regauge.preparation import filters
from regauge.preparation.progress import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    from regauge.data.settings import Limits
    from regauge.data.sources import Found, Piece, Source
    from regauge.preparation.process_pool import Pool

SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("place", pa.string()),
        ("fields", pa.large_string()),
        ("hash", pa.binary(duplicates.HASH_BYTES)),
        ("signature", pa.binary(duplicates.SIGNATURE_BYTES)),
    ]
)
UNSIGNED = pa.schema(list(SCHEMA)[:-1])
RECORDS_AT_A_TIME = 1024
TEXT_AT_A_TIME = 2**22
"""Characters that are held before they are written."""
Counts = dict[str, Any]


class Numbered(NamedTuple):
    """A piece, its place in the source's order, and the number of its first record."""

    number: int
    piece: Piece
    first: int = 0


def read_piece(
    source: Source,
    limits: Mapping[str, Limits],
    folder: Path,
    item: Numbered,
    *,
    signed: bool = True,
) -> tuple[int, Counts]:
    """Read a piece into `folder` and return its number and counts; it may be without signatures."""
    schema = SCHEMA if signed else UNSIGNED
    batch: list[Record] = []
    counts: Counts = {"records": 0, "text_bytes": 0}
    counts |= {kind: Counter() for kind in ("rejected", "skipped", "names")}
    size = 0
    with Output(folder, item.number, schema) as output:
        for found in filters.filtered(_checked(source, item.piece), limits):
            if isinstance(found, Rejected):
                output.reject(found)
                counts["rejected"][found.reason] += 1
                continue
            if isinstance(found, Skipped):
                counts["skipped"][found.reason] += 1
                counts["names"].update(found.fields.keys())
                continue
            batch.append(found)
            size += sum(len(value) for value in found.fields.values() if isinstance(value, str))
            if len(batch) == RECORDS_AT_A_TIME or size > TEXT_AT_A_TIME:
                output.write(_counted(batch, counts, schema))
                batch, size = [], 0
        if batch:
            output.write(_counted(batch, counts, schema))
    return item.number, commit_counts(folder, item.number, counts)


def over_pieces(
    pool: Pool,
    folder: Path,
    items: list[Numbered],
    function: Callable[[Numbered], tuple[int, Counts]],
    phase: str,
) -> list[Counts]:
    """Apply a function to the pieces that are not yet done in `folder`; return all counts.

    The largest ones come first, so that the processes end together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = {item.number: committed(folder, item.number) for item in items}
    waiting = (item for item in items if done[item.number] is None)
    todo = sorted(waiting, key=lambda item: -item.piece.bytes)
    total = sum(item.piece.bytes for item in items)
    with Phase(phase, total, total - sum(item.piece.bytes for item in todo)) as progress:
        for number, counts in pool.each(function, todo):
            done[number] = counts
            progress.advance(items[number].piece.bytes)
    return [done[item.number] or {} for item in items]


def records(folder: Path, number: int) -> Iterator[pa.RecordBatch]:
    """Yield what `read_piece` wrote, mapped and not copied."""
    with pa.memory_map(str(folder / f"{number:06d}.arrow")) as file:
        reader = pa.ipc.open_file(file)
        for place in range(reader.num_record_batches):
            yield reader.get_batch(place)


def committed(folder: Path, number: int) -> Counts | None:
    """Return the counts of a piece that is done."""
    path = folder / f"{number:06d}.json"
    return json.loads(path.read_text()) if path.exists() else None


def commit_counts(folder: Path, number: int, counts: Counts) -> Counts:
    """Say that a piece is done."""
    write_atomic(folder / f"{number:06d}.json", json.dumps(counts), durable=False)
    return counts


class Output:
    """The two files of a piece, written aside and renamed when both are whole."""

    def __init__(self, folder: Path, number: int, schema: pa.Schema) -> None:
        self._table = folder / f"{number:06d}.arrow"
        self._rejected = folder / f"{number:06d}.rejected.jsonl"
        self._schema = schema
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            table = stack.enter_context(replacing(self._table, durable=False))
            rejected = stack.enter_context(replacing(self._rejected, durable=False))
            sink = stack.enter_context(pa.OSFile(str(table), "wb"))
            self._writer = stack.enter_context(pa.ipc.new_file(sink, self._schema))
            self._lines = stack.enter_context(rejected.open("w", encoding="utf-8"))
            self._open = stack.pop_all()
        return self

    def write(self, table: pa.RecordBatch) -> None:
        self._writer.write(table)

    def reject(self, found: Rejected) -> None:
        line = json.dumps(found._asdict(), ensure_ascii=True)
        self._lines.write(line + "\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, trace)


def _checked(source: Source, piece: Piece) -> Iterator[Found]:
    """Yield what a source yields, with texts that are no Unicode rejected."""
    try:
        yield from map(legible, source.read(piece))
    except OSError as error:
        remedy = "make it readable and run again: it continues where it was"
        raise DataError(f"{piece.name} cannot be read: {error}", remedy) from None


def _counted(batch: list[Record], counts: Counts, schema: pa.Schema) -> pa.RecordBatch:
    """Return records as a table, and count what they hold."""
    wholes = [duplicates.whole_text(record.fields) for record in batch]
    counts["records"] += len(batch)
    counts["text_bytes"] += sum(len(whole.encode()) for whole in wholes)
    for record in batch:
        counts["names"].update(record.fields.keys())
    contents = [duplicates.content(record.fields) for record in batch]
    columns = [
        [record.file for record in batch],
        [record.place for record in batch],
        contents,
        list(map(duplicates.content_hash, contents)),
    ]
    if schema == SCHEMA:
        columns.append([row.tobytes() for row in duplicates.signatures(wholes).astype("<u4")])
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
