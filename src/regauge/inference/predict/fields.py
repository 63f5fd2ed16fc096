"""Infers record fields from the first records; selects those to compute and those to keep."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from regauge.data.conversations import KWARGS_FIELD, LIST_FIELDS
from regauge.data.sources import Record, Rejected
from regauge.data.values import FieldKind, infer_kind, merge_kinds
from regauge.inference.export.postprocess import build_columns
from regauge.system.choices import did_you_mean
from regauge.system.errors import DataError, SettingsError
from regauge.system.wording import format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from regauge.data.sources import Piece, Source
    from regauge.inference.export.manifest import Dtype, ProgramEntry
    from regauge.inference.export.postprocess import Columns
    from regauge.inference.predict.settings import PredictOutput, PredictSettings

MAX_INSPECTED_RECORDS = 1000
"""Records that decide a source's fields."""
MAX_SEARCHED_RECORDS = 100_000
"""Records to search for a named field missing from the first ones."""
WORD_FIELDS = ("tokens", "words")
"""Fields with a list of words, read if there is no text."""
DEFAULT_TEXT_FIELD = "text"
"""Text field if several fields hold texts and the settings name none."""
REQUEST_FIELDS = ("messages", "instruction")
"""Conversation fields; the first existing one is read."""
CONVERSATION_FIELDS = (*LIST_FIELDS, KWARGS_FIELD, "input")
"""Further fields that a chat template reads."""
FieldKinds = dict[str, FieldKind]


def infer_fields(
    source: Source, pieces: tuple[Piece, ...], named: Collection[str] = ()
) -> FieldKinds:
    """Return the fields in the first records, in order of first appearance.

    Fields in the first piece's schema come first. Reads more records until each of the `named`
    fields has occurred. Raises DataError without records.
    """
    sample = _FieldSample(source.field_kinds(pieces[0]) if pieces else {})
    first_rejected: Rejected | None = None
    for item in chain.from_iterable(map(source.read, pieces)):
        if isinstance(item, Rejected):
            first_rejected = first_rejected or item
        elif isinstance(item, Record):
            sample.add(item)
            if sample.is_complete(named):
                break
    if sample.num_records:
        return sample.kinds
    if first_rejected is not None:
        detail = f" ({first_rejected.detail})" if first_rejected.detail else ""
        location = f"{first_rejected.file}, {first_rejected.location}"
        problem = f"no valid record: {location}: {first_rejected.reason}{detail}"
        raise DataError(problem, "correct the file, or name another")
    raise DataError("the source has no record", "name files with records in source.files")


class _FieldSample:
    def __init__(self, kinds: FieldKinds) -> None:
        self.kinds = dict(kinds)
        self.num_records = 0
        self._negative: set[str] = set()
        """Fields with a number below zero."""

    def add(self, record: Record) -> None:
        """Add a record's fields; after the first records, only new fields."""
        is_first = self.num_records < MAX_INSPECTED_RECORDS
        self.num_records += 1
        for name, value in record.fields.items():
            if name in self.kinds and not is_first:
                continue
            if isinstance(value, int | float) and value < 0:
                self._negative.add(name)
            kind, has_negative = infer_kind(value), name in self._negative
            known_kind = self.kinds.get(name, kind)
            self.kinds[name] = merge_kinds(known_kind, kind, has_negative=has_negative)

    def is_complete(self, named: Collection[str]) -> bool:
        """Return whether no more records have to be read."""
        if self.num_records < MAX_INSPECTED_RECORDS:
            return False
        is_missing = any(name not in self.kinds for name in named)
        return not is_missing or self.num_records >= MAX_SEARCHED_RECORDS


class InputFields(NamedTuple):
    """Record fields that a model reads."""

    text_fields: tuple[str, ...]
    """Fields with texts; for conversations the field with `messages` or an `instruction`."""
    is_conversation: bool = False
    """Whether a record is a conversation, rendered by the model's chat template."""

    @property
    def read_fields(self) -> tuple[str, ...]:
        """All fields that are read, and not copied by default."""
        return (
            (*self.text_fields, *CONVERSATION_FIELDS) if self.is_conversation else self.text_fields
        )


def select_inputs(
    settings: PredictSettings, program: ProgramEntry, kinds: FieldKinds
) -> InputFields:
    """Return the fields that a model reads; with a chat template these may be a conversation.

    Raises SettingsError if records are conversations and the model cannot read them, and the errors
    from `select_text_fields`.
    """
    requested = settings.predict.text_fields
    is_chat = program.tokenization is not None and program.tokenization.input_format == "chat"
    names = requested or tuple(name for name in REQUEST_FIELDS if name in kinds)[:1]
    is_conversation = names == ("messages",) or (names == ("instruction",) and not requested)
    if is_conversation and is_chat:
        if settings.predict.prompt_name is not None:
            problem = "predict.prompt_name has no effect on conversations"
            raise SettingsError(problem, "remove it, or name a text field in predict.text_fields")
        return InputFields(names, is_conversation=True)
    if "messages" in names and program.output_kind == "text" and DEFAULT_TEXT_FIELD not in kinds:
        problem = "the records have 'messages', but the model has no chat template"
        remedy = "name a field with a text in predict.text_fields, or use a model with a template"
        raise SettingsError(problem, remedy)
    artifact_fields = program.fields.text_fields
    if program.output_kind == "entities":
        kinds = _read_word_lists(kinds, requested)
    return InputFields(select_text_fields(settings, artifact_fields, kinds))


def _read_word_lists(kinds: FieldKinds, requested: tuple[str, ...]) -> FieldKinds:
    """Return the kinds with lists of words as texts: requested ones, or if no field is a text."""
    names = requested or (() if "text" in kinds.values() else WORD_FIELDS)
    return {
        name: "text" if kind == "json" and name in names else kind for name, kind in kinds.items()
    }


def select_text_fields(
    settings: PredictSettings, artifact_fields: tuple[str, ...], kinds: FieldKinds
) -> tuple[str, ...]:
    """Return the text fields in the settings, else the artifact's, else the only text field.

    Raises SettingsError if the choice is ambiguous, or if a field does not hold texts.
    """
    requested, num_texts = settings.predict.text_fields, max(1, len(artifact_fields))
    if requested and len(requested) != num_texts:
        problem = f"the model reads {format_count(num_texts, 'text')} per record"
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
    settings: PredictSettings,
    program: ProgramEntry,
    read_fields: tuple[str, ...],
    kinds: FieldKinds,
) -> FieldKinds:
    """Return the fields to copy into the output, by default all.

    The model's inputs, `read_fields`, are left out by default if the outputs are vectors, or if an
    output column has the same name. Raises SettingsError for an unknown field.
    """
    requested = settings.output.keep_fields
    if isinstance(requested, dict):
        return dict(requested)
    if requested == "all":
        columns = read_fields if program.output_kind == "vectors" else list_columns(program)
        omitted = {*read_fields}.intersection(columns)
        return {name: kind for name, kind in kinds.items() if name not in omitted}
    for name in requested:
        if name not in kinds:
            problem = f"the first {MAX_SEARCHED_RECORDS:,} records have no field '{name}'"
            remedy = f'{did_you_mean(name, tuple(kinds))}, or set its kind: {{ {name} = "text" }}'
            raise SettingsError(problem, remedy)
    return {name: kinds[name] for name in requested}


def list_columns(program: ProgramEntry, dtype: Dtype | Literal["auto"] = "auto") -> Columns:
    """Return the output columns, without rows."""
    return build_columns(program, dtype, np.zeros((1, program.output_size), np.float32))


def list_named_fields(settings: PredictSettings) -> tuple[str, ...]:
    """Return the fields whose kind must be inferred from the records."""
    requested = settings.output.keep_fields
    kept = requested if isinstance(requested, tuple) else ()
    return (*settings.predict.text_fields, *kept)


def check_columns(program: ProgramEntry, output: PredictOutput, kept: Sequence[str]) -> None:
    """Raise SettingsError if outputs do not fit the format, or a kept field has a column's name."""
    columns = list_columns(program, output.dtype)
    if output.format == "npy" and isinstance(next(iter(columns.values())), pa.Array):
        problem = f"output.format = npy holds numbers, but the outputs are {program.output_kind}"
        raise SettingsError(problem, "set output.format = parquet")
    for name in kept:
        if name in columns:
            problem = f"field '{name}' has the name of an output column"
            raise SettingsError(problem, "set output.keep_fields without it")
