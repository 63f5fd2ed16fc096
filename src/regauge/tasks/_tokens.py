"""What the tasks over filled token rows share: their arrays, loss and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from regauge.data.batches import dropout_keys, padded, positions, taken
from regauge.tasks import Sums, Task

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.dataset import Manifest, Rows
    from regauge.data.loader import Facts
    from regauge.models.io_spec import Answers
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


class TokenTask(Task):
    """A task whose loss is a weighted sum over tokens, of what the model returns.

    That is `nll` and `correct` of each token; for training it can be `loss`, their weighted sum.
    """

    def packed(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts, *columns: str) -> Arrays:
        """Return tokens, segments and positions, [batch, length] int32, and dropout keys.

        Other columns of the rows are of the same form, and 0 in padding.
        """
        found = [row or {} for row in taken(rows, piece.rows)]
        segments = padded([row.get("segments") for row in found], piece.length, 0)
        return {
            "tokens": padded([row.get("tokens") for row in found], piece.length, facts.pad),
            "segments": segments,
            "positions": positions(segments),
            "keys": dropout_keys(piece, draw),
            **{name: padded([row.get(name) for row in found], piece.length, 0) for name in columns},
        }

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum over tokens; a module that has taken its gradients says it as `loss`."""
        weights = batch["weights"]
        loss = output["loss"] if "loss" in output else (output["nll"] * weights).sum()
        return loss, weights.sum()

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        weights = batch["weights"]
        total = weights.sum()
        return {
            "loss": ((output["nll"] * weights).sum(), total),
            "accuracy": ((output["correct"] * weights).sum(), total),
        }


class NextTokenTask(TokenTask):
    """A task whose model says each next token inside of each segment of a row."""

    writes: ClassVar[bool] = True

    def answers(self) -> Answers:
        return "text"

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.architectures import build
        from regauge.models.modules import CausalLanguageModel

        facts = manifest.tokenizer
        return CausalLanguageModel(*build(model, "causal", facts.vocabulary, seed, facts.pad))

    def exchange(
        self, row: dict[str, np.ndarray], prompt_tokens: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the beginning of the first segment that has one, and what follows."""
        segments = row["segments"]
        for segment in range(1, int(segments.max()) + 1):
            inside = {name: value[segments == segment] for name, value in row.items()}
            begin, end = self.answered(inside, prompt_tokens)
            if 0 < begin < end:
                return inside["tokens"][:begin], inside["tokens"][begin:end]
        return None

    def answered(self, segment: dict[str, np.ndarray], prompt_tokens: int) -> tuple[int, int]:
        """Return where a segment's answer to its beginning begins and ends."""
        return prompt_tokens, len(segment["tokens"])

    @staticmethod
    def labelled(arrays: Arrays) -> Arrays:
        """Label each token with the one after it; the last of a segment has weight 0."""
        segments = arrays["segments"]
        labels = np.zeros_like(arrays["tokens"])
        labels[:, :-1] = arrays["tokens"][:, 1:]
        weights = np.zeros(segments.shape, np.float32)
        weights[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)
        return {**arrays, "labels": labels, "weights": weights}
