"""Causal language modelling: predict the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.tasks._tokens import NextTokenTask

if TYPE_CHECKING:
    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetRows
    from regauge.data.loader import CollatorConfig


class Clm(NextTokenTask):
    """Predict the next token within each document in a packed row."""

    peer_names: ClassVar[tuple[str, ...]] = (
        "lm",
        "causal_lm",
        "language_modeling",
        "pretrain",
        "text_generation",
        "automodelforcausallm",
    )

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        return self.label_next_tokens(self.build_packed_batch(rows, plan, key, config))
