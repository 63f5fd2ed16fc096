"""The ids of a text from those of its words: what `tokenizers` gives, several times as fast.

A byte-level tokenizer cuts a text into words by a pattern and encodes each by itself. So a word
that was met before needs no second encoding, and cutting alone is cheap: the library carries the
place of every byte through all of it. Words that are new are encoded by the library's own model.

Nothing is guessed. A text with a character whose class differs between versions of Unicode, or one
that the library's normalizer would change, is left to the library; so is every tokenizer that is
made in another way.
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

MOST_WORDS = 2**18
"""Words that are remembered: some 40 MB."""
LONGEST = 64
"""Characters of a word that is remembered."""
PATTERN = (
    r"'(?:[stmd]|re|ve|ll)| ?[{letters}]+| ?[{numbers}]+| ?[^{others}]+"
    r"|[{spaces}]+(?![^{spaces}])|[{spaces}]+"
)
"""GPT-2's (Radford et al., 2019), which `ByteLevel` cuts by."""
SPACES = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000"
"""Unicode's White_Space."""
KEEPS: dict[str | None, Callable[[str], bool]] = {
    None: lambda _: True,
    "NFC": lambda text: unicodedata.is_normalized("NFC", text),
}
"""By the normalizer: whether it leaves a text as it is."""


class Remembered(dict[str, bytes]):
    """What words come to, computed when one is met first; the latest are remembered."""

    def __init__(self, computed: Callable[[str], bytes]) -> None:
        super().__init__()
        self._computed = computed

    def __missing__(self, word: str) -> bytes:
        found = self._computed(word)
        if len(word) <= LONGEST:
            if len(self) >= MOST_WORDS:
                self.clear()
            self[word] = found
        return found

    def joined(self, words: Iterable[str]) -> bytes:
        """Return what some words come to, one behind the other."""
        return b"".join(map(self.__getitem__, words))


class Words:
    """A tokenizer's words, with their ids."""

    def __init__(self, tokenizer: Tokenizer, *, prefix: str, normalizer: str | None) -> None:
        self._model = tokenizer.model
        self._prefix = prefix
        self._kept = KEEPS[normalizer]
        self.known = Remembered(self._encoded)

    def ids(self, text: str) -> np.ndarray | None:
        """Return the ids of a text, [tokens] int32; None for one that is left to the library."""
        if text.isascii():
            words = _ascii()
        elif _unsettled()(text) or not self._kept(text):
            return None
        else:
            words = _any()
        whole = text if text.startswith(" ") or not text else self._prefix + text
        return np.frombuffer(self.known.joined(words(whole)), dtype="<i4")

    def _encoded(self, word: str) -> bytes:
        letters = _letters_of_bytes()
        found = self._model.tokenize("".join(letters[byte] for byte in word.encode()))
        return np.array([token.id for token in found], dtype="<i4").tobytes()


def words_of(tokenizer: Tokenizer) -> Words | None:
    """Return the words of a tokenizer that works as described above; None for any other."""
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    cutter, model, normalizer = made["pre_tokenizer"] or {}, made["model"], made["normalizer"] or {}
    fitting = (
        cutter.get("type") == "ByteLevel"
        and cutter.get("use_regex", True)
        and model["type"] == "BPE"
        and not model.get("dropout")
        and all(token["special"] for token in made["added_tokens"])
        and normalizer.get("type") in KEEPS
    )
    if not fitting:
        return None
    prefix = " " if cutter["add_prefix_space"] else ""
    return Words(tokenizer, prefix=prefix, normalizer=normalizer.get("type"))


@cache
def _letters_of_bytes() -> list[str]:
    """Return the character that stands for each byte, as GPT-2 has it: itself where it prints."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(0x100)]


@cache
def _ascii() -> Callable[[str], list[str]]:
    return _cutting("A-Za-z", "0-9", "\\t-\\r ")


@cache
def _any() -> Callable[[str], list[str]]:
    return _cutting(_class("L"), _class("N"), SPACES)


def _cutting(letters: str, numbers: str, spaces: str) -> Callable[[str], list[str]]:
    classes = {"letters": letters, "numbers": numbers, "spaces": spaces}
    return re.compile(PATTERN.format(**classes, others="".join(classes.values()))).findall


@cache
def _unsettled() -> Callable[[str], Any]:
    """Return a search for characters of which versions of Unicode may disagree."""
    settled = _ranges([place for place in range(0x10000) if _settled(chr(place))])
    return re.compile(f"[^{settled}]").search


def _settled(character: str) -> bool:
    """Return whether a character is as it was in Unicode 3.2, of 2002; surrogates never are."""
    then, now = unicodedata.ucd_3_2_0.category(character), unicodedata.category(character)
    return then == now and now not in {"Cn", "Cs"}


def _class(kind: str) -> str:
    """Return the settled characters of a kind as ranges of a pattern."""
    places = [place for place in range(0x10000) if unicodedata.category(chr(place))[0] == kind]
    return _ranges([place for place in places if _settled(chr(place))])


def _ranges(places: list[int]) -> str:
    found: list[list[int]] = []
    for place in places:
        if found and place == found[-1][1] + 1:
            found[-1][1] = place
        else:
            found.append([place, place])
    return "".join(f"\\u{first:04x}-\\u{last:04x}" for first, last in found)
