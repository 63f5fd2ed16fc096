"""Supervised fine-tuning on instructions: the model says each next token of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from regauge.tasks._tokens import NextTokenTask

if TYPE_CHECKING:
    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.dataset import Rows
    from regauge.data.loader import Facts


class Sft(NextTokenTask):
    """Predict the answers of each conversation of a row; what is asked has no part in the loss."""

    layout: ClassVar[str] = "chat"

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Label each token with the one after it; only tokens of an answer have a weight."""
        arrays = self.labelled(self.packed(rows, piece, draw, facts, "answers"))
        arrays["weights"][:, :-1] *= arrays.pop("answers")[:, 1:]
        return arrays

    def answered(self, segment: dict[str, np.ndarray], prompt_tokens: int) -> tuple[int, int]:
        """Return the place of a conversation's first answer."""
        del prompt_tokens
        marks = np.append(segment["answers"], 0)
        begin = int(marks.argmax())
        return begin, begin + int(marks[begin:].argmin())
