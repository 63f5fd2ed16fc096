"""Infer the fields of records from the first ones; select those to compute and those to keep."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from regauge.artifacts.postprocess import build_columns
from regauge.choices import did_you_mean
from regauge.data.sources import Record, Rejected
from regauge.errors import DataError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.artifacts.manifest import ProgramEntry
    from regauge.data.sources import Piece, Source, Value
    from regauge.prediction.settings import PredictOutput, PredictSettings

MAX_INSPECTED_RECORDS = 1000
DEFAULT_TEXT_FIELD = "text"
"""The text field if several fields hold texts and the settings name none."""
FieldKinds = dict[str, str]
"""The kind of each field: "text", "integer" or "float"."""


def infer_fields(source: Source, pieces: tuple[Piece, ...]) -> FieldKinds:
    """Return the fields of the first records, in the order of their first appearance.

    Fields in the schema of the first piece come first. A field with integers and floats is "float";
    a field with texts and numbers has the kind of its first value. Raises DataError if there is no
    record.
    """
    kinds: FieldKinds = source.field_kinds(pieces[0]) if pieces else {}
    first_rejected: Rejected | None = None
    num_records = 0
    for item in chain.from_iterable(map(source.read, pieces)):
        if isinstance(item, Rejected):
            first_rejected = first_rejected or item
        elif isinstance(item, Record):
            num_records += 1
            for name, value in item.fields.items():
                both = {kinds.setdefault(name, infer_kind(value)), infer_kind(value)}
                if both == {"integer", "float"}:
                    kinds[name] = "float"
            if num_records == MAX_INSPECTED_RECORDS:
                break
    if num_records:
        return kinds
    if first_rejected is not None:
        detail = f" ({first_rejected.detail})" if first_rejected.detail else ""
        location = f"{first_rejected.file}, {first_rejected.location}"
        problem = f"no valid record: {location}: {first_rejected.reason}{detail}"
        raise DataError(problem, "correct the file, or name another")
    raise DataError("the source has no record", "name files with records in source.files")


def infer_kind(value: Value) -> str:
    """Return the kind of a value: "text", "integer" or "float"."""
    if isinstance(value, str):
        return "text"
    return "integer" if isinstance(value, int) else "float"


def select_text_fields(
    settings: PredictSettings, artifact_fields: tuple[str, ...], kinds: FieldKinds
) -> tuple[str, ...]:
    """Return the text fields of the settings, else of the artifact, else the only text field.

    Raises SettingsError if the choice is ambiguous, or if a field holds no texts.
    """
    requested, num_texts = settings.predict.text_fields, max(1, len(artifact_fields))
    if requested and len(requested) != num_texts:
        problem = f"the artifact reads {num_texts} texts per record"
        remedy = f"name as many in predict.text_fields, not {len(requested)}"
        raise SettingsError(problem, remedy)
    text_fields = tuple(name for name, kind in kinds.items() if kind == "text")
    default = (DEFAULT_TEXT_FIELD,) if DEFAULT_TEXT_FIELD in text_fields else text_fields
    names = requested or artifact_fields or default
    if not names:
        raise SettingsError("the first records have no text", "name another source")
    if len(names) > num_texts:
        problem = f"records have several text fields: {', '.join(names)}"
        raise SettingsError(problem, f'name one: predict.text_fields=["{names[-1]}"]')
    for name in names:
        if name not in text_fields:
            remedy = did_you_mean(name, text_fields) if text_fields else "name another source"
            if text_fields and not requested:
                remedy = f"set predict.text_fields, {remedy}"
            raise SettingsError(f"the first records have no text '{name}'", remedy)
    return names


def select_kept_fields(
    settings: PredictSettings, text_fields: tuple[str, ...], kinds: FieldKinds
) -> FieldKinds:
    """Return the fields to copy into the output; raises SettingsError for an unknown field."""
    requested = settings.output.keep_fields
    if requested == "all":
        return {name: kind for name, kind in kinds.items() if name not in text_fields}
    for name in requested:
        if name not in kinds:
            problem = f"the first records have no text or number '{name}'"
            raise SettingsError(problem, did_you_mean(name, tuple(kinds)))
    return {name: kinds[name] for name in requested}


def check_columns(program: ProgramEntry, output: PredictOutput, kept: Sequence[str]) -> None:
    """Raise SettingsError if outputs do not fit the format, or a kept field has a column's name."""
    columns = build_columns(program, output.dtype, np.zeros((1, program.output_size), np.float32))
    if output.format == "npy" and isinstance(next(iter(columns.values())), pa.Array):
        problem = f"output.format = npy holds numbers, but the outputs are {program.output_kind}"
        raise SettingsError(problem, "set output.format = parquet")
    for name in kept:
        if name in columns:
            problem = f"field '{name}' has the name of an output column"
            raise SettingsError(problem, "set output.keep_fields without it")
