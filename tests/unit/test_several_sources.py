"""Several sources as one dataset: shares and new names, on any number of processes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from regauge import config
from regauge.data.sources import Record, Rejected, Skipped
from regauge.data.sources.several import Several
from regauge.errors import DataError, SettingsError
from regauge.verbs import prepare as verb
from unit.preparing import contents, corpus, prepared, settings
from unit.reads import everything, fields


def several(*members: dict[str, Any] | str, **more: Any) -> Several:
    table = {"kind": "several", "sources": list(members), **more}
    found: Several = config.choose("data/sources", config._tuples(table))
    return found


@pytest.fixture
def two(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a source of JSON lines, and one of a CSV file with columns of other names."""
    corpus(tmp_path / "a.jsonl", 2000)
    documents = corpus(tmp_path / "b.tmp", 301)
    with (tmp_path / "b.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["head", "body", "number"])
        for document in documents:
            writer.writerow([document["title"], document["text"], document["number"]])
    lines = {"kind": "jsonl", "files": [str(tmp_path / "a.jsonl")], "piece_mib": 1}
    rows = {"kind": "csv", "files": [str(tmp_path / "b.csv")], "integers": ["number"]}
    return lines, {**rows, "rename": {"body": "text", "head": "title"}}


def test_sources_follow_each_other_under_the_same_names(
    two: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    lines, rows = two
    found = fields(several(lines, rows))
    assert found == [*fields(several(lines)), *fields(several(rows))]
    assert {tuple(record) for record in found} == {("text", "title", "number"),
                                                   ("title", "text", "number")}  # fmt: skip
    assert len(found) == 2301


def test_a_share_is_a_matter_of_content_alone(two: tuple[dict[str, Any], dict[str, Any]]) -> None:
    lines, rows = two
    some = everything(several({**lines, "share": 0.1}, rows))
    more = fields(several({**lines, "share": 0.5, "rename": {"text": "other"}}))
    kept = [found.fields for found in some if isinstance(found, Record)][:-301]
    assert 150 < len(kept) < 250
    assert 900 < len(more) < 1100
    smaller = {record["number"] for record in kept}
    assert smaller <= {record["number"] for record in more}
    skipped = [found.reason for found in some if isinstance(found, Skipped)]
    assert skipped == ["outside of the share of source 1"] * (2000 - len(kept))


def test_several_sources_give_the_same_bytes_on_any_number_of_processes(
    tmp_path: Path, two: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    lines, rows = two
    source = {"kind": "several", "sources": [{**lines, "share": 0.6}, rows]}
    changes: dict[str, Any] = {
        "source": {**source, "duplicates": "drop"},
        "filter": {"fewest_words": 20},
        "rows": {"layout": "fields", "fields": {"title": 8, "text": 32}, "numbers": ["number"]},
    }
    one = prepared(tmp_path, "one", **changes)
    two_processes = prepared(tmp_path, "two", **changes, prepare={"processes": 2})
    assert contents(one.folder) == contents(two_processes.folder)
    skipped = one.manifest.skipped
    assert 700 < skipped["outside of the share of source 1"] < 900
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
    assert fields(read) == [{"text": "first"}, {"text": "second"}]
    assert len({piece.name for piece in read.pieces()}) == 2
    assert read.fields() == ("text",)


def test_a_name_that_is_taken_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "a", "text": "b"}\n{"body": "c"}\n')
    file = {"kind": "jsonl", "files": [str(tmp_path / "a.jsonl")], "rename": {"body": "text"}}
    found = everything(several(file))
    assert [item.reason for item in found if isinstance(item, Rejected)] == [
        "'body' cannot become 'text', which is there"
    ]
    assert fields(several(file)) == [{"text": "c"}]
    swapped = fields(several({**file, "rename": {"body": "text", "text": "body"}}))
    assert swapped == [{"text": "a", "body": "b"}, {"text": "c"}]


def test_what_is_wrong_with_one_of_them_is_told(
    tmp_path: Path, two: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    lines, rows = two
    with pytest.raises(DataError, match=r"source 2: .*b.csv has no column 'bdy'; did you mean"):
        several(lines, {**rows, "columns": ["bdy", "number"], "rename": {}}).pieces()
    with pytest.raises(SettingsError, match="no field 'ttle'; did you mean 'title'"):
        prepared(
            tmp_path,
            source=several(lines, rows).model_dump(),
            rows={"layout": "fields", "fields": {"ttle": 8}},
        )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"share": 0.0}, "greater than 0"),
    ({"share": 1.5}, "less than or equal to 1"),
    ({"shar": 0.5}, "unknown key 'shar'; did you mean 'share'"),
    ({"colums": ["a"]}, "unknown key 'colums'; did you mean 'columns'"),
    ({"duplicates": "drop"}, "set source.duplicates"),
    ({"columns": ["text"], "rename": {"txt": "a"}}, "no field 'txt'; did you mean 'text'"),
    ({"columns": ["text", "a"], "rename": {"a": "text"}}, "gives two fields one name"),
    ({"kind": "jsnl"}, "did you mean 'jsonl'"),
    ({"kind": "several", "sources": ["python-docs"]}, "name them all here"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_impossible_sources_are_refused(changes: dict[str, Any], message: str) -> None:
    file = {} if changes.get("kind") == "several" else {"kind": "jsonl", "files": ["a"]}
    with pytest.raises(SettingsError, match=message):
        several({**file, **changes})


def test_settings_come_back_from_what_is_saved(
    tmp_path: Path, two: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    run = settings(tmp_path, source={"kind": "several", "sources": [*two, "python-docs"]})
    assert config.build(verb.Prepare, config.dump(run)) == run
    assert config.dump(run)["source"]["sources"][1]["rename"] == two[1]["rename"]


def test_the_first_source_elsewhere_is_what_is_asked(
    two: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    there = {"kind": "text", "files": ["s3://bucket/a"]}
    assert several(*two, there).elsewhere() == "s3://bucket/a"
    assert not several(*two).elsewhere()
