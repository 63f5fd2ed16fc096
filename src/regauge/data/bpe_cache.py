"""Cached byte-level BPE: the ids of `tokenizers`, computed several times as fast from cached words.

A byte-level tokenizer splits a text into words by a pattern and encodes each word independently.
The ids of a word can therefore be cached. Splitting alone is fast; the library is slower because it
tracks the offset of every byte. New words are encoded by the library's model.

The results are exact. A text is left to the library if its normalizer would change it. The same
holds for a character whose class differs between versions of Unicode. Tokenizers of another
construction are not cached at all.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_WORDS = 2**18
"""Maximum number of cached words: about 40 MB."""
MAX_WORD_LENGTH = 64
"""Maximum length of a cached word in characters."""
PATTERN = (
    r"'(?:[stmd]|re|ve|ll)| ?[{letters}]+| ?[{numbers}]+| ?[^{others}]+"
    r"|[{spaces}]+(?![^{spaces}])|[{spaces}]+"
)
"""The pattern of GPT-2 (Radford et al., 2019) that `ByteLevel` splits by."""
SPACES = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
"""The Unicode property White_Space."""
IS_NORMALIZED: dict[str | None, Callable[[str], bool]] = {
    None: lambda _: True,
    "NFC": lambda text: unicodedata.is_normalized("NFC", text),
}
"""By normalizer: a function that returns whether the normalizer leaves a text unchanged."""


class WordCache(dict[str, bytes]):
    """A cache of the encoded ids of words; it is cleared when it is full."""

    def __init__(self, encode_word: Callable[[str], bytes]) -> None:
        super().__init__()
        self._encode_word = encode_word

    def __missing__(self, word: str) -> bytes:
        ids = self._encode_word(word)
        if len(word) <= MAX_WORD_LENGTH:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode_words(self, words: Iterable[str]) -> bytes:
        """Return the concatenated ids of words."""
        return b"".join(map(self.__getitem__, words))


class CachedBpe:
    """Encodes texts with the model of a byte-level BPE tokenizer and a cache of words."""

    def __init__(self, tokenizer: Tokenizer, *, prefix: str, normalizer: str | None) -> None:
        self._model = tokenizer.model
        self._prefix = prefix
        self._is_normalized = IS_NORMALIZED[normalizer]
        self.cache = WordCache(self._encode_new_word)

    def encode(self, text: str) -> np.ndarray | None:
        """Return the ids of a text, [tokens] int32; None if the library must encode it."""
        if text.isascii():
            split_words = _ascii_splitter()
        elif _unstable_search()(text) or not self._is_normalized(text):
            return None
        else:
            split_words = _unicode_splitter()
        prefixed = text if text.startswith(" ") or not text else self._prefix + text
        return np.frombuffer(self.cache.encode_words(split_words(prefixed)), dtype="<i4")

    def _encode_new_word(self, word: str) -> bytes:
        characters = _byte_characters()
        tokens = self._model.tokenize("".join(characters[byte] for byte in word.encode()))
        return np.array([token.id for token in tokens], dtype="<i4").tobytes()


def build_cached_bpe(tokenizer: Tokenizer) -> CachedBpe | None:
    """Return a cached encoder for a tokenizer, or None if its construction is not supported."""
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    splitter, model = document["pre_tokenizer"] or {}, document["model"]
    normalizer = document["normalizer"] or {}
    is_supported = (
        splitter.get("type") == "ByteLevel"
        and splitter.get("use_regex", True)
        and model["type"] == "BPE"
        and not model.get("dropout")
        and all(token["special"] for token in document["added_tokens"])
        and normalizer.get("type") in IS_NORMALIZED
    )
    if not is_supported:
        return None
    prefix = " " if splitter["add_prefix_space"] else ""
    return CachedBpe(tokenizer, prefix=prefix, normalizer=normalizer.get("type"))


@cache
def _byte_characters() -> list[str]:
    """Return the character of each byte, as in GPT-2: a printable byte is its own character."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(0x100)]


@cache
def _ascii_splitter() -> Callable[[str], list[str]]:
    return _compile_splitter("A-Za-z", "0-9", "\\t-\\r ")


@cache
def _unicode_splitter() -> Callable[[str], list[str]]:
    return _compile_splitter(_build_class("L"), _build_class("N"), SPACES)


def _compile_splitter(letters: str, numbers: str, spaces: str) -> Callable[[str], list[str]]:
    classes = {"letters": letters, "numbers": numbers, "spaces": spaces}
    return re.compile(PATTERN.format(**classes, others="".join(classes.values()))).findall


@cache
def _unstable_search() -> Callable[[str], Any]:
    """Return a search for characters whose class differs between versions of Unicode."""
    stable = _format_ranges([code for code in range(0x10000) if _is_stable(chr(code))])
    return re.compile(f"[^{stable}]").search


def _is_stable(character: str) -> bool:
    """Return whether a character's class is the same as in Unicode 3.2 (2002), and no surrogate."""
    old_category, category = (
        unicodedata.ucd_3_2_0.category(character),
        unicodedata.category(character),
    )
    return old_category == category and category not in {"Cn", "Cs"}


def _build_class(category: str) -> str:
    """Return the stable characters of a category as ranges of a pattern."""
    codes = [code for code in range(0x10000) if unicodedata.category(chr(code))[0] == category]
    return _format_ranges([code for code in codes if _is_stable(chr(code))])


def _format_ranges(codes: list[int]) -> str:
    ranges: list[list[int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in ranges)
