"""Text fields and kept fields are inferred from the first records, or set by the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regauge.config import build
from regauge.inference.export.manifest import ProgramEntry
from regauge.inference.predict import fields
from regauge.inference.predict.fields import (
    FieldKinds,
    InputFields,
    infer_fields,
    select_inputs,
    select_kept_fields,
    select_text_fields,
)
from regauge.inference.predict.settings import PredictSettings
from regauge.models.sentence_transformers import Tokenization
from regauge.system.errors import DataError, SettingsError

SEVERAL = {"id": "text", "title": "text", "body": "text"}


def build_settings(**changes: Any) -> PredictSettings:
    base = {
        "artifact": "a",
        "source": {"kind": "jsonl", "files": ("f.jsonl",)},
        "output": {"folder": "o"},
    }
    return build(PredictSettings, base | changes)


def build_program(output_kind: Any, input_format: Any = "completion") -> ProgramEntry:
    tokenization = Tokenization(max_length=8, input_format=input_format)
    return ProgramEntry(
        output_kind=output_kind, output_size=4, inputs=(), tokenization=tokenization
    )


def infer_kinds(folder: Path, *lines: str) -> FieldKinds:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    source = build_settings(source={"kind": "jsonl", "files": (str(path),)}).source
    return infer_fields(source, source.list_pieces())


def to_lines(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def test_fields_that_the_first_record_lacks_are_inferred(tmp_path: Path) -> None:
    first = {"text": None, "price": 3, "note": ""}
    records = (first, {"text": "a", "price": 2.5, "id": 7}, {"id": "x"})
    assert infer_kinds(tmp_path, *to_lines(*records)) == {
        "price": "float",
        "note": "text",
        "text": "text",
        "id": "integer",
    }


def test_only_the_first_records_are_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "MAX_INSPECTED_RECORDS", 2)
    records = to_lines({"text": "a"}, {"id": 1}, {"late": 1})
    assert infer_kinds(tmp_path, *["bad"] * 3, *records) == {"text": "text", "id": "integer"}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_schema_of_a_table_has_the_kinds_of_empty_columns(tmp_path: Path, kind: str) -> None:
    path, types = tmp_path / f"a.{kind}", {"text": pa.string(), "note": pa.string()}
    types |= {"price": pa.float32(), "new": pa.bool_(), "tags": pa.list_(pa.string())}
    words = pa.array(["a", None]).dictionary_encode()
    columns = {name: pa.nulls(2, column_type) for name, column_type in types.items()}
    table = pa.table(columns | {"word": words})
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    options = {"kind": kind, "files": (str(path),)}
    source = build_settings(source=options).source
    kinds = infer_fields(source, source.list_pieces())
    renamed = {**options, "rename": {"note": "said"}}
    several = build_settings(source={"kind": "several", "sources": (renamed,)}).source
    assert list(infer_fields(several, several.list_pieces())) == [
        "text",
        "said",
        "price",
        "new",
        "tags",
        "word",
    ]
    expected = {"text": "text", "note": "text", "price": "float", "new": "boolean"}
    expected |= {"tags": "json", "word": "text"}
    assert kinds == expected
    assert select_kept_fields(build_settings(), build_program("vectors"), ("text",), kinds) == {
        name: kind_of_field for name, kind_of_field in expected.items() if name != "text"
    }


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    source = build_settings(source={"kind": "parquet", "files": (str(path),)}).source
    with pytest.raises(DataError, match="damaged Parquet file"):
        infer_fields(source, source.list_pieces())


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (('{"text":"a"}{"text":"b"}',), r"line 1: malformed JSON .*correct the file"),
        (("[", '{"text":"a"},', "]"), "is a JSON array, not one object per line"),
        (("",), "the source has no record; name files with records in source.files"),
    ],
)
def test_a_source_without_a_valid_record_is_refused_with_the_reason(
    lines: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=problem):
        infer_kinds(tmp_path, *lines)


@pytest.mark.parametrize(
    ("kinds", "names", "artifact_fields", "expected"),
    [
        ({"name": "text", "id": "integer"}, (), (), ("name",)),
        ({"id": "text", "text": "text"}, (), (), ("text",)),
        (SEVERAL, ("title",), (), ("title",)),
        (SEVERAL, (), ("title", "body"), ("title", "body")),
        (SEVERAL, ("body", "title"), ("a", "b"), ("body", "title")),
    ],
)
def test_text_fields_are_set_or_unambiguous(
    kinds: FieldKinds, names: tuple[str, ...], artifact_fields: tuple[str, ...], expected: Any
) -> None:
    assert (
        select_text_fields(build_settings(predict={"text_fields": names}), artifact_fields, kinds)
        == expected
    )


@pytest.mark.parametrize(
    ("kinds", "names", "artifact_fields", "problem"),
    [
        (
            SEVERAL,
            (),
            (),
            r'several text fields: id, title, body; name one: predict.text_fields=\["body"\]',
        ),
        (SEVERAL, ("titel",), (), "have no text 'titel'; did you mean 'title'"),
        (SEVERAL, ("title",), ("a", "b"), "reads 2 texts per record; name as many"),
        (
            SEVERAL,
            (),
            ("says", "body"),
            "no text 'says'; set predict.text_fields, known",
        ),
        ({"id": "integer"}, (), (), "have no text; name another source"),
        ({"id": "integer"}, (), ("a",), "have no text 'a'; name another source"),
    ],
)
def test_ambiguous_or_unknown_text_fields_are_refused(
    kinds: FieldKinds, names: tuple[str, ...], artifact_fields: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        select_text_fields(build_settings(predict={"text_fields": names}), artifact_fields, kinds)


ALPACA: FieldKinds = {"instruction": "text", "input": "text", "output": "text", "id": "integer"}
CHAT: FieldKinds = {"messages": "json", "topic": "text", "tools": "json"}


@pytest.mark.parametrize(
    ("kinds", "names", "expected", "kept"),
    [
        (CHAT, (), InputFields(("messages",), is_conversation=True), ("topic",)),
        (CHAT, ("messages",), InputFields(("messages",), is_conversation=True), ("topic",)),
        (CHAT, ("topic",), InputFields(("topic",)), ("messages", "tools")),
        (
            {"messages": "text", "text": "text"},
            (),
            InputFields(("messages",), is_conversation=True),
            ("text",),
        ),
        (ALPACA, (), InputFields(("instruction",), is_conversation=True), ("output", "id")),
        (ALPACA, ("instruction",), InputFields(("instruction",)), ("input", "output", "id")),
    ],
)
def test_a_chat_model_reads_conversations_unless_a_text_is_named(
    kinds: FieldKinds, names: tuple[str, ...], expected: InputFields, kept: tuple[str, ...]
) -> None:
    settings = build_settings(predict={"text_fields": names})
    inputs = select_inputs(settings, build_program("text", "chat"), kinds)
    assert inputs == expected
    vectors = build_program("vectors")
    assert tuple(select_kept_fields(settings, vectors, inputs.read_fields, kinds)) == kept
    text = build_program("text", "chat")
    assert tuple(select_kept_fields(settings, text, inputs.read_fields, kinds)) == tuple(kinds)


@pytest.mark.parametrize(
    ("kinds", "requested", "expected"),
    [
        ({"tokens": "json", "tags": "json"}, (), "tokens"),
        ({"id": "integer", "words": "json"}, (), "words"),
        ({"sentence": "json", "tags": "json"}, ("sentence",), "sentence"),
        ({"tokens": "json", "text": "text"}, (), "text"),
    ],
)
def test_a_model_of_entities_reads_lists_of_words(
    kinds: FieldKinds, requested: tuple[str, ...], expected: str
) -> None:
    settings = build_settings(predict={"text_fields": requested})
    assert select_inputs(settings, build_program("entities"), kinds).text_fields == (expected,)
    other = build_settings(predict={"text_fields": (expected,)})
    if kinds[expected] == "json":
        with pytest.raises(SettingsError, match="have no text"):
            select_inputs(other, build_program("classes"), kinds)


def test_conversations_need_a_chat_template_and_no_prompt() -> None:
    with pytest.raises(SettingsError, match="'messages', but the model has no chat template"):
        select_inputs(build_settings(), build_program("text"), CHAT)
    prompted = build_settings(predict={"prompt_name": "query"})
    with pytest.raises(SettingsError, match="prompt_name has no effect on conversations"):
        select_inputs(prompted, build_program("text", "chat"), CHAT)
    plain: FieldKinds = {"messages": "json", "text": "text"}
    assert select_inputs(build_settings(), build_program("text"), plain) == InputFields(("text",))


@pytest.mark.parametrize("output_kind", ["classes", "values", "scores", "entities", "text"])
def test_a_table_for_people_keeps_the_texts(output_kind: str) -> None:
    """A text whose field has the name of an output column is left out."""
    kinds: FieldKinds = {"id": "integer", "text": "text", "value": "text"}
    program = build_program(output_kind)
    expected = {"id", "text"} if output_kind == "values" else {"id", "text", "value"}
    assert {*select_kept_fields(build_settings(), program, ("text", "value"), kinds)} == expected


def test_all_other_fields_or_the_named_ones_are_kept() -> None:
    kinds = {"id": "integer", "text": "text", "price": "float"}
    assert select_kept_fields(build_settings(), build_program("vectors"), ("text",), kinds) == {
        "id": "integer",
        "price": "float",
    }
    named = build_settings(output={"folder": "o", "keep_fields": ("text", "id")})
    assert select_kept_fields(named, build_program("vectors"), ("text",), kinds) == {
        "text": "text",
        "id": "integer",
    }
    strange = build_settings(output={"folder": "o", "keep_fields": ("tags",)})
    with pytest.raises(
        SettingsError, match="have no field 'tags'; known: id, price, text, or set its kind"
    ):
        select_kept_fields(strange, build_program("vectors"), ("text",), kinds)
