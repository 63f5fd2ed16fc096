"""Byte-level BPE by `gigatoken`: the same ids as `tokenizers`, several times as fast.

`tokenizers` is slower because it tracks every byte's offset. Results are exact: `tokenizers` still
encodes texts with a character whose class differs between Unicode versions, and other kinds of
tokenizers.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = tuple(
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}|{OTHERS}"
    for number in (r"\p{N}{1,3}", r"\p{N}")
)
"""Llama 3 and Qwen 2 word splitting patterns."""
NORMALIZERS = (None, "NFC")
MODEL_FIELDS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
"""BPE model settings left out by byte-level tokenizers."""


class ByteLevelBpe:
    """Encodes texts with a byte-level BPE model; special tokens are plain text."""

    def __init__(self, document: dict[str, Any]) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._tokenizer = load_hf_json(json.dumps({**document, "added_tokens": []}))

    def encode(self, text: str) -> np.ndarray | None:
        """Return a text's ids, [tokens] int32; None if the library must encode it."""
        if not text.isascii() and _unstable_search()(text):
            return None
        ids: np.ndarray = self._tokenizer.encode(text)
        return ids.view(np.int32)


def build_byte_level_bpe(tokenizer: Tokenizer) -> ByteLevelBpe | None:
    """Return a fast encoder for a tokenizer, or None if it is not supported."""
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    model, normalizer = document["model"], document["normalizer"] or {}
    is_supported = (
        _splits_bytes(document["pre_tokenizer"] or {})
        and model["type"] == "BPE"
        and not any(model.get(field) for field in MODEL_FIELDS)
        and set(ByteLevel.alphabet()) <= model["vocab"].keys()
        and all(token["special"] for token in document["added_tokens"])
        and normalizer.get("type") in NORMALIZERS
    )
    return ByteLevelBpe(document) if is_supported else None


def _splits_bytes(splitter: dict[str, Any]) -> bool:
    """Return whether words are split by the GPT-2, Llama 3 or Qwen 2 pattern, then to bytes."""
    if splitter.get("type") == "ByteLevel":
        return bool(splitter.get("use_regex", True))
    first, *rest = splitter.get("pretokenizers") or [{}]
    if first.get("type") != "Split" or first["invert"] or first["behavior"] != "Isolated":
        return False
    return (
        first["pattern"].get("Regex") in PATTERNS
        and [step["type"] for step in rest] == ["ByteLevel"]
        and not rest[0].get("use_regex", True)
        and not rest[0]["add_prefix_space"]
    )


@cache
def _unstable_search() -> Callable[[str], Any]:
    """Return a search for characters whose class differs between Unicode versions."""
    stable = _format_ranges([code for code in range(0x10000) if _is_stable(chr(code))])
    return re.compile(f"[^{stable}]").search


def _is_stable(character: str) -> bool:
    """Return whether a character has its Unicode 3.2 (2002) class and is not a surrogate."""
    old_category, category = (
        unicodedata.ucd_3_2_0.category(character),
        unicodedata.category(character),
    )
    return old_category == category and category not in {"Cn", "Cs"}


def _format_ranges(codes: list[int]) -> str:
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in ranges)
