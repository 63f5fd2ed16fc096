"""Rows of datasets described in a run file but not prepared yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from regauge import config
from regauge.data import dataset
from regauge.data.layouts import build_layout
from regauge.data.settings import UNNAMED, Layouts, RowLayout

RowsByFolder = Mapping[str, RowLayout]
"""Dataset folder -> row layout."""
NO_ROWS: RowsByFolder = MappingProxyType({})


class _RowTables(config.Settings):
    """A run file's `rows` table."""

    rows: Layouts = Field(default_factory=lambda: {UNNAMED: RowLayout()})
    """Name -> layout."""


def describe_datasets(tables: config.Tables) -> RowsByFolder:
    """Return the layouts for the datasets `prepare` would create from a run file, if any.

    Raises SettingsError if the rows are invalid.
    """
    data = tables.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    if not isinstance(path, str) or not tables.keys() & {"rows", "source"}:
        return NO_ROWS
    row_tables = {name: table for name, table in tables.items() if name == "rows"}
    return map_by_folder(path, config.build(_RowTables, row_tables).rows)


def map_by_folder(path: str, layouts: Mapping[str, RowLayout]) -> RowsByFolder:
    """Return dataset folder -> layout; a named layout has a subfolder of `path`."""
    return {str(Path(path, name)): rows for name, rows in layouts.items()}


def find_rows(described: RowsByFolder, path: str) -> RowLayout | None:
    """Return the layout for the dataset in a folder, or None if it is not described."""
    return described.get(str(Path(path)))


def is_prepared(folder: Path) -> bool:
    return (folder / dataset.MANIFEST).exists()


def expected_fields(rows: RowLayout) -> dict[str, dataset.ColumnInfo]:
    """Return the expected columns of rows, with one maximum-length text in each."""
    return {
        name: column.model_copy(update={"lengths": {"train": (*[0] * column.max_length, 1)}})
        if column.kind == "tokens"
        else column
        for name, column in build_layout(rows).describe_columns({}).items()
    }
