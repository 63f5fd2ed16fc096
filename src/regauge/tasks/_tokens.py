"""Base classes for language modelling tasks over token rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from regauge.tasks import MetricSums, Task

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


NLL = "token_loss"
"""Mean token loss in tasks whose loss has another part, too."""
MAX_EXPONENT = 700.0
"""The exponential is infinite from here on."""


class TokenTask(Task):
    """A task whose loss is a weighted sum of token losses.

    The module returns `nll` and `correct` per token. In training it may return `loss`, the weighted
    sum, instead.
    """

    artifacts_have_metrics: ClassVar[bool] = False
    minimized: ClassVar[tuple[str, ...]] = ("loss", "token_loss", "perplexity")
    maximized: ClassVar[tuple[str, ...]] = ("accuracy", "next_sentence_accuracy")

    def text_columns(self) -> tuple[str, ...]:
        return ("tokens",)

    def build_packed_batch(
        self,
        rows: DatasetRows,
        plan: MicrobatchPlan,
        key: RandomKey,
        config: CollatorConfig,
        *columns: str,
    ) -> Arrays:
        """Build tokens, segments and positions, all [batch, length] int32, and dropout keys.

        Further row columns are added in the same shape, 0 in padding.
        """
        from regauge.data import batches

        row_columns = [row or {} for row in batches.take_rows(rows, plan.row_numbers)]

        def pad_column(name: str, fill: int = 0) -> np.ndarray:
            cells = [row.get(name) for row in row_columns]
            return batches.pad_sequences(cells, plan.length, fill)

        segments = pad_column("segments")
        return {
            "tokens": pad_column("tokens", config.pad_id),
            "segments": segments,
            "positions": batches.build_position_ids(segments),
            "keys": batches.build_dropout_keys(plan, key),
            **{name: pad_column(name) for name in columns},
        }

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum over tokens, which is `loss` if the module computes it in training."""
        weights = batch["weights"]
        loss = output["loss"] if "loss" in output else (output["nll"] * weights).sum()
        return loss, weights.sum()

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        weights = batch["weights"]
        total = weights.sum()
        return {
            "loss": ((output["nll"] * weights).sum(), total),
            "accuracy": ((output["correct"] * weights).sum(), total),
        }

    def derive_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Add perplexity, the exponential of the mean token loss."""
        token_loss = means.get(NLL, means["loss"])
        is_infinite = token_loss >= MAX_EXPONENT
        return {**means, "perplexity": math.inf if is_infinite else math.exp(token_loss)}

    def eval_outputs(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return `nll`, `correct` and `weights`, concatenated to [batch, 3 x tokens]."""
        import torch

        return torch.cat([output["nll"], output["correct"], batch["weights"]], 1)

    def metric_arrays(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `nll`, `correct` and `weights` per token, all [rows, tokens]."""
        parts = outputs["vectors"].chunk(3, 1)
        return dict(zip(("nll", "correct", "weights"), parts, strict=True))


class NextTokenTask(TokenTask):
    """A causal model predicts the next token within each row segment."""

    generative: ClassVar[bool] = True

    def output_kind(self) -> OutputKind:
        return "text"

    @property
    def head(self) -> HeadKind:
        return "causal"

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.modules import CausalLanguageModel

        return CausalLanguageModel(*self.build_model(model, manifest, seed))

    def prompt_and_reference(
        self, row: dict[str, np.ndarray], prompt_tokens: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return prompt and reference in the first segment that has both."""
        segments = row["segments"]
        for number in range(1, int(segments.max()) + 1):
            segment = {name: value[segments == number] for name, value in row.items()}
            start, stop = self.answer_span(segment, prompt_tokens)
            if 0 < start < stop:
                return segment["tokens"][:start], segment["tokens"][start:stop]
        return None

    def answer_span(self, segment: dict[str, np.ndarray], prompt_tokens: int) -> tuple[int, int]:
        """Return the start and stop index of a segment's reference answer."""
        return prompt_tokens, len(segment["tokens"])

    @staticmethod
    def label_next_tokens(arrays: Arrays) -> Arrays:
        """Label each token with the next one; a segment's last token has weight 0."""
        import numpy as np

        segments = arrays["segments"]
        labels = np.zeros_like(arrays["tokens"])
        labels[:, :-1] = arrays["tokens"][:, 1:]
        weights = np.zeros(segments.shape, np.float32)
        weights[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)
        return {**arrays, "labels": labels, "weights": weights}


def find_first_answer(loss_mask: np.ndarray) -> tuple[int, int]:
    """Return the start and stop index of a text's first answer; `loss_mask` is [length]."""
    import numpy as np

    is_answer = np.append(loss_mask, 0)
    start = int(is_answer.argmax())
    return start, start + int(is_answer[start:].argmin())
