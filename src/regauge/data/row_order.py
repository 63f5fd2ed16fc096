"""Which rows a step sees: a pure function of seed, epoch, step and the dataset's content.

World size, device, loader threads and accumulation do not enter. The state of a resume is the
number of the step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from regauge.data.randomness import Permutation

PADDING = -1
"""The number of a row that is not there: it has weight 0 and is in no metric."""


def sample(rows: int, count: int | None, identity: str) -> np.ndarray:
    """Return the numbers of the rows that stand for a split, in a keyed order: all, or `count`."""
    chosen = np.arange(min(count or rows, rows))
    return Permutation(rows, int(identity[:15], 16))(chosen) if rows else chosen


class Order:
    """The rows of every global batch of a run."""

    def __init__(self, rows: int, batch_rows: int, seed: int, identity: str) -> None:
        self.rows = rows
        self.batch_rows = batch_rows
        self.steps_per_epoch = -(-rows // batch_rows)
        self._key = (seed, int(identity[:15], 16))
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step; both count from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int, shift: int = 0) -> np.ndarray:
        """Return the row numbers of a global batch, [batch_rows], or of the rows `shift` later.

        The last batch of an epoch is filled up with PADDING.
        """
        inside = step % self.steps_per_epoch * self.batch_rows + shift
        positions = np.arange(inside, min(inside + self.batch_rows, self.rows))
        batch = np.full(self.batch_rows, PADDING, np.int64)
        batch[: len(positions)] = self._permutation(self.epoch(step))(positions)
        return batch

    def _permute(self, epoch: int) -> Permutation:
        return Permutation(self.rows, *self._key, epoch)
