"""Filters: what is left out is counted by reason, on any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regauge.data.settings import Limits
from regauge.data.sources import Record, Rejected, Skipped
from regauge.errors import DataError, SettingsError
from regauge.preparation.filters import filtered
from unit.preparing import FIELDS, contents, corpus, prepared, settings


def judged(text: str, **limits: int) -> str:
    (found,) = filtered([Record("a", "line 1", {"text": text})], {"text": Limits(**limits)})
    return found.reason if isinstance(found, Skipped) else ""


@pytest.mark.parametrize(
    ("text", "limits", "reason"),
    [
        ("four", {"fewest_characters": 4, "most_characters": 4}, ""),
        ("four", {"fewest_characters": 5}, "'text' under 5 characters"),
        ("four", {"most_characters": 3}, "'text' over 3 characters"),
        ("äöü€", {"most_characters": 4}, ""),
        (" two \n words ", {"fewest_words": 2, "most_words": 2}, ""),
        ("two words", {"fewest_words": 3}, "'text' under 3 words"),
        ("two words", {"most_words": 1}, "'text' over 1 words"),
        ("two words", {"fewest_characters": 99, "fewest_words": 3}, "'text' under 99 characters"),
        ("", {}, ""),
    ],
)
def test_a_text_is_measured(text: str, limits: dict[str, int], reason: str) -> None:
    assert judged(text, **limits) == reason


def test_what_is_no_text_is_not_measured() -> None:
    found = [Record("a", "1", {"label": 3}), Record("a", "2", {}), Rejected("a", "3", "bad")]
    limits = {"text": Limits(fewest_words=1), "label": Limits(fewest_characters=9)}
    assert list(filtered(found, limits)) == found


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    documents = corpus(tmp_path / "a.jsonl", 400)
    limits = {"text": {"fewest_words": 20, "most_words": 80}, "title": {"most_characters": 42}}
    data = prepared(tmp_path, **FIELDS, filter=limits)
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


def test_limits_without_a_field_are_of_the_text(tmp_path: Path) -> None:
    corpus(tmp_path / "a.jsonl", 50)
    short = settings(tmp_path, filter={"fewest_words": 3})
    assert short == settings(tmp_path, filter={"text": {"fewest_words": 3}})
    both = settings(tmp_path, filter={"fewest_words": 3, "text": {"most_words": 9}, "title": {}})
    assert both.filter == {"text": Limits(fewest_words=3, most_words=9), "title": Limits()}


@pytest.mark.full
def test_two_processes_filter_as_one(tmp_path: Path) -> None:
    for number in range(4):
        corpus(tmp_path / f"{number}.jsonl", 900 + number)
    changes: dict[str, Any] = {"filter": {"fewest_words": 30}, "source": {"duplicates": "drop"}}
    one = prepared(tmp_path, "one", **changes)
    two = prepared(tmp_path, "two", **changes, prepare={"processes": 2})
    assert len(json.loads((two.folder / "inputs.json").read_text())["pieces"]) > 1
    assert contents(one.folder) == contents(two.folder)
    assert one.manifest.skipped["'text' under 30 words"] > 100


def test_another_filter_is_another_dataset_and_none_is_as_before(tmp_path: Path) -> None:
    corpus(tmp_path / "a.jsonl", 100)
    plain = prepared(tmp_path)
    assert "filter" not in json.loads((plain.folder / "inputs.json").read_text())["settings"]
    with pytest.raises(DataError, match=r"filter.text.fewest_words was 'not set' and is 9"):
        prepared(tmp_path, filter={"fewest_words": 9})


def test_a_filter_that_leaves_nothing_is_answered(tmp_path: Path) -> None:
    corpus(tmp_path / "a.jsonl", 20)
    with pytest.raises(DataError, match=r"no record is left: 20 'text' under 999 words; correct"):
        prepared(tmp_path, filter={"fewest_words": 999})
    with pytest.raises(SettingsError, match="no field 'txt'; did you mean 'text'"):
        prepared(tmp_path, filter={"txt": {"fewest_words": 1}})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"fewest_word": 3}, "did you mean 'fewest_words'"),
        ({"title": {"fewest_word": 3}}, "did you mean 'fewest_words'"),
        ({"fewest_words": 9, "most_words": 3}, "no text has 9 words or more, and 3 or fewer"),
        ({"most_characters": 0}, "greater than or equal to 1"),
    ],
)
def test_impossible_limits_are_refused(
    tmp_path: Path, limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(tmp_path, filter=limits)
