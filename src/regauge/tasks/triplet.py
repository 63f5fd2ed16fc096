"""Text embeddings from triplets: an anchor, a matching text and another text."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from regauge.tasks import MetricSums
from regauge.tasks._embeddings import DOCUMENT, QUERY, EmbeddingTask

if TYPE_CHECKING:
    from torch import Tensor


class Triplet(EmbeddingTask):
    """Train embeddings with the triplet loss (FaceNet, Schroff et al., 2015).

    A row's loss is max(0, d(anchor, positive) - d(anchor, negative) + margin).
    """

    peer_names: ClassVar[tuple[str, ...]] = ("triplets", "tripletloss")
    maximized: ClassVar[tuple[str, ...]] = ("accuracy",)

    anchor: str = "anchor"
    """Anchor text field, such as a query; its prompt is called "query"."""
    positive: str = "positive"
    """Text field that matches the anchor; its prompt is called "document"."""
    negative: str = "negative"
    """Text field that does not match the anchor."""
    distance: Literal["cosine", "euclidean"] = "cosine"
    """Distance d: 1 - cosine similarity, or Euclidean distance between the vectors."""
    margin: float = Field(default=0.5, gt=0)
    """Minimum distance difference between the negative and the positive."""
    normalize: bool = True
    """Scale the model's vectors to length 1; their distances are then at most 2."""

    def text_columns(self) -> tuple[str, ...]:
        return self.anchor, self.positive, self.negative

    def prompt_columns(self) -> dict[str, tuple[str, ...]]:
        return {QUERY: (self.anchor,), DOCUMENT: (self.positive, self.negative)}

    def normalizes_vectors(self) -> bool:
        return self.normalize

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        to_positive, to_negative = self._compute_distances(output["vectors"])
        real = batch["real"].chunk(3)[0]
        losses = (to_positive - to_negative + self.margin).relu()
        return (losses * real).sum(), real.sum()

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return the loss, and the fraction of anchors closer to their positive."""
        to_positive, to_negative = self._compute_distances(output["vectors"])
        real = batch["real"].chunk(3)[0]
        is_correct = to_positive < to_negative
        return {
            "loss": self.loss(output, batch),
            "accuracy": ((is_correct * real).sum(), real.sum()),
        }

    def _compute_distances(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return each anchor's distances to its positive and its negative, [rows]."""
        from torch.nn.functional import cosine_similarity, pairwise_distance

        anchors, positives, negatives = vectors.chunk(3)
        if self.distance == "euclidean":
            return pairwise_distance(anchors, positives), pairwise_distance(anchors, negatives)
        return 1 - cosine_similarity(anchors, positives), 1 - cosine_similarity(anchors, negatives)
