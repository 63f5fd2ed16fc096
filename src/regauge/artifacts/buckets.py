"""The ladder of an artifact, and the batches that rows of texts are computed in.

A text's length alone says which rung it is computed on, so that its padding never depends on the
texts beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from regauge.artifacts.manifest import Rung

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.artifacts.export_settings import Shapes

STEPS = ((32, 2), (64, 4), (128, 8), (256, 16), (512, 32), (1 << 30, 64))
"""Up to which length the rungs of a symbolic graph are how far apart."""
BEGINNING = 2
"""Rows in whose time a batch is begun, about."""
FEW = 6
"""Rungs where each is a graph of its own: from the longest down, each half of the one before."""
SHORTEST = 4
"""Length of the first rung of a symbolic graph."""
EVEN = 8
"""Rows of a batch are a multiple of this where it has as many."""


class BucketBatch(NamedTuple):
    """Some rows that are computed together."""

    length: int
    rows: int
    """Of the batch; those beyond its members are empty."""
    members: np.ndarray  # [at most rows] int64


@dataclass(frozen=True)
class Ladder:
    """The rungs of an artifact, and whether its batches are filled up to them."""

    rungs: tuple[Rung, ...]
    filled: bool
    """Whether a batch has one of the numbers of rows that are declared, and not any up to them."""

    @property
    def longest(self) -> int:
        """The most tokens of a row."""
        return self.rungs[-1].length

    def batches(
        self, lengths: np.ndarray, step: int = 0, members: np.ndarray | None = None
    ) -> Iterator[BucketBatch]:
        """Yield batches that together hold every member once, by default every row.

        `lengths` are the tokens of each row, [rows]. The longest come first, equal ones stay in
        their order. `step` is how often the most rows of a batch are halved. Raises ValueError for
        a row that is longer than any rung.
        """
        every = np.arange(len(lengths)) if members is None else np.sort(members)
        if lengths[every].max(initial=0) > self.longest:
            raise ValueError(
                f"a row of {lengths[every].max()} tokens is longer than {self.longest}"
            )
        places = np.searchsorted([rung.length for rung in self.rungs], lengths[every])
        for place in range(len(self.rungs) - 1, -1, -1):
            found = every[places == place]
            found = found[np.argsort(-lengths[found], kind="stable")]
            yield from self._of_rung(self.rungs[place], found, step)

    def shapes(self) -> list[BucketBatch]:
        """Return a batch without members of each shape that there may be where it is filled."""
        nobody = np.empty(0, np.int64)
        return [BucketBatch(rung.length, rows, nobody) for rung in self.rungs for rows in rung.rows]

    def _of_rung(self, rung: Rung, members: np.ndarray, step: int) -> Iterator[BucketBatch]:
        allowed = rung.rows[min(step, len(rung.rows) - 1) :]
        at = 0
        while at < len(members):
            left = len(members) - at
            rows = _next(allowed, left) if self.filled else min(max(1, rung.rows[0] >> step), left)
            yield BucketBatch(rung.length, rows, members[at : at + rows])
            at += rows


def _next(allowed: tuple[int, ...], left: int) -> int:
    """Return the rows of the next batch: all that are left with empty rows, where that is less."""
    fitting = next((rows for rows in allowed if rows <= left), None)
    covering = min((rows for rows in allowed if rows >= left), default=None)
    if fitting is None or covering is None:
        return covering or fitting or allowed[-1]
    parts, rest = 0, left
    for rows in allowed:
        count, rest = divmod(rest, rows)
        parts += count * (rows + BEGINNING)
    return covering if covering + BEGINNING <= parts + rest else fitting


def ladder(settings: Shapes, limit: int, *, symbolic: bool) -> tuple[Rung, ...]:
    """Return the rungs for texts of at most `limit` tokens, each with the rows it may have.

    One graph for all shapes has any; where each shape is a graph, the most rows and one alone.
    """
    found = settings.lengths or (_fine(limit) if symbolic else _coarse(limit))
    lengths = sorted({min(length, limit) for length in found} | {limit})
    most = {length: _rows(settings, length) for length in lengths}
    rows = halves if symbolic else _most_and_one
    return tuple(Rung(length=length, rows=rows(most[length])) for length in lengths)


def _most_and_one(rows: int) -> tuple[int, ...]:
    return (rows, 1) if rows > 1 else (1,)


def halves(rows: int) -> tuple[int, ...]:
    """Return a number of rows and its halves, down to one."""
    found = [rows]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return tuple(found)


def _fine(limit: int) -> list[int]:
    lengths, at = [], SHORTEST
    while at < limit:
        lengths.append(at)
        at += next(step for most, step in STEPS if at < most)
    return lengths


def _coarse(limit: int) -> list[int]:
    return [max(EVEN, -(-(limit >> n) // EVEN) * EVEN) for n in range(FEW)]


def _rows(settings: Shapes, length: int) -> int:
    rows = max(1, min(settings.rows, settings.tokens // length))
    return rows - rows % EVEN if rows > EVEN else rows
