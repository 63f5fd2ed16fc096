"""From a step's number to the batches of one process, built ahead of the device in threads.

A global batch is cut into the same pieces on every world; process r of n takes pieces r, r+n, …
and a process with fewer pieces than the others adds one of weight 0, so that all of them take
part in every collective.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from regauge.data.batches import Arrays, Draw, Piece
from regauge.data.row_order import PADDING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from regauge.data.dataset import Rows


EVALUATION = -1
"""The epoch and step that key the randomness of held-out batches: the same in every run."""


class Collator(Protocol):
    """What a feed must know of a task."""

    def cut(
        self, rows: Rows, numbers: np.ndarray, microbatch_rows: int, ladder: tuple[int, ...]
    ) -> list[Piece]:
        """Cut a global batch into pieces of one size."""
        ...

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Build the arrays of a piece."""
        ...


@dataclass(frozen=True)
class Facts:
    """Numbers that a task needs to build a batch."""

    vocabulary: int
    pad: int
    mask: int | None
    special: tuple[int, ...]
    members: int = 1
    """Most records of a row."""


@dataclass(frozen=True)
class Share:
    """One process's part of every global batch."""

    rank: int
    size: int

    def of(self, pieces: list[Piece], ladder: tuple[int, ...]) -> list[Piece]:
        """Return this process's pieces; every process gets equally many."""
        own = pieces[self.rank :: self.size]
        missing = -(-len(pieces) // self.size) - len(own)
        return own + [pieces[-1].emptied(ladder[0])] * missing


class Feed:
    """The batches of a split for one process."""

    def __init__(
        self,
        collator: Collator,
        rows: Rows,
        *,
        facts: Facts,
        microbatch_rows: int,
        ladder: tuple[int, ...],
        share: Share,
        seed: int,
    ) -> None:
        self._collator = collator
        self._rows = rows
        self._facts = facts
        self._microbatch_rows = microbatch_rows
        self._ladder = ladder
        self._share = share
        self._seed = seed

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, numbers: np.ndarray, *, epoch: int, step: int) -> list[Arrays]:
        """Return this process's batches of one global batch of row numbers."""
        pieces = self._collator.cut(self._rows, numbers, self._microbatch_rows, self._ladder)
        draw = Draw(self._seed, epoch, step)
        return [
            self._collator.batch(self._rows, piece, draw, self._facts)
            for piece in self._share.of(pieces, self._ladder)
        ]

    def row(self, number: int) -> dict[str, np.ndarray]:
        """Return one row as it lies in the dataset."""
        return self._rows.take([number])[0]

    @property
    def largest(self) -> tuple[int, int]:
        """Rows and tokens of the largest batch."""
        return self._microbatch_rows, self._ladder[-1]

    def empty(self, slots: int, length: int) -> Arrays:
        """Return a batch of a declared shape with no row in it: every weight is 0."""
        nobody = np.full(slots, PADDING)
        zeros = np.zeros(slots, np.int64)
        piece = Piece(nobody, zeros, zeros, length)
        return self._collator.batch(self._rows, piece, Draw(self._seed, 0, 0), self._facts)

    def once(self, numbers: np.ndarray) -> tuple[Iterator[Arrays], int]:
        """Return this process's batches of some rows, each of them once.

        Also the number of rows with those that fill up the last microbatch.
        """
        filled = -(-len(numbers) // self._microbatch_rows) * self._microbatch_rows
        padded = np.full(filled, PADDING, np.int64)
        padded[: len(numbers)] = numbers
        pieces = self._collator.cut(self._rows, padded, self._microbatch_rows, self._ladder)
        draw = Draw(self._seed, EVALUATION, EVALUATION)
        own = self._share.of(pieces, self._ladder)
        made = (self._collator.batch(self._rows, piece, draw, self._facts) for piece in own)
        return made, filled


def in_turn(
    load: Callable[[int], list[Arrays]], first: int, last: int, *, workers: int, ahead: int
) -> Generator[list[Arrays]]:
    """Yield the batches of steps first … last-1; threads build `ahead` steps early."""
    if workers == 0:
        yield from (load(step) for step in range(first, last))
        return
    waiting: deque[Future[list[Arrays]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="loader") as pool:
        try:
            for step in range(first, last):
                waiting.append(pool.submit(load, step))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
