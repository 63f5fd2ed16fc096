"""Several sources as one dataset: fractions and renamed fields, with any number of processes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from regauge import config
from regauge.commands import prepare as verb
from regauge.data.sources import Record, Rejected, Skipped
from regauge.data.sources.several import SeveralSources
from regauge.system.errors import DataError, SettingsError
from unit.preparing import build_settings, prepare_dataset, read_contents, write_corpus
from unit.reads import read_fields, read_items


def several(*members: dict[str, Any] | str, **more: Any) -> SeveralSources:
    table = {"kind": "several", "sources": list(members), **more}
    combined: SeveralSources = config.parse_choice("data/sources", config._convert_value(table))
    return combined


@pytest.fixture
def two_sources(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a JSON lines source and a CSV source with other column names."""
    write_corpus(tmp_path / "a.jsonl", 2000)
    documents = write_corpus(tmp_path / "b.tmp", 301)
    with (tmp_path / "b.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["head", "body", "number"])
        for document in documents:
            writer.writerow([document["title"], document["text"], document["number"]])
    lines = {"kind": "jsonl", "files": [str(tmp_path / "a.jsonl")], "chunk_mib": 1}
    rows = {"kind": "csv", "files": [str(tmp_path / "b.csv")], "integers": ["number"]}
    return lines, {**rows, "rename": {"body": "text", "head": "title"}}


def test_sources_are_concatenated_with_the_same_field_names(
    two_sources: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    lines, rows = two_sources
    records = read_fields(several(lines, rows))
    assert records == [*read_fields(several(lines)), *read_fields(several(rows))]
    assert {tuple(record) for record in records} == {("text", "title", "number"),
                                                   ("title", "text", "number")}  # fmt: skip
    assert len(records) == 2301


def test_a_fraction_depends_on_the_content_alone(
    two_sources: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    lines, rows = two_sources
    items = read_items(several({**lines, "fraction": 0.1}, rows))
    more = read_fields(several({**lines, "fraction": 0.5, "rename": {"text": "other"}}))
    selected = [item.fields for item in items if isinstance(item, Record)][:-301]
    assert 150 < len(selected) < 250
    assert 900 < len(more) < 1100
    smaller = {record["number"] for record in selected}
    assert smaller <= {record["number"] for record in more}
    skipped = [item.reason for item in items if isinstance(item, Skipped)]
    assert skipped == ["outside the fraction of source 1"] * (2000 - len(selected))


def test_several_sources_give_the_same_bytes_on_any_number_of_processes(
    tmp_path: Path, two_sources: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    lines, rows = two_sources
    source = {"kind": "several", "sources": [{**lines, "fraction": 0.6}, rows]}
    changes: dict[str, Any] = {
        "source": {**source, "duplicates": "drop"},
        "filter": {"min_words": 20},
        "rows": {"layout": "fields", "fields": {"title": 8, "text": 32}, "integers": ["number"]},
    }
    one = prepare_dataset(tmp_path, "one", **changes)
    two_processes = prepare_dataset(tmp_path, "two", **changes, prepare={"processes": 2})
    assert read_contents(one.folder) == read_contents(two_processes.folder)
    skipped = one.manifest.skipped
    assert 700 < skipped["outside the fraction of source 1"] < 900
    assert skipped["'text' under 20 words"] > 100
    left = sum(split.rows for split in one.manifest.splits.values())
    assert left + sum(skipped.values()) == 2301
    pieces = json.loads((one.folder / "inputs.json").read_text())["pieces"]
    assert {name[:9] for name in pieces} == {"source 1:", "source 2:"}


def test_the_same_file_may_be_two_sources(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"one": "first", "two": "second"}\n')
    file = {"kind": "jsonl", "files": [str(tmp_path / "a.jsonl")]}
    first = {**file, "columns": ["one"], "rename": {"one": "text"}}
    second = {**file, "columns": ["two"], "rename": {"two": "text"}}
    read = several(first, second)
    assert read_fields(read) == [{"text": "first"}, {"text": "second"}]
    assert len({piece.name for piece in read.list_pieces()}) == 2
    assert read.field_names() == ("text",)


def test_renaming_does_not_overwrite_a_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a", "text": "b"}\n{"body": "c"}\n')
    file = {"kind": "jsonl", "files": [str(tmp_path / "a.jsonl")], "rename": {"body": "text"}}
    items = read_items(several(file))
    assert [item.reason for item in items if isinstance(item, Rejected)] == [
        "'body' cannot become 'text', which exists"
    ]
    assert read_fields(several(file)) == [{"text": "c"}]
    swapped = read_fields(several({**file, "rename": {"body": "text", "text": "body"}}))
    assert swapped == [{"text": "a", "body": "b"}, {"text": "c"}]


def test_errors_name_the_source(
    tmp_path: Path, two_sources: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    lines, rows = two_sources
    with pytest.raises(DataError, match=r"source 2: .*b.csv has no column 'bdy'; did you mean"):
        several(lines, {**rows, "columns": ["bdy", "number"], "rename": {}}).list_pieces()
    with pytest.raises(SettingsError, match="no field 'ttle' with a value; did you mean 'title'"):
        prepare_dataset(
            tmp_path,
            source=several(lines, rows).model_dump(),
            rows={"layout": "fields", "fields": {"ttle": 8}},
        )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"fraction": 0.0}, "greater than 0"),
    ({"fraction": 1.5}, "must be at most 1.0, got 1.5"),
    ({"fractio": 0.5}, "unknown key 'fractio'; did you mean 'fraction'"),
    ({"colums": ["a"]}, "unknown key 'colums'; did you mean 'columns'"),
    ({"duplicates": "drop"}, "set source.duplicates"),
    ({"columns": ["text"], "rename": {"txt": "a"}}, "no field 'txt'; did you mean 'text'"),
    ({"columns": ["text", "a"], "rename": {"a": "text"}}, "gives two fields the same name"),
    ({"kind": "jsnl"}, "did you mean 'jsonl'"),
    ({"kind": "several", "sources": ["python-docs"]}, "cannot be nested; list all in one table"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_invalid_sources_are_refused(changes: dict[str, Any], message: str) -> None:
    file = {} if changes.get("kind") == "several" else {"kind": "jsonl", "files": ["a"]}
    with pytest.raises(SettingsError, match=message):
        several({**file, **changes})


def test_settings_can_be_saved_and_loaded(
    tmp_path: Path, two_sources: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    run = build_settings(
        tmp_path, source={"kind": "several", "sources": [*two_sources, "python-docs"]}
    )
    assert config.build(verb.PrepareSettings, config.dump(run)) == run
    assert config.dump(run)["source"]["sources"][1]["rename"] == two_sources[1]["rename"]


def test_the_first_remote_location_is_returned(
    two_sources: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    remote_source = {"kind": "text", "files": ["s3://bucket/a"]}
    assert several(*two_sources, remote_source).remote_location() == "s3://bucket/a"
    assert not several(*two_sources).remote_location()
