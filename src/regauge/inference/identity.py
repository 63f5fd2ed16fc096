"""Which batch sizes give a text the same bits as any other: found by computing, and written down.

A library may compute a product in another order where it has other sizes. So of every rung those
numbers of rows are kept in which each text, wherever it stands and beside whichever others, comes
out as it does in the largest batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from regauge.data.randomness import keyed
from regauge.inference.manifest import Rung
from regauge.inference.rows import Rows
from regauge.inference.shapes import Batch, halves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.backends import Runner

WORDS = 1000
"""Ids that texts are made of, beyond which no vocabulary has special tokens alone."""


class Shown(NamedTuple):
    """The rungs with the rows that may be chosen from, and how many texts showed it."""

    rungs: tuple[Rung, ...]
    texts: int


def shown(runner: Runner, rungs: Sequence[Rung], vocabulary: int) -> Shown | None:
    """Return what was found of a runner, or None where not even one size keeps a text's bits."""
    found, count, shortest = [], 0, 1
    for rung in rungs:
        most = rung.rows[0]
        ids = _made(most, shortest, rung.length, vocabulary)
        whole = _computed(runner, rung.length, most, ids)
        turned = _computed(runner, rung.length, most, ids[::-1])[::-1]
        if not np.array_equal(whole, turned):
            return None
        rows = [size for size in halves(most) if _same(runner, rung.length, size, ids, whole)]
        found.append(Rung(length=rung.length, rows=tuple(rows)))
        count += most
        shortest = rung.length + 1
    return Shown(tuple(found), count)


def _same(runner: Runner, length: int, size: int, ids: list[np.ndarray], whole: np.ndarray) -> bool:
    """Return whether texts come out of a batch of a size as they do out of the largest.

    They are some from the middle, the last of them first: each stands elsewhere than there.
    """
    at = (len(ids) - size) // 2
    part = _computed(runner, length, size, ids[at : at + size][::-1])
    return bool(np.array_equal(part[::-1], whole[at : at + size]))


def _computed(runner: Runner, length: int, rows: int, ids: Sequence[np.ndarray]) -> np.ndarray:
    batch = Batch(length, rows, np.arange(len(ids)))
    with torch.no_grad():
        output = runner(*Rows.of(ids).inputs(batch))
    found: np.ndarray = output[: len(ids)].float().cpu().numpy().copy()
    return found


def _made(count: int, shortest: int, longest: int, vocabulary: int) -> list[np.ndarray]:
    """Return texts of a rung, keyed: each length from the shortest on, in turn."""
    words = min(WORDS, vocabulary)
    lengths = [longest - number % (longest - shortest + 1) for number in range(count)]
    places = np.arange(longest, dtype=np.uint64)
    return [
        (keyed(number, places[:length]) % np.uint64(words)).astype(np.int32)
        + np.int32(vocabulary - words)
        for number, length in enumerate(lengths)
    ]
