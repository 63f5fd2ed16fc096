"""Writes a shard's columns in the format set by `output.format`."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from regauge.data.values import to_cell
from regauge.inference.export.postprocess import build_table, write_parquet
from regauge.system.files import format_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regauge.data.values import FieldKind, Value
    from regauge.inference.export.postprocess import Columns

JSON_KINDS = ("json", "decimal")
"""Kinds with values that JSON holds as they are in the record."""


class ShardColumns:
    """A shard's columns: kept fields, then outputs."""

    def __init__(
        self,
        kept: Mapping[str, Sequence[Value | None]],
        kinds: dict[str, FieldKind],
        outputs: Columns,
    ) -> None:
        """Take the values of kept fields, their kinds, and a program's output columns."""
        self._kept = kept
        self._kinds = kinds
        self._outputs = outputs

    def list_files(self, file_format: str) -> dict[str, Callable[[IO[bytes]], None]]:
        """Return suffix -> function that writes a shard file.

        `npy` writes the first output as an array, and the other columns as Parquet.
        """
        if file_format == "jsonl":
            return {"jsonl": self.write_jsonl}
        if file_format == "csv":
            return {"csv": self.write_csv}
        files: dict[str, Callable[[IO[bytes]], None]] = {}
        outputs = dict(self._outputs)
        if file_format == "npy":
            array = np.asarray(outputs.pop(next(iter(outputs))))
            files["npy"] = lambda file: np.save(file, array)
        if outputs or self._kept:
            table = build_table(outputs, self._kept, self._kinds)
            files["parquet"] = lambda file: write_parquet(table, file)
        return files

    def write_jsonl(self, file: IO[bytes]) -> None:
        """Write one JSON object per record; nested values stay nested.

        NaN and infinite numbers become null, and the key with `_text` names them.
        """
        columns = {name: self._list_kept(name) for name in self._kept}
        columns |= {name: _list_cells(values) for name, values in self._outputs.items()}
        for row in zip(*columns.values(), strict=True):
            document = dict(zip(columns, row, strict=True))
            text = format_json(document, ensure_ascii=False)
            file.write(f"{text}\n".encode())

    def write_csv(self, file: IO[bytes]) -> None:
        """Write a header and one line per record; a nested value is a cell with JSON.

        Texts are quoted, so that an empty text differs from a missing value.
        """
        from pyarrow.csv import write_csv

        outputs: Columns = {}
        for name, values in self._outputs.items():
            is_nested = (
                values.ndim > 1
                if isinstance(values, np.ndarray)
                else pa.types.is_nested(values.type)
            )
            cells = [format_json(cell) for cell in _list_cells(values)]
            outputs[name] = pa.array(cells, pa.string()) if is_nested else values
        write_csv(build_table(outputs, self._kept, self._kinds), file)

    def _list_kept(self, name: str) -> list[Any]:
        values, kind = self._kept[name], self._kinds[name]
        if kind in JSON_KINDS:
            return list(values)
        return [to_cell(value, kind) for value in values]


def _list_cells(values: np.ndarray | pa.Array) -> list[Any]:
    """Return an output column as Python values; a float is the shortest one in its dtype."""
    if isinstance(values, pa.Array):
        return list(values.to_pylist())
    if np.issubdtype(values.dtype, np.floating):
        values = values.astype(str).astype(np.float64)
    return list(values.tolist())
