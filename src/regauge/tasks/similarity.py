"""Text embeddings from graded pairs: two texts and their similarity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from regauge.system.errors import DataError
from regauge.tasks import ITEMS, PAIR_LABELS, MetricSums, _quality
from regauge.tasks._embeddings import DOCUMENT, QUERY, EmbeddingTask
from regauge.tasks._fields import check_field, label_range
from regauge.tasks._retrieval import query_slices

if TYPE_CHECKING:
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig

DEFAULT_TEMPERATURE = 0.05


class Similarity(EmbeddingTask):
    """Train the cosine similarity of two texts on graded pairs, such as the STS benchmark.

    "cosent" is log(1 + sum of exp((cos_i - cos_j) / temperature)) over the pairs i and j in the
    global batch whose labels satisfy label_i < label_j (CoSENT, Huang et al., 2024). "mse" is the
    cosine's squared error (Sentence-BERT, Reimers and Gurevych, 2019).
    """

    peer_names: ClassVar[tuple[str, ...]] = (
        "sts",
        "cosent",
        "cosentloss",
        "cosinesimilarityloss",
        "sentence_similarity",
    )
    maximized: ClassVar[tuple[str, ...]] = ("pearson", "spearman")

    text_fields: tuple[str, ...] = Field(
        default=("sentence1", "sentence2"), min_length=2, max_length=2
    )
    """The two text fields; their prompts are called "query" and "document"."""
    label: str = "score"
    """Field with the text similarity, from `rows.floats` or `rows.integers`."""
    objective: Literal["cosent", "mse"] = "cosent"
    """Loss: order of the cosines, or their squared error, which needs labels from -1 to 1."""
    temperature: float = Field(default=DEFAULT_TEMPERATURE, gt=0)
    """Cosine similarities are divided by this (cosent)."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Similarity:
        if self.objective == "mse" and self.temperature != DEFAULT_TEMPERATURE:
            raise ValueError('objective "mse" has no temperature; remove it')
        return self

    def text_columns(self) -> tuple[str, ...]:
        return self.text_fields

    def prompt_columns(self) -> dict[str, tuple[str, ...]]:
        return {QUERY: self.text_fields[:1], DOCUMENT: self.text_fields[1:]}

    def default_rows(self) -> dict[str, Any]:
        return {**super().default_rows(), "floats": [self.label]}

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        check_field(manifest, self.label, ("integer", "float"))
        lowest, highest = label_range(manifest, self.label)
        if self.objective == "mse" and (lowest < -1 or highest > 1):
            raise DataError(
                f"labels in '{self.label}' range from {lowest:g} to {highest:g}, but cosines from"
                " -1 to 1",
                'scale the labels, or set task.objective = "cosent"',
            )

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays, with row labels for each text."""
        import numpy as np

        from regauge.data.batches import take_rows

        records = take_rows(rows, plan.row_numbers)
        labels = np.array([[row[self.label] if row else 0] for row in records], np.float32)
        return {**super().build_batch(rows, plan, key, config), PAIR_LABELS: labels}

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        cosines, labels, real = self._read_pairs(output, batch)
        if self.objective == "cosent":
            return self._compute_cosent(cosines, labels, real) * real.sum(), real.sum()
        return ((cosines - labels).square() * real).sum(), real.sum()

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return the loss, and correlations between cosines and labels (Pearson and Spearman)."""
        pairs = [column.cpu() for column in self._read_pairs(output, batch)]
        return {
            "loss": self.loss(output, batch),
            "pearson": _quality.pearson(*pairs),
            "spearman": _quality.spearman(*pairs),
        }

    def fit_baselines(
        self, train: list[dict[str, Any]], heldout: list[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Return the correlations between tf-idf cosines and labels."""
        import torch

        from regauge.tasks._baselines import compare_by_counts

        texts = [row[name] for name in self.text_fields for row in train]
        pairs = [[row[name] for row in heldout] for name in self.text_fields]
        labels = torch.tensor([float(row[self.label]) for row in heldout])
        columns = compare_by_counts(texts, *pairs), labels, torch.ones_like(labels)
        sums = {"pearson": _quality.pearson(*columns), "spearman": _quality.spearman(*columns)}
        return {"tf-idf cosine": {**sums, ITEMS: (columns[2].sum(), torch.ones(()))}}

    def _read_pairs(
        self, output: dict[str, Tensor], batch: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return each pair's cosine and label, and whether it is real, [rows] each."""
        from torch.nn.functional import cosine_similarity

        first, second = output["vectors"].chunk(2)
        cosines = cosine_similarity(first, second)
        return cosines, batch[PAIR_LABELS].chunk(2)[0][:, 0], batch["real"].chunk(2)[0]

    def _compute_cosent(self, cosines: Tensor, labels: Tensor, real: Tensor) -> Tensor:
        """Return the loss over all pairs, a scalar; the arguments are [rows]."""
        import torch

        scores = cosines / self.temperature
        lowest = torch.finfo(scores.dtype).min
        terms = [scores.new_zeros(1)]
        for part in query_slices(len(scores)):
            is_lower = labels[part, None] < labels
            is_real = (real[part, None] > 0) & (real > 0)
            differences = scores[part, None] - scores
            terms.append(differences.masked_fill(~(is_lower & is_real), lowest).logsumexp(1))
        return torch.cat(terms).logsumexp(0)
