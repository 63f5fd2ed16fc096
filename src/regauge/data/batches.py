"""Builds arrays with one fixed shape from rows of different lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.data.packing import pack_texts
from regauge.data.randomness import hash_keys
from regauge.data.row_order import PADDING

if TYPE_CHECKING:
    from regauge.data.dataset import DatasetRows

HASH_WORDS = 4
"""16-bit words per hash; a float represents each word exactly."""
Arrays = dict[str, np.ndarray]
OptionalRows = Sequence[dict[str, Any] | None]
"""Dataset rows; None where the row number is PADDING."""


@dataclass(frozen=True)
class RandomKey:
    """Key for a batch's random numbers."""

    seed: int
    epoch: int
    step: int


@dataclass(frozen=True)
class MicrobatchPlan:
    """The texts in one microbatch, and their padded length."""

    row_numbers: np.ndarray
    """Row number of each text, [batch]; PADDING for a missing text."""
    text_numbers: np.ndarray
    """Index of each text in its row, [batch]; 0 if rows have one text."""
    slots: np.ndarray
    """Index of each text in the global batch, [batch]."""
    length: int
    """Padded length of every text, in tokens."""

    def build_empty(self, length: int) -> MicrobatchPlan:
        """Return a plan with the same batch size but no rows; all weights are 0."""
        rows = np.full_like(self.row_numbers, PADDING)
        return MicrobatchPlan(
            rows, np.zeros_like(self.text_numbers), np.zeros_like(self.slots), length
        )


def plan_whole_rows(
    row_numbers: np.ndarray,  # [global batch]
    microbatch_rows: int,
    length: int,
) -> list[MicrobatchPlan]:
    """Split a global batch's row numbers into microbatches of whole rows, in order."""
    slots = np.arange(len(row_numbers))
    microbatches = zip(
        row_numbers.reshape(-1, microbatch_rows), slots.reshape(-1, microbatch_rows), strict=True
    )
    return [
        MicrobatchPlan(numbers, np.zeros_like(numbers), indices, length)
        for numbers, indices in microbatches
    ]


def take_rows(rows: DatasetRows, row_numbers: np.ndarray) -> OptionalRows:
    """Return the rows by number, and None for PADDING."""
    present_rows = iter(rows.take(row_numbers[row_numbers >= 0]))
    return [next(present_rows) if number >= 0 else None for number in row_numbers]


def pad_sequences(sequences: Sequence[np.ndarray | None], length: int, fill: int) -> np.ndarray:
    """Pad token sequences to one array, [batch, length] int32; None gives a row of `fill`."""
    padded = np.full((len(sequences), length), fill, np.int32)
    for row, sequence in zip(padded, sequences, strict=True):
        if sequence is not None:
            row[: len(sequence)] = sequence
    return padded


def hash_texts(texts: Sequence[np.ndarray | None]) -> np.ndarray:
    """Hash each text's tokens, [batch, HASH_WORDS] fp32; 0 for a missing text."""
    hashes = np.zeros((len(texts), HASH_WORDS), np.float32)
    for row, tokens in zip(hashes, texts, strict=True):
        if tokens is not None:
            content = tokens.astype("<i4").tobytes()
            digest = hashlib.blake2b(content, digest_size=2 * HASH_WORDS).digest()
            row[:] = np.frombuffer(digest, "<u2")
    return hashes


def build_position_ids(segments: np.ndarray) -> np.ndarray:
    """Return each token's position in its segment, [batch, length] int32."""
    columns = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    starts = np.zeros(segments.shape, bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return (columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)).astype(np.int32)


def build_packing(segments: np.ndarray) -> Arrays:
    """Return a text batch's `packed` and `places`, [batch, length]; empty if not worth it.

    `regauge.models.modules` describes them. A text is one segment.
    """
    texts = pack_texts(np.count_nonzero(segments, axis=1).tolist(), segments.shape[1])
    if texts is None:
        return {}
    packed = np.full((len(texts.rows), texts.length), -1, np.int64)
    for row, ranges in zip(packed, texts.rows, strict=True):
        numbers = np.concatenate([np.arange(text.start, text.stop) for text in ranges])
        row[: len(numbers)] = numbers
    places = np.zeros(segments.shape, np.int64)
    is_real = packed >= 0
    places.flat[packed[is_real]] = np.flatnonzero(is_real)
    return {"packed": packed, "places": places}


def build_dropout_keys(plan: MicrobatchPlan, key: RandomKey) -> np.ndarray:
    """Return one key per text, [batch] int32: a hash of seed, step, row number and text number."""
    words = hash_keys(key.seed, key.step, plan.row_numbers, plan.text_numbers)
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
