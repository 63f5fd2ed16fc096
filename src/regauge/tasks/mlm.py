"""Masked language modelling: some tokens are hidden, and the model says which they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from regauge.data.randomness import keyed
from regauge.errors import SettingsError
from regauge.tasks import Sums, _pairs
from regauge.tasks._tokens import TokenTask

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.data.batches import Arrays, Draw, Piece
    from regauge.data.dataset import Manifest, Rows
    from regauge.data.loader import Facts
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


class Mlm(TokenTask):
    """Predict masked tokens of packed rows (Devlin et al., 2019: 80 % mask, 10 % random)."""

    mask_share: float = Field(default=0.15, gt=0, lt=1)
    """Share of the real tokens that is predicted."""
    next_sentence: Literal["no", "yes"] = "no"
    """Whether it also says if the second half of a row follows the first (layout "halves")."""

    def reads(self) -> str:
        return "halves" if self._paired else self.layout

    def ladder(self, manifest: Manifest) -> tuple[int, ...]:
        return (_pairs.length(manifest),) if self._paired else super().ladder(manifest)

    def real_share(self, manifest: Manifest) -> float:
        return _pairs.real_share(manifest) if self._paired else super().real_share(manifest)

    def check(self, manifest: Manifest) -> None:
        super().check(manifest)
        if manifest.tokenizer.mask is None:
            raise SettingsError("the tokenizer has no mask token", "prepare with one that has")

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.architectures import build
        from regauge.models.modules import MaskedLanguageModel, PairedLanguageModel

        facts = manifest.tokenizer
        if self._paired:
            return PairedLanguageModel(*build(model, "pairs", facts.vocabulary, seed, facts.pad))
        return MaskedLanguageModel(*build(model, "masked", facts.vocabulary, seed, facts.pad))

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Mask exactly K places of each row; those a short row cannot fill have weight 0.

        Which tokens, and what stands in their place, depends on (seed, epoch, row) alone.
        """
        read = _pairs.paired if self._paired else self.packed
        arrays = read(rows, piece, draw, facts)
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

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum over predicted tokens; each carries the loss of its row's pair as well.

        So both losses are means over one weight, and a global batch can be cut anywhere.
        """
        loss, weight = super().loss(output, batch)
        if self._paired:
            loss = loss + (output["pair_nll"] * batch["weights"].sum(1)).sum()
        return loss, weight

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        sums = super().tally(output, batch)
        if not self._paired:
            return sums
        real = (batch["segments"][:, 0] > 0).float()
        right = ((output["pair_correct"] * real).sum(), real.sum())
        return {**sums, "loss": self.loss(output, batch), "next_sentence_accuracy": right}

    @property
    def _paired(self) -> bool:
        return self.next_sentence == "yes"

    @staticmethod
    def _shown(labels: np.ndarray, words: np.ndarray, facts: Facts) -> np.ndarray:
        """Return what the model sees in place of each label, [batch, masked]."""
        fate = words % np.uint64(10)
        random = (words // np.uint64(10) % np.uint64(facts.vocabulary)).astype(np.int32)
        hidden = np.int32(facts.mask if facts.mask is not None else facts.pad)
        return np.where(fate < 8, hidden, np.where(fate == 8, random, labels))  # noqa: PLR2004
