"""Causal language modelling: the model says each next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regauge.tasks._tokens import TokenTask

if TYPE_CHECKING:
    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.loader import Facts
    from regauge.data.shards import Manifest, Rows
    from regauge.models.settings import Model
    from regauge.models.text import TextModule


class Clm(TokenTask):
    """Predict the next token inside of each document of a packed row."""

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.build import build
        from regauge.models.text import CausalLanguageModel

        facts = manifest.tokenizer
        return CausalLanguageModel(*build(model, "causal", facts.vocabulary, seed, facts.pad))

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Label each token with the one after it; the last of a document has weight 0."""
        arrays = self.packed(rows, piece, draw, facts)
        segments = arrays["segments"]
        labels = np.zeros_like(arrays["tokens"])
        labels[:, :-1] = arrays["tokens"][:, 1:]
        weights = np.zeros(segments.shape, np.float32)
        weights[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)
        return {**arrays, "labels": labels, "weights": weights}
