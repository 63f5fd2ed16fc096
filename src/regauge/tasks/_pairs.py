"""Rows of two pieces of text, of which the second is the row's own or that of another row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.data.batches import taken
from regauge.data.randomness import keyed
from regauge.data.row_order import PADDING
from regauge.tasks._fields import histogram, second, text_arrays

if TYPE_CHECKING:
    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.dataset import Manifest, Rows
    from regauge.data.loader import Facts

HALVES = ("first", "second")
APART, OTHER = -1, -2
"""What tells the draws of a row from each other, and from those of its tokens."""


def paired(rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
    """Return tokens and what belongs to them, `types`, and whether halves are `apart`, [batch].

    Types are 1 in second halves. Halves that follow one another are 0, others 1, as in BERT.
    """
    real = piece.rows >= 0
    others = np.full_like(piece.rows, PADDING)
    others[real] = partners(piece.rows[real], len(rows), draw)
    both = zip(taken(rows, piece.rows), taken(rows, others), strict=True)
    halves = [(own[HALVES[0]], other[HALVES[1]]) if own and other else None for own, other in both]
    texts = [None if pair is None else np.concatenate(pair) for pair in halves]
    arrays = text_arrays(texts, piece, draw, facts)
    types = second(arrays, [0 if pair is None else len(pair[0]) for pair in halves])
    apart = real & (others != piece.rows % len(rows))
    return {**arrays, "types": types, "apart": apart.astype(np.int64)}


def partners(
    numbers: np.ndarray,  # [rows], 0 or more
    count: int,
    draw: Draw,
) -> np.ndarray:  # [rows], 0 … count - 1
    """Return the row whose second half each row has: its own for about a half of them.

    A function of (seed, epoch, row) alone; a row that is the only one keeps its own.
    """
    own = numbers % count
    apart = keyed(draw.seed, draw.epoch, numbers, APART) % np.uint64(2)
    steps = keyed(draw.seed, draw.epoch, numbers, OTHER) % np.uint64(max(count - 1, 1))
    away = (apart * (steps + np.uint64(1))).astype(np.int64)
    return np.asarray((own + away) % count)


def length(manifest: Manifest) -> int:
    """Return the tokens of the longest row."""
    return sum(manifest.fields[name].limit for name in HALVES)


def real_share(manifest: Manifest) -> float:
    """Return the share of real tokens where every row is padded to the longest."""
    counts = [histogram(manifest, name) for name in HALVES]
    tokens = sum(int((np.arange(len(each)) * each).sum()) for each in counts)
    return tokens / max(length(manifest) * int(counts[0].sum()), 1)
