"""Row order: a step's rows are a pure function of seed, epoch, step and dataset content.

World size, device, loader threads and gradient accumulation do not matter. To resume, only the step
number is needed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from regauge.data.randomness import Permutation

PADDING = -1
"""Row number of a missing row: it has weight 0, and no metric counts it."""


def sample_rows(num_rows: int, count: int | None, fingerprint: str) -> np.ndarray:
    """Return `count` representative row numbers in a split, or all of them, in a keyed order."""
    positions = np.arange(min(count or num_rows, num_rows))
    return Permutation(num_rows, int(fingerprint[:15], 16))(positions) if num_rows else positions


class RowOrder:
    """The row numbers of every global batch in a run."""

    def __init__(self, num_rows: int, batch_rows: int, seed: int, fingerprint: str) -> None:
        self.num_rows = num_rows
        self.batch_rows = batch_rows
        self.steps_per_epoch = -(-num_rows // batch_rows)
        self._key = (seed, int(fingerprint[:15], 16))
        self._permutation = lru_cache(maxsize=2)(self._build_permutation)

    def epoch(self, step: int) -> int:
        """Return a step's epoch; both count from 0."""
        return step // self.steps_per_epoch

    def batch(self, step: int, offset: int = 0) -> np.ndarray:
        """Return a global batch's row numbers, [batch_rows], moved by `offset` rows.

        The last batch in an epoch is filled with PADDING.
        """
        start = step % self.steps_per_epoch * self.batch_rows + offset
        positions = np.arange(start, min(start + self.batch_rows, self.num_rows))
        batch = np.full(self.batch_rows, PADDING, np.int64)
        batch[: len(positions)] = self._permutation(self.epoch(step))(positions)
        return batch

    def _build_permutation(self, epoch: int) -> Permutation:
        return Permutation(self.num_rows, *self._key, epoch)
