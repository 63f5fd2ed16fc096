"""Direct preference optimization: prefer a prompt's chosen answer to the rejected one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.data.buckets import longest_text_histogram
from regauge.data.conversations import ANSWERS, CHOSEN, MASKS
from regauge.tasks import MetricSums
from regauge.tasks._fields import FieldsTask, field_histogram
from regauge.tasks._tokens import NextTokenTask, find_first_answer

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.architectures import HeadKind
    from regauge.models.io_spec import OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


class Dpo(FieldsTask):
    """Prefer chosen answers to rejected ones (DPO, Rafailov et al., 2023).

    An answer's reward is `beta` times its log-probability, minus that under the weights of step 0.
    A row's loss is -log sigmoid(chosen reward - rejected reward).
    """

    peer_names: ClassVar[tuple[str, ...]] = ("dpotrainer", "preference", "preferences", "rlhf")

    layout: ClassVar[str] = "preferences"
    generative: ClassVar[bool] = True
    artifacts_have_metrics: ClassVar[bool] = False
    maximized: ClassVar[tuple[str, ...]] = ("accuracy", "reward_margin")
    reference_columns: ClassVar[tuple[str, ...]] = tuple(f"reference_{name}" for name in ANSWERS)

    beta: float = Field(default=0.1, gt=0)
    """Weight of the distance from the initial model; larger values stay closer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of rows whose answers are swapped (conservative DPO, Mitchell, 2023)."""

    @property
    def head(self) -> HeadKind:
        return "causal"

    def text_columns(self) -> tuple[str, ...]:
        return ANSWERS

    def length_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Count rows by the length of the longer conversation.

        Both lengths are assumed independent.
        """
        return longest_text_histogram([field_histogram(manifest, name) for name in ANSWERS])

    @property
    def packs_texts(self) -> bool:
        return False

    def sequences_per_row(self, manifest: DatasetManifest) -> int:
        del manifest
        return len(ANSWERS)

    def slot_lengths(self, rows: DatasetRows, row_numbers: np.ndarray) -> list[int]:
        """Return the length of each row's longer conversation."""
        from regauge.data.batches import take_rows

        records = take_rows(rows, row_numbers)
        return [max(len(row[name]) for name in ANSWERS) if row else 0 for row in records]

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays for both conversations in each row, [rows x 2, length].

        Each token's label is the next one; only labels in an answer have a weight. `references`,
        [rows, 2] fp32, are the `reference_columns`; NaN if the rows do not have them yet.
        """
        import numpy as np

        from regauge.data.batches import pad_sequences, take_rows
        from regauge.tasks import _arrays

        records = take_rows(rows, plan.row_numbers)
        texts, masks = (
            [row[name] if row else None for row in records for name in names]
            for names in (ANSWERS, MASKS)
        )
        arrays = _arrays.build_row_arrays(texts, plan, key, config)
        arrays = NextTokenTask.label_next_tokens(arrays)
        arrays["weights"][:, :-1] *= pad_sequences(masks, plan.length, 0)[:, 1:]
        references = [
            [row.get(name, np.nan) if row else 0.0 for name in self.reference_columns]
            for row in records
        ]
        return {
            **arrays,
            "references": np.array(references, np.float32),
            "slots": plan.slots,
            "real": (plan.row_numbers >= 0).astype(np.float32),
        }

    def output_kind(self) -> OutputKind:
        return "text"

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.modules import AnswerLikelihoodModel

        return AnswerLikelihoodModel(*self.build_model(model, manifest, seed))

    def reference_values(self, output: dict[str, Tensor]) -> Tensor:
        """Return both answers' log-probabilities, [rows, 2]."""
        return output["log_probabilities"].view(-1, len(ANSWERS))

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum over rows, and the number of rows that are not padding."""
        real = batch["real"]
        return (self._losses(self._rewards(output, batch)) * real).sum(), real.sum()

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return the loss, the accuracy, both answers' rewards and their difference.

        The accuracy is the fraction of rows whose chosen answer has the higher reward.
        """
        real, rewards = batch["real"], self._rewards(output, batch)
        chosen, rejected = rewards.unbind(1)
        values = {
            "loss": self._losses(rewards),
            "accuracy": (chosen > rejected).float(),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "reward_margin": chosen - rejected,
        }
        return {name: ((value * real).sum(), real.sum()) for name, value in values.items()}

    def prompt_and_reference(
        self, row: dict[str, np.ndarray], prompt_tokens: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a row's prompt and chosen answer."""
        del prompt_tokens
        start, stop = find_first_answer(row[MASKS[0]])
        return (row[CHOSEN][:start], row[CHOSEN][start:stop]) if 0 < start < stop else None

    def _rewards(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return the chosen and the rejected answer's reward, [rows, 2]."""
        return self.beta * (self.reference_values(output) - batch["references"])

    def _losses(self, rewards: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        margins = rewards[:, 0] - rewards[:, 1]
        smoothing = self.label_smoothing
        return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
