"""Rows of datasets that a run file describes and that are not prepared yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import Field

from regauge import config
from regauge.data import dataset
from regauge.data.layouts import layout_of
from regauge.data.settings import ALONE, Layouts, RowLayout

Described = Mapping[str, RowLayout]
"""The rows of datasets, by the folders of these."""
NOTHING: Described = MappingProxyType({})


class _Rows(config.Settings):
    """The rows that `prepare` makes of a run file."""

    rows: Layouts = Field(default_factory=lambda: {ALONE: RowLayout()})
    """The layouts by name."""


def describe_datasets(tables: config.Tables) -> Described:
    """Return the rows of the datasets that `prepare` makes of a run file's tables, if any.

    Raises SettingsError for rows that cannot be made.
    """
    data = tables.get("data")
    path = data.get("path") if isinstance(data, dict) else None
    if not isinstance(path, str) or not tables.keys() & {"rows", "source"}:
        return NOTHING
    rows = {name: table for name, table in tables.items() if name == "rows"}
    return by_folder(path, config.build(_Rows, rows).rows)


def by_folder(path: str, layouts: Mapping[str, RowLayout]) -> Described:
    """Return layouts by the folders of their datasets; `path` holds those that have a name."""
    return {str(Path(path, name)): rows for name, rows in layouts.items()}


def find_rows(described: Described, path: str) -> RowLayout | None:
    """Return the rows of the dataset in a folder, or None when they are not described."""
    return described.get(str(Path(path)))


def is_prepared(folder: Path) -> bool:
    """Return whether a dataset is in a folder."""
    return (folder / dataset.MANIFEST).exists()


def expected_fields(rows: RowLayout) -> dict[str, dataset.Field]:
    """Return the columns that rows will have, with one text of the longest length in each."""
    return {
        name: field.model_copy(update={"lengths": {"train": (*[0] * field.limit, 1)}})
        if field.kind == "tokens"
        else field
        for name, field in layout_of(rows).fields({}).items()
    }
