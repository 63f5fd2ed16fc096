"""Near-duplicates: which records say almost the same, so that no such pair straddles a split.

MinHash signatures of word shingles; locality-sensitive bands propose pairs, the signatures verify
them, and what is linked is one cluster (Broder 1997; Leskovec, Rajaraman and Ullman, chapter 3).
Everything is arithmetic on 64-bit integers: the same on every machine. The signatures stay in the
files that hold them; what is in memory is about 200 bytes for each record.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

HASHES = 128
"""Values in a signature: the standard error of a similarity is at most 0.044."""
BANDS = 32
"""Bands of 4 values: two records of similarity 0.7 meet in one with probability 0.9998."""
SHINGLE = 3
"""Words in a shingle."""
HASH_BYTES = 16
SIGNATURE_BYTES = HASHES * 4
_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True)
_WORD = re.compile(r"\w+")
_SMALL = "".join(
    char.lower() if _WORD.match(char) else " " for char in map(chr, range(256))
).encode("latin-1")
"""For each byte of ASCII what stands for it; the others do not occur."""
_PAIRS_AT_A_TIME = 2**16
_BANDS_AT_A_TIME = 4
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
_RANDOM = np.frombuffer(hashlib.shake_128(b"regauge minhash").digest(HASHES * 16), dtype="<u8")
_FACTORS, _OFFSETS = _RANDOM[:HASHES] | np.uint64(1), _RANDOM[HASHES:]


def whole_text(fields: Mapping[str, str | int | float]) -> str:
    """Return every text of a record once: one that is part of a longer one adds nothing."""
    texts = sorted((value for value in fields.values() if isinstance(value, str)), key=len)
    whole = ""
    for text in reversed(texts):
        if text not in whole:
            whole += f"\n\n{text}" if whole else text
    return whole


def content(fields: Mapping[str, str | int | float]) -> str:
    """Return fields as JSON in one order, the same for equal fields."""
    return _JSON.encode(fields)


def content_hash(content: str) -> bytes:
    """Return the 16 bytes that stand for a content; raises UnicodeEncodeError for no text."""
    return hashlib.blake2b(content.encode(), digest_size=HASH_BYTES).digest()


def signatures(texts: Sequence[str]) -> np.ndarray:  # [texts, HASHES] uint32
    """Return the MinHash signature of every text."""
    every, starts = _shingles(texts)
    result = np.empty((len(texts), HASHES), dtype=np.uint32)
    for number, (factor, offset) in enumerate(zip(_FACTORS, _OFFSETS, strict=True)):
        hashed = (every * factor + offset) >> np.uint64(32)
        result[:, number] = np.minimum.reduceat(hashed, starts)
    return result


class Signatures:
    """The signatures of all records, in parts that may be mapped files."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:  # [records of it, HASHES] uint32
        self._parts = [part for part in parts if len(part)]
        self._starts = np.cumsum([0] + [len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, numbers: np.ndarray) -> np.ndarray:  # [numbers, HASHES] uint32
        """Return the signatures of some records."""
        found = np.empty((len(numbers), HASHES), dtype=np.uint32)
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        order = np.argsort(owners, kind="stable")
        cuts = np.flatnonzero(np.diff(owners[order], prepend=-1, append=-1))
        for start, stop in pairwise(cuts.tolist()):
            some = order[start:stop]
            owner = owners[some[0]]
            found[some] = self._parts[owner][numbers[some] - self._starts[owner]]
        return found

    def band_keys(self, bands: Sequence[int]) -> np.ndarray:  # [bands, records] uint64
        """Return a number for the values of each record in some bands."""
        width = HASHES // BANDS
        keys = np.zeros((len(bands), len(self)), dtype=np.uint64)
        for start, part in zip(self._starts.tolist(), self._parts, strict=False):
            for row, band in enumerate(bands):
                mine = keys[row, start : start + len(part)]
                for place in range(width):
                    mine ^= part[:, band * width + place]
                    mine *= _MIX[place % len(_MIX)]
                    mine ^= mine >> np.uint64(31)
        return keys


def clusters(signed: Signatures, similarity: float) -> np.ndarray:  # [records] int64
    """Return for every record the lowest number of a record in its cluster."""
    labels = np.arange(len(signed))
    for first, second in _proposed(signed):
        apart = labels[first] != labels[second]
        alike = _verified(signed, first[apart], second[apart], similarity)
        labels = _linked(labels, *alike)
    return labels


def representatives(
    labels: np.ndarray,  # [records] int64
    hashes: np.ndarray,  # [records, HASH_BYTES] uint8
) -> np.ndarray:  # [records] int64
    """Return for every record the one with the smallest content hash in its cluster."""
    order = np.lexsort((*_as_numbers(hashes), labels))
    return _firsts(order, np.diff(labels[order], prepend=-1) != 0)


def equal(hashes: np.ndarray) -> np.ndarray:  # [records, HASH_BYTES] uint8 -> [records] int64
    """Return for every record the lowest number of a record with the same content."""
    low, high = _as_numbers(hashes)
    order = np.lexsort((low, high))
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
    return _firsts(order, begins)


def _firsts(order: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return for every record the first of its group; groups begin at these places of the order."""
    starts = np.flatnonzero(begins)
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.repeat(order[starts], np.diff(starts, append=len(order)))
    return found


def _as_numbers(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the later and the earlier half of each hash, which sort as its bytes do."""
    halves = hashes.view(">u8").astype(np.uint64)
    return halves[:, 1], halves[:, 0]


def keyed_share(content: bytes, seed: int, purpose: str) -> float:
    """Return a number in [0, 1) that depends on nothing but these three."""
    key = f"{purpose} {seed}".encode()
    digest = hashlib.blake2b(content, digest_size=8, key=key).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _shingles(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of runs of words, text by text, and where each text's begin.

    A text with fewer words than a run has is a single one.
    """
    words = [_words(text) for text in texts]
    words = [found + [b""] * (SHINGLE - len(found)) for found in words]
    counts = np.array([len(found) for found in words])
    hashed = np.fromiter(map(zlib.crc32, chain.from_iterable(words)), np.uint64, counts.sum())
    total = np.zeros(len(hashed) - SHINGLE + 1, dtype=np.uint64)
    for place, factor in enumerate(_MIX):
        total = (total ^ hashed[place : place + len(total)]) * factor
        total ^= total >> np.uint64(29)
    within = np.ones(len(hashed), dtype=bool)
    ends = np.cumsum(counts)
    for place in range(1, SHINGLE):  # a run that begins here would reach into the next text
        within[ends - place] = False
    runs = counts - SHINGLE + 1
    return total[within[: len(total)]], np.cumsum(runs) - runs


def _words(text: str) -> list[bytes]:
    """Return the words of a text in small letters; a pattern takes three times as long."""
    if text.isascii():
        return text.encode().translate(_SMALL).split()
    return [word.encode() for word in _WORD.findall(text.lower())]


def _proposed(signed: Signatures) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs that agree in a band: each record with its neighbour and its bucket's first."""
    for start in range(0, BANDS, _BANDS_AT_A_TIME):
        bands = [band % BANDS for band in range(start, start + _BANDS_AT_A_TIME + 1)]
        for key, next_key in pairwise(signed.band_keys(bands)):
            order = np.lexsort((next_key, key))
            same = np.concatenate([[False], key[order[1:]] == key[order[:-1]]])
            heads = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
            members = np.flatnonzero(same)
            yield order[members], order[members - 1]
            yield order[members], order[heads[members]]


def _verified(
    signed: Signatures, first: np.ndarray, second: np.ndarray, similarity: float
) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.zeros(len(first), dtype=bool)
    for at in range(0, len(first), _PAIRS_AT_A_TIME):
        some = slice(at, at + _PAIRS_AT_A_TIME)
        same = signed.take(first[some]) == signed.take(second[some])
        chosen[some] = same.mean(axis=1) >= similarity
    return first[chosen], second[chosen]


def _linked(labels: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the labels with linked records in one cluster: hook to the lower, then shorten."""
    while (labels[first] != labels[second]).any():
        lower = np.minimum(labels[first], labels[second])
        np.minimum.at(labels, labels[first], lower)
        np.minimum.at(labels, labels[second], lower)
        while (labels != labels[labels]).any():
            labels = labels[labels]
    return labels
