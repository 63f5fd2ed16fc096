"""Supervised fine-tuning: predict the answers in conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from regauge.tasks._tokens import NextTokenTask, find_first_answer

if TYPE_CHECKING:
    import numpy as np

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetRows
    from regauge.data.loader import CollatorConfig


class Sft(NextTokenTask):
    """Predict the answers in each conversation; prompts do not contribute to the loss."""

    peer_names: ClassVar[tuple[str, ...]] = (
        "instruction",
        "instruct",
        "chat",
        "finetune",
        "sfttrainer",
        "supervised_fine_tuning",
    )

    layout: ClassVar[str] = "chat"
    has_marked_prompts: ClassVar[bool] = True

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Label each token with the next one; only labels in an answer have a weight."""
        packed = self.build_packed_batch(rows, plan, key, config, "loss_mask")
        arrays = self.label_next_tokens(packed)
        arrays["weights"][:, :-1] *= arrays.pop("loss_mask")[:, 1:]
        return arrays

    def answer_span(self, segment: dict[str, np.ndarray], prompt_tokens: int) -> tuple[int, int]:
        """Return the start and stop index of a conversation's first answer."""
        del prompt_tokens
        return find_first_answer(segment["loss_mask"])
