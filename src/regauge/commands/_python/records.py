"""Writes a program's data objects to files that `prepare` and `predict` sources read.

A file is named after its content hash, and its modification time is constant. So equal data is the
same input: a prepared dataset is not prepared again, and a stopped job resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.data.values import convert_value
from regauge.system.errors import DataError, first_line
from regauge.system.files import sha256

if TYPE_CHECKING:
    import pyarrow as pa

    Tables = Iterator[pa.Table]

SUFFIX = ".records"
"""Suffix of the file folder, next to the output computed from it."""
BATCH_ROWS = 10_000
REMEDY = "give a list of dictionaries, a datasets.Dataset, a pyarrow table or a DataFrame"
ARROW, JSON_LINES = "arrow", "jsonl"


class RecordFile(NamedTuple):
    """A file with a program's records."""

    path: Path
    kind: str
    """Source kind for the file."""

    @property
    def source(self) -> dict[str, Any]:
        """The `source` table for the file."""
        return {"kind": self.kind, "files": [str(self.path)]}


def write_records(data: Any, output: Path) -> RecordFile:
    """Write records to a file in the folder `<output>.records`, unless it exists.

    `data` are dictionaries or texts, a `datasets.Dataset`, a pyarrow table, or another object with
    the Arrow stream interface, such as a pandas DataFrame or a Series of texts. Raises DataError
    for other data, or without records.
    """
    folder = output.resolve().with_name(output.name + SUFFIX)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{os.getpid()}.part"
    tables = _read_tables(data)
    kind = JSON_LINES if tables is None else ARROW
    try:
        if tables is None:
            num_records = _write_json_lines(data, partial)
        else:
            num_records = _write_arrow(tables, partial)
        if not num_records:
            raise DataError("data does not contain records", REMEDY)
        path = folder / f"{sha256(partial)[:32]}.{kind}"
        if not path.exists():
            os.utime(partial, (0, 0))
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return RecordFile(path, kind)


def _read_tables(data: Any) -> Tables | None:
    """Return an object's tables with at most BATCH_ROWS rows; None if it is not a table."""
    if hasattr(data, "with_format") and hasattr(data, "num_rows") and hasattr(data, "features"):
        if isinstance(data, Mapping):
            raise DataError("data is a datasets.DatasetDict", 'choose a split, as in data["train"]')
        tables: Tables = data.with_format("arrow").iter(batch_size=BATCH_ROWS)
        return tables
    if not hasattr(data, "__arrow_c_stream__"):
        return None
    import pyarrow as pa

    try:
        table = _convert_to_table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        problem = f"data is not a table: {'; '.join(map(str, error.args))}"
        raise DataError(
            problem, "give each column a name of its own and values of one type"
        ) from None
    starts = range(0, table.num_rows, BATCH_ROWS)
    return (table.slice(start, BATCH_ROWS) for start in starts)


def _convert_to_table(data: Any) -> pa.Table:
    """Return an object's table; a column alone, such as a pandas Series, has the field `text`."""
    import pyarrow as pa

    if isinstance(data, pa.RecordBatchReader) or hasattr(data, "columns"):
        return pa.table(data)
    column = pa.chunked_array(data)
    if pa.types.is_struct(column.type):
        return pa.Table.from_struct_array(column)
    return pa.table({"text": column})


def _write_arrow(tables: Tables, path: Path) -> int:
    """Write tables as an Arrow file with one batch each; return the row count."""
    import pyarrow as pa

    num_rows = 0
    with ExitStack() as stack:
        writer = None
        for table in tables:
            batch = table.combine_chunks()
            writer = writer or stack.enter_context(pa.ipc.new_file(str(path), batch.schema))
            writer.write_table(batch)
            num_rows += batch.num_rows
    return num_rows


def _write_json_lines(data: Any, path: Path) -> int:
    """Write dictionaries or texts as JSON lines; return their number."""
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise DataError(f"data is of type {type(data).__name__}", REMEDY)
    count = 0
    with path.open("wb") as file:
        for count, record in enumerate(data, start=1):
            file.write(_format_record(record, count).encode("utf-8", "surrogatepass") + b"\n")
    return count


def _format_record(record: Any, number: int) -> str:
    """Return a record as JSON; a text is a record with the field `text`."""
    fields = {"text": record} if isinstance(record, str) else record
    if not isinstance(fields, Mapping):
        problem = f"record {number} of data is of type {type(record).__name__}"
        raise DataError(problem, "give dictionaries or texts")
    try:
        return json.dumps(dict(fields), ensure_ascii=False, default=_convert_object)
    except (TypeError, ValueError) as error:
        problem = f"record {number} of data cannot be written: {first_line(error)}"
        raise DataError(problem, "use text, numbers, lists and dictionaries") from None


def _convert_object(value: Any) -> Any:
    """Return a numpy value, a date or a decimal number in a form that JSON has."""
    return value.tolist() if hasattr(value, "tolist") else convert_value(value)
