"""Counts and lists in message sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

MIN_COUNT = 10
"""The smallest whole number that is shown as a count; smaller ones may be fractions."""
MIN_DIGITS, MAX_DIGITS = 0.01, 1000
"""Numbers between them have three decimals."""
_SIBILANTS = ("s", "x", "ch", "sh")


def format_number(value: float) -> str:
    """Return a metric with three decimals; a count or a number from 1,000 has none.

    Numbers below 0.01 have four digits.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.3f}"
    size = abs(value)
    if size >= MAX_DIGITS or (size >= MIN_COUNT and float(value).is_integer()):
        return f"{value:,.0f}"
    return f"{value:.3f}" if size >= MIN_DIGITS else f"{value:.4g}"


def format_metric(name: str, value: float) -> str:
    """Return a metric as text; the number of items is a count, also below 10."""
    is_count = name.rpartition("/")[2] == "items" and float(value).is_integer()
    return f"{value:,.0f}" if is_count else format_number(value)


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 record`, `2 records`, `2,000 entries`."""
    return f"{number:,} {noun if number == 1 else pluralize(noun)}"


def format_clause(number: int, noun: str, verb: str) -> str:
    """Return a number with noun and verb: `1 record has`, `2 records have`.

    `verb` is the plural `are`, `have`, or any other verb in its base form.
    """
    singular = {"are": "is", "have": "has"}.get(verb, f"{verb}s")
    return f"{format_count(number, noun)} {singular if number == 1 else verb}"


def pluralize(noun: str) -> str:
    """Return the regular plural of an English noun; in a phrase, the last word changes."""
    if noun.endswith(_SIBILANTS):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def singularize(noun: str) -> str:
    """Reverse `pluralize`."""
    if noun.endswith("ies"):
        return f"{noun[:-3]}y"
    stem = noun.removesuffix("es")
    return stem if stem.endswith(_SIBILANTS) and stem != noun else noun.removesuffix("s")


def join_first(words: Sequence[object], max_words: int) -> str:
    """Return the first words of a list, and an ellipsis if there are more."""
    shown = ", ".join(map(str, words[:max_words]))
    return f"{shown}, …" if len(words) > max_words else shown


def join_alternatives(words: Iterable[str]) -> str:
    """Return words as alternatives: `a`, `a or b`, `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def normalize_key(word: str) -> str:
    """Return a flag or a key in lower case, with underscores."""
    return word.lstrip("-").replace("-", "_").lower()
