"""Causal language modelling: the model says each next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.tasks._tokens import NextTokenTask

if TYPE_CHECKING:
    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.dataset import Rows
    from regauge.data.loader import Facts


class Clm(NextTokenTask):
    """Predict the next token inside of each document of a packed row."""

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        return self.labelled(self.packed(rows, piece, draw, facts))
