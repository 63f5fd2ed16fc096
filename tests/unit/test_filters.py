"""Filters: records are skipped and counted by reason, with any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regauge.data.prepare.read_records import RecordFilter
from regauge.data.settings import TextLimits
from regauge.data.sources import Record, Rejected, Skipped
from regauge.system.errors import DataError, SettingsError
from unit.preparing import FIELDS, build_settings, prepare_dataset, read_contents, write_corpus


def find_reason(text: str, **limits: int) -> str:
    record_filter = RecordFilter({"text": TextLimits(**limits)})
    (item,) = record_filter.apply([Record("a", "line 1", {"text": text})])
    return item.reason if isinstance(item, Skipped) else ""


@pytest.mark.parametrize(
    ("text", "limits", "reason"),
    [
        ("four", {"min_characters": 4, "max_characters": 4}, ""),
        ("four", {"min_characters": 5}, "'text' under 5 characters"),
        ("four", {"max_characters": 3}, "'text' over 3 characters"),
        ("äöü€", {"max_characters": 4}, ""),
        (" two \n words ", {"min_words": 2, "max_words": 2}, ""),
        ("two words", {"min_words": 3}, "'text' under 3 words"),
        ("two words", {"max_words": 1}, "'text' over 1 words"),
        ("two words", {"min_characters": 99, "min_words": 3}, "'text' under 99 characters"),
        ("", {}, ""),
    ],
)
def test_texts_have_length_limits(text: str, limits: dict[str, int], reason: str) -> None:
    assert find_reason(text, **limits) == reason


def test_values_and_missing_fields_have_no_length() -> None:
    items = [Record("a", "1", {"label": 3}), Record("a", "2", {}), Rejected("a", "3", "bad")]
    limits = {"text": TextLimits(min_words=1), "label": TextLimits(min_characters=9)}
    assert list(RecordFilter(limits).apply(items)) == items


def test_skipped_records_are_counted_by_reason(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "a.jsonl", 400)
    limits = {"text": {"min_words": 20, "max_words": 80}, "title": {"max_characters": 42}}
    data = prepare_dataset(tmp_path, **FIELDS, filter=limits)
    words = [len(document["text"].split()) for document in documents]
    fitting = [20 <= count <= 80 for count in words]
    long = [len(document["title"]) > 42 for document in documents]
    assert data.manifest.skipped == {
        "'text' over 80 words": sum(count > 80 for count in words),
        "'text' under 20 words": sum(count < 20 for count in words),
        "'title' over 42 characters": sum(map(lambda *both: all(both), fitting, long)),
    }
    left = sum(split.rows for split in data.manifest.splits.values())
    assert left + sum(data.manifest.skipped.values()) == 400
    assert (data.folder / "rejected.jsonl").read_text() == ""


def test_limits_without_a_field_apply_to_the_text(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.jsonl", 50)
    short = build_settings(tmp_path, filter={"min_words": 3})
    assert short == build_settings(tmp_path, filter={"text": {"min_words": 3}})
    both = build_settings(tmp_path, filter={"min_words": 3, "text": {"max_words": 9}, "title": {}})
    assert both.filter == {"text": TextLimits(min_words=3, max_words=9), "title": TextLimits()}


@pytest.mark.full
def test_the_number_of_processes_does_not_matter(tmp_path: Path) -> None:
    for number in range(4):
        write_corpus(tmp_path / f"{number}.jsonl", 900 + number)
    changes: dict[str, Any] = {"filter": {"min_words": 30}, "source": {"duplicates": "drop"}}
    one = prepare_dataset(tmp_path, "one", **changes)
    two = prepare_dataset(tmp_path, "two", **changes, prepare={"processes": 2})
    assert len(json.loads((two.folder / "inputs.json").read_text())["pieces"]) > 1
    assert read_contents(one.folder) == read_contents(two.folder)
    assert one.manifest.skipped["'text' under 30 words"] > 100


def test_a_filter_changes_the_dataset_and_no_filter_does_not(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.jsonl", 100)
    plain = prepare_dataset(tmp_path)
    assert "filter" not in json.loads((plain.folder / "inputs.json").read_text())["settings"]
    with pytest.raises(DataError, match=r"filter.text.min_words was unset and is 9"):
        prepare_dataset(tmp_path, filter={"min_words": 9})


def test_a_filter_that_skips_everything_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a.jsonl", 20)
    with pytest.raises(
        DataError, match=r"no record is left \(20 'text' under 999 words\); correct"
    ):
        prepare_dataset(tmp_path, filter={"min_words": 999})
    with pytest.raises(SettingsError, match="no field 'txt' with a value; did you mean 'text'"):
        prepare_dataset(tmp_path, filter={"txt": {"min_words": 1}})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_word": 3}, "did you mean 'min_words'"),
        ({"title": {"min_word": 3}}, "did you mean 'min_words'"),
        ({"min_words": 9, "max_words": 3}, "min_words = 9 exceeds max_words = 3"),
        ({"max_characters": 0}, "must be at least 1, got 0"),
    ],
)
def test_invalid_limits_are_refused(tmp_path: Path, limits: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_settings(tmp_path, filter=limits)
