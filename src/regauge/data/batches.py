"""Arrays of one static shape out of rows of many lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.data.randomness import keyed
from regauge.data.row_order import PADDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.data.dataset import Rows

Arrays = dict[str, np.ndarray]
Found = list[dict[str, Any] | None]
"""Rows as they are stored; None where there is none."""


@dataclass(frozen=True)
class Draw:
    """What the randomness of a batch is keyed by."""

    seed: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Piece:
    """What one microbatch holds."""

    rows: np.ndarray
    """Row numbers, [batch]; PADDING where there is none."""
    parts: np.ndarray
    """Which text of its row each one is, [batch]; 0 where a row has one."""
    slots: np.ndarray
    """The place of each text in the global batch, [batch]."""
    length: int
    """Tokens that every text is padded to."""

    def emptied(self, length: int) -> Piece:
        """Return a piece of the same size with no row in it: weight 0."""
        rows = np.full_like(self.rows, PADDING)
        return Piece(rows, np.zeros_like(self.parts), np.zeros_like(self.slots), length)


def whole_rows(rows: np.ndarray, microbatch_rows: int, length: int) -> list[Piece]:
    """Cut a global batch [batch_rows] into pieces of whole rows, in order."""
    slots = np.arange(len(rows))
    pieces = zip(rows.reshape(-1, microbatch_rows), slots.reshape(-1, microbatch_rows), strict=True)
    return [Piece(ids, np.zeros_like(ids), places, length) for ids, places in pieces]


def taken(rows: Rows, numbers: np.ndarray) -> Found:
    """Return rows by number, and None for PADDING."""
    found = iter(rows.take(numbers[numbers >= 0]))
    return [next(found) if number >= 0 else None for number in numbers]


def padded(texts: Sequence[np.ndarray | None], length: int, fill: int) -> np.ndarray:
    """Return texts as [batch, length] int32; a missing text is all fill."""
    result = np.full((len(texts), length), fill, np.int32)
    for row, text in zip(result, texts, strict=True):
        if text is not None:
            row[: len(text)] = text
    return result


def positions(segments: np.ndarray) -> np.ndarray:
    """Return each token's place inside of its segment, [batch, length] int32."""
    places = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    starts = np.zeros(segments.shape, bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return (places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)).astype(np.int32)


def dropout_keys(piece: Piece, draw: Draw) -> np.ndarray:
    """Return one int32 key per text, from (seed, step, row, part)."""
    words = keyed(draw.seed, draw.step, piece.rows, piece.parts)
    return (words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
