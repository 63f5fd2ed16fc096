"""Counts and lists in the sentences of messages."""

from __future__ import annotations

from collections.abc import Iterable

_SIBILANTS = ("s", "x", "ch", "sh")


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 record`, `2 records`, `2,000 entries`."""
    return f"{number:,} {noun if number == 1 else pluralize(noun)}"


def format_clause(number: int, noun: str, verb: str) -> str:
    """Return a number with its noun and verb: `1 record has`, `2 records have`.

    `verb` is the plural `are`, `have`, or any other verb in its base form.
    """
    singular = {"are": "is", "have": "has"}.get(verb, f"{verb}s")
    return f"{format_count(number, noun)} {singular if number == 1 else verb}"


def pluralize(noun: str) -> str:
    """Return the regular plural of an English noun; of several words, the last one changes."""
    if noun.endswith(_SIBILANTS):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def singularize(noun: str) -> str:
    """Return the singular of a plural that `pluralize` builds."""
    if noun.endswith("ies"):
        return f"{noun[:-3]}y"
    stem = noun.removesuffix("es")
    return stem if stem.endswith(_SIBILANTS) and stem != noun else noun.removesuffix("s")


def join_alternatives(words: Iterable[str]) -> str:
    """Return words as alternatives: `a`, `a or b`, `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
