"""What the tasks over packed token rows share: their arrays, loss and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.data.batches import dropout_keys, padded, positions
from regauge.tasks import Sums, Task

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.loader import Facts
    from regauge.data.shards import Rows


class TokenTask(Task):
    """A task whose loss is a weighted sum over tokens; `nll` and `correct` come from the model."""

    def packed(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Return tokens, segments and positions, [batch, length] int32, and dropout keys."""
        found = iter(rows.take(piece.rows[piece.rows >= 0]))
        taken = [next(found) if number >= 0 else {} for number in piece.rows]
        segments = padded([row.get("segments") for row in taken], piece.length, 0)
        return {
            "tokens": padded([row.get("tokens") for row in taken], piece.length, facts.pad),
            "segments": segments,
            "positions": positions(segments),
            "keys": dropout_keys(piece, draw),
        }

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return (output["nll"] * batch["weights"]).sum(), batch["weights"].sum()

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        weights = batch["weights"]
        total = weights.sum()
        return {
            "loss": ((output["nll"] * weights).sum(), total),
            "accuracy": ((output["correct"] * weights).sum(), total),
        }


def real_tokens(arrays: Arrays) -> int:
    """Return how many tokens of a batch are no padding."""
    return int(np.count_nonzero(arrays["segments"]))
