"""Programs that are no models: what they answer to a row is told from its numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Counting:
    """Answers to each row with the sum of its tokens, how many there are, and its last one.

    Of several texts a record, with these of each behind each other, and then its features. What it
    is given is written down.
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        """Rows and length of every batch that was computed."""
        self.texts = 0
        """Rows that were not empty."""

    def __call__(self, tokens: Tensor, lengths: Tensor, *features: Tensor) -> Tensor:
        several = tokens if tokens.ndim == 3 else tokens[:, None]
        counts = lengths if lengths.ndim == 2 else lengths[:, None]
        assert tokens.dtype == lengths.dtype == torch.int32
        assert (counts <= several.shape[2]).all()
        self.check(several.shape[0], several.shape[2])
        self.shapes.append((several.shape[0], several.shape[2]))
        self.texts += int((counts.sum(1) > 0).sum())
        last = several.gather(2, (counts[..., None] - 1).clamp(min=0).long())[..., 0]
        told = torch.stack([several.sum(2), counts, last], 2).flatten(1).float()
        return torch.cat([told, *(each.reshape(len(told), -1).float() for each in features)], 1)

    def check(self, rows: int, length: int) -> None:
        """Raise what stands in the way of a batch; nothing does."""

    def graphs(self) -> int:
        return 0


def answers(*columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return what `Counting` answers to records, given as the ids of each of their texts."""
    every = [
        [value for ids in record for value in (ids.sum(), len(ids), ids[-1] if len(ids) else 0)]
        for record in zip(*columns, strict=True)
    ]
    return np.array(every, np.float32).reshape(len(columns[0]), 3 * len(columns))


def texts(count: int, longest: int, seed: int = 0, shortest: int = 1) -> list[np.ndarray]:
    """Return the ids of some texts; sums of them are exact in float32."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(shortest, longest + 1, count)
    return [draw.integers(1, 300, length).astype(np.int32) for length in lengths]
