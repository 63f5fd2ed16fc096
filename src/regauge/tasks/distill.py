"""Text embedding distillation from a teacher's vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from regauge.system.errors import DataError, SettingsError
from regauge.tasks import MetricSums
from regauge.tasks._embeddings import EmbeddingTask, measure_vectors
from regauge.tasks._fields import check_field

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.modules import Encoder
    from regauge.models.settings import Model

MAX_NORM_ERROR = 0.01
"""A vector counts as normalized if its length differs from 1 by at most this."""


class Distill(EmbeddingTask):
    """Train vectors to equal a teacher's (Reimers and Gurevych, 2020).

    "mse" is the squared error, averaged over the dimensions. "cosine" is 1 - cosine similarity (Kim
    et al., 2023).
    """

    peer_names: ClassVar[tuple[str, ...]] = ("distillation", "knowledge_distillation", "mseloss")

    needs_global_batch: ClassVar[bool] = False
    metrics_need_all_rows: ClassVar[bool] = False
    maximized: ClassVar[tuple[str, ...]] = ("cosine_similarity",)

    text_fields: tuple[str, ...] = Field(default=("text",), min_length=1)
    """Text fields; all texts in a record share one vector, such as a text and its translation."""
    vector: str = "embedding"
    """Field with the teacher's vector, from `rows.vectors`."""
    objective: Literal["mse", "cosine"] = "mse"
    """Loss: squared error between vectors, or their cosine distance."""
    normalize: bool = True
    """Scale the model's vectors to length 1, like the teacher's."""

    def text_columns(self) -> tuple[str, ...]:
        return self.text_fields

    def normalizes_vectors(self) -> bool:
        return self.normalize

    def default_rows(self) -> dict[str, Any]:
        return {**super().default_rows(), "vectors": [self.vector]}

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        check_field(manifest, self.vector, ("vector",))
        if self.objective == "cosine" or not self.normalize:
            return
        for lowest, highest in manifest.columns[self.vector].ranges.values():
            if max(1 - lowest, highest - 1) > MAX_NORM_ERROR:
                raise DataError(
                    f"the vectors of '{self.vector}' have lengths from {lowest:.3g} to"
                    f" {highest:.3g}, but the model returns vectors of length 1",
                    "set task.normalize = false, or scale the vectors of the teacher",
                )

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> Encoder:
        module = super().build_module(model, manifest, seed)
        size, column = measure_vectors(module), manifest.columns.get(self.vector)
        if column is not None and column.max_length not in {0, size}:
            raise SettingsError(
                f"the vectors of '{self.vector}' have {column.max_length} dimensions, and the model"
                f" returns {size}",
                f"train a model with hidden size {column.max_length}, or use another teacher",
            )
        return module

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays with `teacher_vectors`, [batch, width] fp32."""
        import numpy as np

        from regauge.data.batches import take_rows

        records = take_rows(rows, plan.row_numbers)
        absent = np.zeros_like(rows.take([0])[0][self.vector])
        vectors = np.stack([row[self.vector] if row else absent for row in records])
        arrays = super().build_batch(rows, plan, key, config)
        return {**arrays, "teacher_vectors": vectors.astype(np.float32)}

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        from torch.nn.functional import cosine_similarity

        vectors, expected, real = output["vectors"], batch["teacher_vectors"], batch["real"]
        if self.objective == "cosine":
            losses = 1 - cosine_similarity(vectors, expected)
        else:
            losses = (vectors - expected).square().mean(1)
        return (losses * real).sum(), real.sum()

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return the loss, and the mean cosine similarity with the teacher's vectors."""
        from torch.nn.functional import cosine_similarity

        cosines = cosine_similarity(output["vectors"], batch["teacher_vectors"])
        real = batch["real"]
        return {
            "loss": self.loss(output, batch),
            "cosine_similarity": ((cosines * real).sum(), real.sum()),
        }
