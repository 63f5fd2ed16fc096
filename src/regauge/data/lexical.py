"""Splits text into words, for lexical search (BM25) and near-duplicate detection."""

from __future__ import annotations

import re

SPACELESS = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u0f00-\u109f"  # Tibetan, Myanmar
    "\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u1b00-\u1b7f"  # Khmer, Tai, Balinese
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3038-\u30ff"  # Han, kana
    "\u3100-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"  # Bopomofo, Han
    "\ua000-\ua4cf\ua980-\ua9ff\uaa60-\uaadf"  # Yi, Javanese, Myanmar, Tai Viet
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"  # compatibility forms, Han
)
"""Characters in scripts without spaces between words: the ID and SA classes in Unicode Standard
Annex 14. Each counts as a word."""
WORD = re.compile(rf"[{SPACELESS}]|[^\W{SPACELESS}]+")


def split_words(text: str) -> list[str]:
    return WORD.findall(text.lower())
