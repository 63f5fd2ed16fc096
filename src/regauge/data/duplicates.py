"""Near-duplicate detection: clusters similar records, so that no cluster is in two splits.

Compares the texts that rows read. Equal texts have equal hashes, whatever other fields a record
has, and similar ones have similar MinHash signatures of their word shingles. Locality-sensitive
bands propose pairs, and the signatures verify them. Linked pairs form clusters (Broder 1997;
Leskovec, Rajaraman and Ullman, chapter 3).

All arithmetic is on 64-bit integers, so results are the same on every machine. Signatures stay in
memory-mapped files; about 200 bytes per record are in memory.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
import zlib
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from regauge.data.conversations import ANSWER_KEYS, TOOL_FIELDS
from regauge.data.lexical import WORD, split_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from regauge.data.values import Value

HASHES = 128
"""Values per signature; the standard error of a similarity is at most 0.044."""
BANDS = 32
"""Bands of 4 values; two records with similarity 0.7 agree in one with probability 0.9998."""
SHINGLE = 3
"""Words per shingle; in scripts without spaces, characters."""
HASH_BYTES = 16
SIGNATURE_BYTES = HASHES * 4
_JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True)
_LOWERCASE_TABLE = "".join(
    char.lower() if WORD.match(char) else " " for char in map(chr, range(256))
).encode("latin-1")
"""Translates ASCII bytes to lower case, and anything but letters, digits and `_` to a space."""
_PAIRS_PER_BATCH = 2**16
_BANDS_PER_BATCH = 4
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], dtype=np.uint64)
_RANDOM = np.frombuffer(hashlib.shake_128(b"regauge minhash").digest(HASHES * 16), dtype="<u8")
_FACTORS, _OFFSETS = _RANDOM[:HASHES] | np.uint64(1), _RANDOM[HASHES:]


def join_texts(fields: Mapping[str, Value]) -> str:
    """Join all texts in a record, including those in nested values.

    Leaves out a text contained in a longer one.
    """
    texts = [value for value in fields.values() if isinstance(value, str)]
    if any(isinstance(value, list | dict) for value in fields.values()):
        texts = [text for value in fields.values() for text in _list_texts(value)]
    if len(texts) == 1:
        return texts[0]
    texts.sort(key=len)
    joined = ""
    for text in reversed(texts):
        if text not in joined:
            joined += f"\n\n{text}" if joined else text
    return joined


def join_compared_texts(fields: Mapping[str, Value]) -> str:
    """Join the texts by which records are compared, whatever their order, case and white space.

    Leaves out tool schemas, which many conversations share, and message keys such as ids.
    """
    values = [
        _drop_metadata(value)
        for name, value in fields.items()
        if name not in TOOL_FIELDS or isinstance(value, str)
    ]
    texts = [_normalize(text) for value in values for text in _list_texts(value)]
    return "\n".join(sorted(filter(None, texts), key=lambda text: (len(text), text)))


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _drop_metadata(value: Value) -> Value:
    """Return a value whose messages have only the keys that a model generates."""
    if isinstance(value, list):
        return [_drop_metadata(item) for item in value]
    if isinstance(value, dict) and "role" in value:
        return {key: value[key] for key in ANSWER_KEYS if key in value}
    return value


def _list_texts(value: Value) -> Iterator[str]:
    """Yield all texts in a value; a list of words is one text."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        yield " ".join(value)
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _list_texts(item)


def encode_fields(fields: Mapping[str, Value]) -> str:
    """Return fields as JSON with sorted keys, so that equal fields give equal strings."""
    return _JSON.encode(fields)


def hash_content(content: str) -> bytes:
    """Return a string's 16-byte hash; raises UnicodeEncodeError for a lone surrogate."""
    return hashlib.blake2b(content.encode(), digest_size=HASH_BYTES).digest()


def compute_signatures(texts: Sequence[str]) -> np.ndarray:  # [texts, HASHES] uint32
    """Return each text's MinHash signature."""
    shingles, starts = _hash_shingles(texts)
    smallest = np.empty((HASHES, len(texts)), dtype=np.uint64)
    hashed = np.empty_like(shingles)
    for row, factor, offset in zip(smallest, _FACTORS, _OFFSETS, strict=True):
        np.multiply(shingles, factor, out=hashed)
        np.add(hashed, offset, out=hashed)
        np.minimum.reduceat(hashed, starts, out=row)
    # The upper halves have the order of the hashes.
    return np.ascontiguousarray((smallest >> np.uint64(32)).astype(np.uint32).T)


class SignatureTable:
    """All records' signatures, in parts that may be memory-mapped files."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:  # [records of the part, HASHES]
        self._parts = [part for part in parts if len(part)]
        self._starts = np.cumsum([0] + [len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, numbers: np.ndarray) -> np.ndarray:  # [numbers, HASHES] uint32
        signatures = np.empty((len(numbers), HASHES), dtype=np.uint32)
        parts = np.searchsorted(self._starts, numbers, side="right") - 1
        by_part = np.argsort(parts, kind="stable")
        boundaries = np.flatnonzero(np.diff(parts[by_part], prepend=-1, append=-1))
        for start, stop in pairwise(boundaries.tolist()):
            selection = by_part[start:stop]
            part = parts[selection[0]]
            signatures[selection] = self._parts[part][numbers[selection] - self._starts[part]]
        return signatures

    def band_keys(self, bands: Sequence[int]) -> np.ndarray:  # [bands, records] uint64
        """Hash each record's values in each of the given bands to a key."""
        width = HASHES // BANDS
        keys = np.zeros((len(bands), len(self)), dtype=np.uint64)
        for start, part in zip(self._starts.tolist(), self._parts, strict=False):
            for row, band in enumerate(bands):
                part_keys = keys[row, start : start + len(part)]
                for index in range(width):
                    part_keys ^= part[:, band * width + index]
                    part_keys *= _MIX[index % len(_MIX)]
                    part_keys ^= part_keys >> np.uint64(31)
        return keys


def find_clusters(signatures: SignatureTable, similarity: float) -> np.ndarray:  # [records] int64
    """Return the lowest record number in each record's cluster."""
    labels = np.arange(len(signatures))
    for first, second in _propose_pairs(signatures):
        is_unlinked = labels[first] != labels[second]
        linked_pairs = _verify_pairs(
            signatures, first[is_unlinked], second[is_unlinked], similarity
        )
        labels = link(labels, *linked_pairs)
    return labels


def find_representatives(
    labels: np.ndarray,  # [records] int64
    hashes: np.ndarray,  # [records, HASH_BYTES] uint8
) -> np.ndarray:  # [records] int64
    """Return for each record the one in the cluster with the smallest content hash."""
    order = np.lexsort((*_split_hashes(hashes), labels))
    return _select_firsts(order, np.diff(labels[order], prepend=-1) != 0)


def find_equal_records(
    hashes: np.ndarray,  # [records, HASH_BYTES] uint8
) -> np.ndarray:  # [records] int64
    """Return for each record the lowest number of a record with the same content."""
    low, high = _split_hashes(hashes)
    order = np.lexsort((low, high))
    is_start = np.ones(len(order), dtype=bool)
    is_start[1:] = (np.diff(high[order]) != 0) | (np.diff(low[order]) != 0)
    return _select_firsts(order, is_start)


def _select_firsts(order: np.ndarray, is_start: np.ndarray) -> np.ndarray:
    """Return for each record the first in the group; groups start at `is_start` in `order`."""
    starts = np.flatnonzero(is_start)
    firsts = np.empty(len(order), dtype=np.int64)
    firsts[order] = np.repeat(order[starts], np.diff(starts, append=len(order)))
    return firsts


def _split_hashes(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each hash's second and first half, as integers that sort like its bytes."""
    halves = hashes.view(">u8").astype(np.uint64)
    return halves[:, 1], halves[:, 0]


def draw_uniform(content: bytes, seed: int, purpose: str) -> float:
    """Return a number in [0, 1) that is a pure function of content, seed and purpose."""
    key = f"{purpose} {seed}".encode()
    digest = hashlib.blake2b(content, digest_size=8, key=key).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _hash_shingles(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all word shingles, text by text, and the index of each text's first one.

    Texts with fewer words than a shingle are padded to a single one.
    """
    words = [_split_words(text) for text in texts]
    words = [text_words + [b""] * (SHINGLE - len(text_words)) for text_words in words]
    counts = np.array([len(text_words) for text_words in words])
    hashed = np.fromiter(map(zlib.crc32, chain.from_iterable(words)), np.uint64, counts.sum())
    total = np.zeros(len(hashed) - SHINGLE + 1, dtype=np.uint64)
    for index, factor in enumerate(_MIX):
        total = (total ^ hashed[index : index + len(total)]) * factor
        total ^= total >> np.uint64(29)
    is_inside = np.ones(len(hashed), dtype=bool)
    ends = np.cumsum(counts)
    for index in range(1, SHINGLE):  # a shingle that starts here would reach into the next text
        is_inside[ends - index] = False
    num_shingles = counts - SHINGLE + 1
    return total[is_inside[: len(total)]], np.cumsum(num_shingles) - num_shingles


def _split_words(text: str) -> list[bytes]:
    """Return a text's words in lower case, or the characters of a text without words.

    For ASCII, a table is three times as fast as a pattern.
    """
    if text.isascii():
        words = text.encode().translate(_LOWERCASE_TABLE).split()
    else:
        words = [word.encode() for word in split_words(text)]
    return words or [character.encode() for character in text if not character.isspace()]


def _propose_pairs(signatures: SignatureTable) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs with an equal band: each record with its neighbor and the bucket's first."""
    for start in range(0, BANDS, _BANDS_PER_BATCH):
        bands = [band % BANDS for band in range(start, start + _BANDS_PER_BATCH + 1)]
        for key, next_key in pairwise(signatures.band_keys(bands)):
            order = _sort_repeated(key, next_key)
            is_repeated = np.concatenate([[False], key[order[1:]] == key[order[:-1]]])
            heads = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(order))))
            members = np.flatnonzero(is_repeated)
            yield order[members], order[members - 1]
            yield order[members], order[heads[members]]


def _sort_repeated(key: np.ndarray, next_key: np.ndarray) -> np.ndarray:
    """Return the records whose key occurs again, by key, next key and number."""
    order = np.argsort(key)
    is_equal = np.diff(key[order]) == 0
    is_repeated = np.zeros(len(order), dtype=bool)
    is_repeated[1:] |= is_equal
    is_repeated[:-1] |= is_equal
    records = np.sort(order[is_repeated])
    return records[np.lexsort((next_key[records], key[records]))]


def _verify_pairs(
    signatures: SignatureTable, first: np.ndarray, second: np.ndarray, similarity: float
) -> tuple[np.ndarray, np.ndarray]:
    is_similar = np.zeros(len(first), dtype=bool)
    for start in range(0, len(first), _PAIRS_PER_BATCH):
        batch = slice(start, start + _PAIRS_PER_BATCH)
        is_equal = signatures.take(first[batch]) == signatures.take(second[batch])
        is_similar[batch] = is_equal.mean(axis=1) >= similarity
    return first[is_similar], second[is_similar]


def link(labels: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return labels with linked records in one cluster: hook to the lower, shorten paths."""
    while (labels[first] != labels[second]).any():
        lower = np.minimum(labels[first], labels[second])
        np.minimum.at(labels, labels[first], lower)
        np.minimum.at(labels, labels[second], lower)
        while (labels != labels[labels]).any():
            labels = labels[labels]
    return labels
