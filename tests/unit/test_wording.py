"""Counts and lists read as English."""

from __future__ import annotations

import pytest

from regauge.system.wording import (
    format_clause,
    format_count,
    join_alternatives,
    join_first,
    pluralize,
    singularize,
)


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (0, "record", "0 records"),
        (1, "record", "1 record"),
        (2, "record", "2 records"),
        (1234, "held-out row", "1,234 held-out rows"),
        (2, "entry", "2 entries"),
        (2, "key", "2 keys"),
        (2, "batch", "2 batches"),
        (2, "process", "2 processes"),
        (1, "process", "1 process"),
    ],
)
def test_a_count_agrees_with_its_noun(number: int, noun: str, expected: str) -> None:
    assert format_count(number, noun) == expected


def test_a_verb_agrees_with_its_count() -> None:
    assert format_clause(1, "record", "are") == "1 record is"
    assert format_clause(2, "record", "have") == "2 records have"
    assert format_clause(1, "process", "start") == "1 process starts"


@pytest.mark.parametrize(
    "noun", ["task", "strategy", "source", "layout", "tracker", "process", "match", "box", "verb"]
)
def test_a_plural_has_its_singular(noun: str) -> None:
    assert singularize(pluralize(noun)) == noun


def test_alternatives_are_joined_by_or() -> None:
    assert join_alternatives(["a"]) == "a"
    assert join_alternatives(["a", "b"]) == "a or b"
    assert join_alternatives(["a", "b", "c"]) == "a, b or c"


@pytest.mark.parametrize(
    ("words", "text"),
    [([], ""), (["a"], "a"), ([1, 2], "1, 2"), (["a", "b", "c"], "a, b, …")],
)
def test_long_lists_end_with_an_ellipsis(words: list[object], text: str) -> None:
    assert join_first(words, 2) == text
