"""Masked language modelling: some tokens are hidden, and the model says which they were."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from regauge.data.randomness import keyed
from regauge.errors import SettingsError
from regauge.tasks._tokens import TokenTask

if TYPE_CHECKING:
    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.loader import Facts
    from regauge.data.shards import Manifest, Rows
    from regauge.models.settings import Model
    from regauge.models.text import TextModule


class Mlm(TokenTask):
    """Predict masked tokens of packed rows (Devlin et al., 2019: 80 % mask, 10 % random)."""

    mask_share: float = Field(default=0.15, gt=0, lt=1)
    """Share of the real tokens that is predicted."""

    def check(self, manifest: Manifest) -> None:
        super().check(manifest)
        if manifest.tokenizer.mask is None:
            raise SettingsError("the tokenizer has no mask token", "prepare with one that has")

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.build import build
        from regauge.models.text import MaskedLanguageModel

        facts = manifest.tokenizer
        return MaskedLanguageModel(*build(model, "masked", facts.vocabulary, seed, facts.pad))

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Mask exactly K places of each row; those a short row cannot fill have weight 0.

        Which tokens, and what stands in their place, depends on (seed, epoch, row) alone.
        """
        arrays = self.packed(rows, piece, draw, facts)
        tokens = arrays["tokens"]
        eligible = (arrays["segments"] > 0) & ~np.isin(tokens, facts.special)
        most = max(1, round(self.mask_share * piece.length))
        places = np.arange(piece.length)
        row_keys = piece.rows[:, None]
        rank = keyed(draw.seed, draw.epoch, row_keys, places)
        rank[~eligible] = np.iinfo(np.uint64).max
        masked = np.argsort(rank, axis=1, kind="stable")[:, :most]
        labels = np.take_along_axis(tokens, masked, 1)
        wanted = np.minimum(np.rint(self.mask_share * eligible.sum(1)), most)
        weights = (np.arange(most) < wanted[:, None]).astype(np.float32)
        shown = self._shown(labels, keyed(draw.seed, draw.epoch, row_keys, masked, 1), facts)
        np.put_along_axis(tokens, masked, np.where(weights > 0, shown, labels), 1)
        return {
            **arrays,
            "masked": masked.astype(np.int64),
            "labels": labels,
            "weights": weights,
        }

    @staticmethod
    def _shown(labels: np.ndarray, words: np.ndarray, facts: Facts) -> np.ndarray:
        """Return what the model sees in place of each label, [batch, masked]."""
        fate = words % np.uint64(10)
        random = (words // np.uint64(10) % np.uint64(facts.vocabulary)).astype(np.int32)
        hidden = np.int32(facts.mask if facts.mask is not None else facts.pad)
        return np.where(fate < 8, hidden, np.where(fate == 8, random, labels))  # noqa: PLR2004
