"""The row order: the rows of a step are a pure function of seed, epoch, step and dataset content.

World size, device, loader threads and gradient accumulation have no influence. To resume, only the
step number is needed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from regauge.data.randomness import Permutation

PADDING = -1
"""Row number of a row that does not exist: it has weight 0, and no metric counts it."""


def sample_rows(num_rows: int, count: int | None, fingerprint: str) -> np.ndarray:
    """Return the numbers of `count` rows that represent a split, or of all, in a keyed order."""
    positions = np.arange(min(count or num_rows, num_rows))
    return Permutation(num_rows, int(fingerprint[:15], 16))(positions) if num_rows else positions


class RowOrder:
    """The row numbers of every global batch of a run."""

    def __init__(self, num_rows: int, batch_rows: int, seed: int, fingerprint: str) -> None:
        self.num_rows = num_rows
        self.batch_rows = batch_rows
        self.steps_per_epoch = -(-num_rows // batch_rows)
        self._key = (seed, int(fingerprint[:15], 16))
        self._permutation = lru_cache(maxsize=2)(self._build_permutation)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step; both count from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int, offset: int = 0) -> np.ndarray:
        """Return the row numbers of a global batch, [batch_rows], moved by `offset` rows.

        The last batch of an epoch is filled with PADDING.
        """
        start = step % self.steps_per_epoch * self.batch_rows + offset
        positions = np.arange(start, min(start + self.batch_rows, self.num_rows))
        batch = np.full(self.batch_rows, PADDING, np.int64)
        batch[: len(positions)] = self._permutation(self.epoch(step))(positions)
        return batch

    def _build_permutation(self, epoch: int) -> Permutation:
        return Permutation(self.num_rows, *self._key, epoch)
