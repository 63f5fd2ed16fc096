"""Completes the tables of `prepare` from other tables in a run file.

The rows follow from the task, and the tokenizer from the model. So a label is declared once, and
common tasks do not need a table `rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.config import parse_choice
from regauge.data.settings import is_table_of_layouts

if TYPE_CHECKING:
    from regauge.config import Tables
    from regauge.tasks import Task

ENTRY_KEYS = ("name", "weight", "data", "batch")
"""Keys in a `[[task]]` table in addition to the task's."""


def complete_tables(tables: Tables) -> Tables:
    """Return a run file's tables with the defaults that follow from other tables.

    - `rows`: if `rows.layout` is not set, the missing keys are those of the task.
    - `split.group_by`: the field that defines the row groups.
    - `tokenizer.path`: the model's folder, unless the table `tokenizer` is given.
    - `validation.source`: without `kind`, the missing keys are those of `source`.
    """
    completed = _complete_validation(tables)
    rows = tables.get("rows", {})
    is_single = isinstance(rows, dict) and not is_table_of_layouts(rows)
    is_open = is_single and "layout" not in rows
    is_prepared_here = bool({"source", "rows"} & set(tables))
    if is_open and is_prepared_here and (task := _read_task(tables.get("task"))) is not None:
        completed["rows"] = {**task.default_rows(), **rows}
    if is_single:
        _complete_split(completed)
    model, tokenizer = tables.get("model"), tables.get("tokenizer", {})
    if tokenizer == {} and (path := _find_model_path(model)) is not None:
        completed["tokenizer"] = {"path": path}
    return completed


def _read_task(table: Any) -> Task | None:
    """Return a run file's only task; None without exactly one."""
    if isinstance(table, list | tuple):
        if len(table) != 1 or not isinstance(table[0], dict):
            return None
        table = {key: value for key, value in table[0].items() if key not in ENTRY_KEYS}
    return None if table is None else parse_choice("tasks", table)


def _complete_split(tables: Tables) -> None:
    split, group_by = tables.get("split", {}), tables.get("rows", {}).get("group_by")
    if group_by is not None and isinstance(split, dict):
        tables["split"] = {"group_by": group_by, **split}


def _complete_validation(tables: Tables) -> Tables:
    """Return the tables with the whole validation source held out, and no other rows."""
    completed, validation = dict(tables), tables.get("validation")
    if not isinstance(validation, dict):
        return completed
    source, other = tables.get("source"), validation.get("source")
    if isinstance(source, dict) and isinstance(other, dict) and "kind" not in other:
        completed["validation"] = {**validation, "source": {**source, **other}}
    split = tables.get("split", {})
    if isinstance(split, dict):
        completed["split"] = {"heldout_fraction": 0.0, **split}
    return completed


def _find_model_path(model: Any) -> str | None:
    if not isinstance(model, dict):
        return None
    origin = model.get("init_from")
    path = model.get("path") or (origin.get("path") if isinstance(origin, dict) else None)
    return path if isinstance(path, str) else None
