"""Runners without a model: each output can be computed from its input row alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class CountingRunner:
    """Returns the sum, the number and the last one of the tokens of each row.

    With several texts per record it returns these of each text, then the features. It records the
    shapes of its inputs.
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        """Rows and length of every batch that was computed."""
        self.texts = 0
        """Number of rows that were not empty."""

    def __call__(self, *inputs: np.ndarray) -> Tensor:
        tokens, lengths, *features = map(torch.as_tensor, inputs)
        texts = tokens if tokens.ndim == 3 else tokens[:, None]
        counts = lengths if lengths.ndim == 2 else lengths[:, None]
        assert tokens.dtype == lengths.dtype == torch.int32
        assert (counts <= texts.shape[2]).all()
        self.check(texts.shape[0], texts.shape[2])
        self.shapes.append((texts.shape[0], texts.shape[2]))
        self.texts += int((counts.sum(1) > 0).sum())
        last = texts.gather(2, (counts[..., None] - 1).clamp(min=0).long())[..., 0]
        outputs = torch.stack([texts.sum(2), counts, last], 2).flatten(1).float()
        flat = (values.reshape(len(outputs), -1).float() for values in features)
        return torch.cat([outputs, *flat], 1)

    def check(self, rows: int, length: int) -> None:
        """Raise an error for a batch; a subclass may override this."""

    def num_graphs(self) -> int:
        return 0


def expected_outputs(*columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the outputs of `CountingRunner` for records, given the ids of each of their texts."""
    outputs = [
        [value for ids in record for value in (ids.sum(), len(ids), ids[-1] if len(ids) else 0)]
        for record in zip(*columns, strict=True)
    ]
    return np.array(outputs, np.float32).reshape(len(columns[0]), 3 * len(columns))


def random_ids(count: int, max_length: int, seed: int = 0, min_length: int = 1) -> list[np.ndarray]:
    """Return the ids of random texts; their sums are exact in float32."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(min_length, max_length + 1, count)
    return [draw.integers(1, 300, length).astype(np.int32) for length in lengths]
