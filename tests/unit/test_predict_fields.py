"""Which fields of records are answered, and which stand beside the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regauge.config import build
from regauge.data.sources import Record, Rejected, legible
from regauge.errors import DataError, SettingsError
from regauge.prediction import fields
from regauge.prediction.settings import Predicting

SEVERAL = {"id": "text", "title": "text", "body": "text"}


def asked(**changes: Any) -> Predicting:
    base = {
        "artifact": "a",
        "source": {"kind": "jsonl", "files": ("f.jsonl",)},
        "output": {"folder": "o"},
    }
    return build(Predicting, base | changes)


def looked(folder: Path, *lines: str) -> fields.Kinds:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    source = asked(source={"kind": "jsonl", "files": (str(path),)}).source
    return fields.look(source, source.pieces())


def told(*records: dict[str, Any]) -> list[str]:
    return [json.dumps(record) for record in records]


def test_fields_that_the_first_record_lacks_are_seen(tmp_path: Path) -> None:
    records = ({"text": None, "price": 3}, {"text": "a", "price": 2.5, "id": 7}, {"id": "x"})
    assert looked(tmp_path, *told(*records)) == {"price": "real", "text": "text", "id": "integer"}


def test_no_more_records_are_looked_at_than_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "FIRST", 2)
    records = told({"text": "a"}, {"id": 1}, {"late": 1})
    assert looked(tmp_path, *["bad"] * 3, *records) == {"text": "text", "id": "integer"}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_table_says_what_its_empty_columns_hold(tmp_path: Path, kind: str) -> None:
    path, types = tmp_path / f"a.{kind}", {"text": pa.string(), "note": pa.string()}
    types |= {"price": pa.float32(), "new": pa.bool_(), "tags": pa.list_(pa.string())}
    words = pa.array(["a", None]).dictionary_encode()
    whole = pa.table({name: pa.nulls(2, each) for name, each in types.items()} | {"word": words})
    if kind == "parquet":
        pq.write_table(whole, path)
    else:
        with pa.ipc.new_file(path, whole.schema) as file:
            file.write_table(whole)
    table = {"kind": kind, "files": (str(path),)}
    source = asked(source=table).source
    found = fields.look(source, source.pieces())
    renamed = {**table, "rename": {"note": "said"}}
    several = asked(source={"kind": "several", "sources": (renamed,)}).source
    assert list(fields.look(several, several.pieces())) == ["text", "said", "price", "new", "word"]
    some = {"text": "text", "note": "text", "price": "real", "new": "integer", "word": "text"}
    assert found == some
    assert fields.beside(asked(), ("text",), found) == {
        name: each for name, each in some.items() if name != "text"
    }


def test_a_table_that_is_damaged_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    source = asked(source={"kind": "parquet", "files": (str(path),)}).source
    with pytest.raises(DataError, match="damaged Parquet file"):
        fields.look(source, source.pieces())


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (('{"text":"a"}{"text":"b"}',), r"line 1: malformed JSON .*correct the file"),
        (("[", '{"text":"a"},', "]"), "is a JSON array, and not one object per line"),
        (("",), "the source has no record; name files that hold some"),
    ],
)
def test_what_holds_no_record_is_refused_with_the_reason(
    lines: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=problem):
        looked(tmp_path, *lines)


@pytest.mark.parametrize(
    ("kinds", "names", "of_artifact", "found"),
    [
        ({"name": "text", "id": "integer"}, (), (), ("name",)),
        ({"id": "text", "text": "text"}, (), (), ("text",)),
        (SEVERAL, ("title",), (), ("title",)),
        (SEVERAL, (), ("title", "body"), ("title", "body")),
        (SEVERAL, ("body", "title"), ("a", "b"), ("body", "title")),
    ],
)
def test_what_is_answered_is_named_or_clear(
    kinds: fields.Kinds, names: tuple[str, ...], of_artifact: tuple[str, ...], found: Any
) -> None:
    assert fields.answered(asked(predict={"texts": names}), of_artifact, kinds) == found


@pytest.mark.parametrize(
    ("kinds", "names", "of_artifact", "problem"),
    [
        (SEVERAL, (), (), r'several texts: id, title, body; name one: predict.texts=\["body"\]'),
        (SEVERAL, ("titel",), (), "have no text 'titel'; did you mean 'title'"),
        (SEVERAL, ("title",), ("a", "b"), "reads 2 texts of a record; name as many"),
        (
            SEVERAL,
            (),
            ("says", "body"),
            "no text 'says'; name others in predict.texts, known",
        ),
        ({"id": "integer"}, (), (), "have no text; name another source"),
        ({"id": "integer"}, (), ("a",), "have no text 'a'; its records hold no text"),
    ],
)
def test_what_is_not_clear_is_refused(
    kinds: fields.Kinds, names: tuple[str, ...], of_artifact: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        fields.answered(asked(predict={"texts": names}), of_artifact, kinds)


def test_what_stands_beside_the_answers_is_the_others_or_what_is_named() -> None:
    kinds = {"id": "integer", "text": "text", "price": "real"}
    assert fields.beside(asked(), ("text",), kinds) == {"id": "integer", "price": "real"}
    named = asked(output={"folder": "o", "keep": ("text", "id")})
    assert fields.beside(named, ("text",), kinds) == {"text": "text", "id": "integer"}
    strange = asked(output={"folder": "o", "keep": ("tags",)})
    with pytest.raises(SettingsError, match="have no text or number 'tags'"):
        fields.beside(strange, ("text",), kinds)


@pytest.mark.parametrize(("text", "whole"), [("smile 🙂", True), ("half \ud83d", False)])
def test_halves_of_characters_are_set_aside(text: str, whole: bool) -> None:  # noqa: FBT001
    record = Record("f", "line 2", {"id": 1, "text": text})
    wanted = record if whole else Rejected("f", "line 2", "undecodable bytes", "lone surrogate")
    assert legible(record) == wanted
