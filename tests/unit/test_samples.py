"""Texts that a program is proved on where nobody names any."""

from __future__ import annotations

import pytest

from regauge.inference.samples import EVERY, SIZES, samples
from regauge.models.inputs import Fields

COUNT = 64
WORDS = ("apple", "river", "zoo")


def test_documentation_is_read_where_nothing_else_is_known() -> None:
    found = samples(None, None, COUNT, Fields())
    [texts] = found.columns
    assert len(texts) == COUNT
    assert found.origin == "documentation of Python's library"


@pytest.mark.parametrize("fields", [Fields(), Fields(limits=(8, 8), texts=("a", "b"))])
def test_most_texts_are_words_of_the_vocabulary(fields: Fields) -> None:
    plain = samples(None, None, COUNT, Fields()).columns[0]
    found = samples(None, None, COUNT, fields, lambda: WORDS)
    assert found.columns == samples(None, None, COUNT, fields, lambda: WORDS).columns
    assert len(found.columns) == max(1, len(fields.texts))
    for texts in found.columns:
        assert texts[::EVERY] == plain[::EVERY]
        said = [text.split() for at, text in enumerate(texts) if at % EVERY]
        assert {word for words in said for word in words} == set(WORDS)
        assert {len(words) for words in said} == set(SIZES)
        assert len({tuple(words) for words in said if len(words) > 5}) > COUNT // 8
    assert "words of the vocabulary" in found.origin
