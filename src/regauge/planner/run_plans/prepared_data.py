"""Row lengths in a run: from the prepared data, or else from the settings.

A plan from row counts is wrong by the length ratio. So the task computes its batches' padding from
the length histograms written by `prepare`. Nothing here imports numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.data.buckets import BatchForm, sum_histograms
from regauge.data.dataset import (
    MANIFEST,
    ColumnInfo,
    DatasetManifest,
    assume_manifest,
    read_manifest_file,
)
from regauge.data.settings import RowLayout
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from regauge.data.settings import DataSettings
    from regauge.planner.run_plans.run_request import PlannedRun

REMEDY = "run 'regauge prepare' again"
TOKENS, TRAIN = "tokens", "train"
DEFAULT_LENGTH = 512
DEFAULT_GROUP_SIZE = 16
"""Candidates in an unprepared row, as `rows.max_group_size`."""


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the rows that a run trains on."""

    length: float
    """Mean tokens per sequence in a batch, padding included."""
    real_fraction: float
    """Share of tokens that are not padding."""
    shapes: tuple[int, ...]
    """Lengths that batches are padded to, in rising order."""
    source: str
    rows: int | None = None
    """Training rows; None if the data is not prepared."""
    sequences_per_row: int = 1
    """Texts per row that the model encodes, including missing candidates."""


class RunRows(NamedTuple):
    """A run's rows: the manifest, which is assumed if the data is not prepared."""

    manifest: DatasetManifest
    lengths: RowLengths
    notes: tuple[str, ...] = ()


def read_rows(run: PlannedRun, tables: Mapping[str, Any]) -> RunRows:
    """Return the rows that a task trains on: prepared ones, or those declared in `[rows]`.

    Raises DataError if the manifest is damaged or lacks training rows, and SettingsError if the
    task cannot use the data, or if `[rows]` has an unknown key.
    """
    folder = Path(run.data.path).expanduser() if run.data and run.data.path else None
    if run.data is None or folder is None or not (folder / MANIFEST).is_file():
        declared = tables.get("rows")
        rows = declared if isinstance(declared, dict) else {}
        known = list(RowLayout.model_fields)  # or the table of a layout
        for key in (key for key in rows if key not in known and not isinstance(rows[key], dict)):
            raise SettingsError(f"unknown key 'rows.{key}'", did_you_mean(key, known))
        return _assume_rows(run, rows)
    return _read_prepared(run, run.data.model_copy(update={"path": str(folder)}))


def _read_prepared(run: PlannedRun, data: DataSettings) -> RunRows:
    from regauge.data.mixture import read_data_manifest  # it imports numpy

    task, rows, microbatch_rows = run.task, run.batch.rows, run.batch.microbatch_rows
    main = read_manifest_file(Path(data.path) / MANIFEST)
    split = main.splits.get(TRAIN)
    if split is None or not split.rows:
        raise DataError(f"{data.path} has no training rows", "prepare more text")
    Task.check_dataset(task, main)
    texts = [name for name, column in main.columns.items() if column.kind == TOKENS]
    for name in task.text_columns():
        if name not in texts:
            problem = f"the data in {data.path} has no text field '{name}'"
            raise SettingsError(problem, did_you_mean(name, sorted(texts)))
    manifest = read_data_manifest(data)
    is_static = run.accelerator is not None and not run.accelerator.has_dynamic_shapes
    form = BatchForm(
        rows,
        rows if microbatch_rows == "auto" else microbatch_rows,
        has_any_shape=run.execution.compile != "blocks" and not is_static,
    )
    total_steps = run.stop.total_steps if "stop" in run.model_fields_set else None
    counts = task.sample_tokens(data, manifest, form, seed=run.seed, total_steps=total_steps)
    sequences = task.sequences_per_row(manifest)
    lengths = RowLengths(
        counts.computed / (counts.rows * sequences),
        counts.real_fraction,
        task.bucket_lengths(manifest),
        f"the prepared data in {data.path}",
        rows=split.rows,
        sequences_per_row=sequences,
    )
    return RunRows(manifest, lengths)


def _assume_rows(run: PlannedRun, table: Mapping[str, Any]) -> RunRows:
    """Return text rows with the limits from the `[rows]` table, or from the model."""
    task = run.task
    fields = table.get("fields") or {}
    limits = {name: size for name, size in fields.items() if isinstance(size, int)}
    limits = {name: size for name, size in limits.items() if name in task.text_columns()}
    group_size = int(table.get("max_group_size") or DEFAULT_GROUP_SIZE)
    columns = {
        name: ColumnInfo(max_length=size, lengths={TRAIN: (*[0] * size, 1)})
        for name in task.text_columns()
        for size in (limits.get(name, 1),)
    }
    columns |= {
        name: ColumnInfo(max_length=1, kind="float", max_group_size=group_size)
        for name in task.default_rows().get("floats", ())
    }
    manifest = assume_manifest(task.row_layout(), columns)
    limit = task.bucket_lengths(manifest)[-1] if limits else None
    declared = table.get("length") or limit
    longest = int(declared or run.model.config.get("max_position_embeddings") or DEFAULT_LENGTH)
    key = "rows.length" if table.get("length") else "rows.fields" if limits else "model.config"
    path = run.data.path if run.data else None
    source = f"{key}, since {path or 'data.path'} is not prepared"
    sequences = task.sequences_per_row(manifest)
    lengths = RowLengths(longest, 1.0, (longest,), source, sequences_per_row=sequences)
    note = f"every sequence is planned with {longest} tokens ({source}); real texts may be shorter"
    return RunRows(manifest, lengths, (note,))


def read_histogram(folder: Path) -> Sequence[int]:
    """Return the training texts' length histogram for prepared data.

    Packed text rows count with their full length. Raises DataError without prepared data.
    """
    columns = read_manifest_file(folder / MANIFEST).columns.values()
    texts = [column for column in columns if column.kind == TOKENS]
    histograms = [column.lengths[TRAIN] for column in texts if any(column.lengths.get(TRAIN, []))]
    if histograms:
        return sum_histograms(histograms)
    longest = max((column.max_length for column in texts), default=0)
    if not longest:
        raise DataError(f"{folder} has no column of tokens", "name a dataset of texts")
    return [*[0] * longest, 1]
