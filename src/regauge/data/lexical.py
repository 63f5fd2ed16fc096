"""Words of a text for lexical search (BM25)."""

from __future__ import annotations

import re

WORD = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return WORD.findall(text.lower())
