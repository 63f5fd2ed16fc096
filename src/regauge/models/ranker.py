"""The ranking model: text encoder, then explicit and implicit feature interactions.

Explicit interactions are DCN-v2 cross layers (Wang et al., 2021, "DCN V2: Improved Deep & Cross
Network"), at full rank (equation 1) or as a mixture of low-rank experts (equations 3 to 5).
Implicit interactions are a deep network, parallel to the cross layers or stacked on them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, layer_norm

from regauge.models.losses import Batch
from regauge.models.modules import TextModule
from regauge.models.pooling import mean_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from regauge.models.dropout import DropoutKeys
    from regauge.models.settings import Interactions

ENCODER_INPUTS = ("tokens", "segments", "positions", "keys")
"""Batch arrays that the encoder reads."""
CATEGORY_STD = 0.05
"""Standard deviation of the initial category embeddings."""


class RankerShape(NamedTuple):
    """How many texts, candidates and features a row has."""

    query_texts: int
    document_texts: int
    """Texts per candidate."""
    candidates: int
    numeric_features: int
    categorical_features: int
    calibrated: bool
    """Whether scores are logits of probabilities, not only an order."""

    @property
    def texts(self) -> int:
        """Texts per row: the query's, then each candidate's."""
        return self.query_texts + self.candidates * self.document_texts


class Ranker(TextModule):
    """Scores the candidates of each row.

    In addition to the texts, [rows x texts, length], a batch holds two feature tables. `numbers` is
    [rows, candidates, features] fp32, with NaN for missing values. `categories` is [rows,
    candidates, features] int64: embedding rows from 1, and 0 for missing values.
    """

    packs_texts = False

    def __init__(
        self,
        model: PreTrainedModel,
        keys: DropoutKeys,
        shape: RankerShape,
        settings: Interactions,
        scale: Sequence[tuple[float, float]],
        *,
        documents: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(model, keys)
        self.documents = documents
        """Candidate encoder; None if `model` encodes all texts."""
        self.shape = shape
        self.has_texts = shape.texts > 0
        width = model.config.hidden_size if self.has_texts else 0
        self.head = RankingHead(shape, width, settings, scale)

    @property
    def can_pack(self) -> bool:
        return super().can_pack and self.has_texts and self.documents is None

    def forward(self, batch: Batch) -> Batch:
        """Return `scores`, [rows, candidates] fp32."""
        rows = batch["numbers"].shape[0]
        texts = [self._text_features(batch, rows)] if self.has_texts else []
        return {"scores": self.head(texts, batch["numbers"], batch["categories"]).float().clone()}

    def _text_features(self, batch: Batch, rows: int) -> Tensor:
        """Return the normalized vectors of each candidate's texts and their cosine similarities.

        The result is [rows, candidates, features].
        """
        queries, documents = self._encode_rows(batch, rows)
        documents = documents.view(rows, self.shape.candidates, self.shape.document_texts, -1)
        queries = queries[:, None].expand(-1, self.shape.candidates, -1, -1)
        similarities = cosine_similarity(queries[:, :, :, None], documents[:, :, None], dim=-1)
        vectors = torch.cat([queries, documents], 2)
        normalized = layer_norm(vectors, vectors.shape[-1:])
        return torch.cat([normalized.flatten(2), similarities.flatten(2)], 2)

    def _encode_rows(self, batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        """Return the query and candidate text vectors, [rows, texts, width]."""
        count = self.shape.query_texts
        if self.documents is None:
            vectors = self._encode(batch, self.model).view(rows, self.shape.texts, -1)
            return vectors[:, :count], vectors[:, count:]
        arrays = {name: batch[name].unflatten(0, (rows, -1)) for name in ENCODER_INPUTS}
        queries = {name: array[:, :count].flatten(0, 1) for name, array in arrays.items()}
        documents = {name: array[:, count:].flatten(0, 1) for name, array in arrays.items()}
        return (
            self._encode(queries, self.model).unflatten(0, (rows, -1)),
            self._encode(documents, self.documents).unflatten(0, (rows, -1)),
        )

    def _encode(self, batch: Batch, model: PreTrainedModel) -> Tensor:
        """Return mean-pooled text vectors, [texts, width] fp32."""
        return mean_pool(self.hidden_states(batch, packed=False, model=model), batch["segments"])


class RankingHead(nn.Module):
    """Computes candidate scores from their features."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        shape: RankerShape,
        width: int,
        settings: Interactions,
        scale: Sequence[tuple[float, float]],
    ) -> None:
        super().__init__()
        moments = torch.tensor(scale, dtype=torch.float32, device="cpu").view(-1, 2)
        self.register_buffer("mean", moments[:, 0].clone())
        self.register_buffer("std", moments[:, 1].clone())
        self.rows_per_feature = settings.buckets + 1
        table_rows = self.rows_per_feature * max(shape.categorical_features, 1)
        self.category_embedding = CategoryEmbedding(table_rows, settings.width)
        if not shape.categorical_features:
            self.category_embedding.requires_grad_(requires_grad=False)
        vectors = shape.query_texts + shape.document_texts
        similarities = shape.query_texts * shape.document_texts if width else 0
        features = vectors * width + similarities
        features += 2 * shape.numeric_features + shape.categorical_features * settings.width
        self.is_stacked = settings.structure == "stacked"
        self.cross = nn.ModuleDict(
            {
                str(layer): _build_cross_layer(features, settings)
                for layer in range(settings.cross_layers)
            }
        )
        self.deep = _build_deep_network(features, settings.hidden)
        deep_width = settings.hidden[-1] if settings.hidden else features
        is_parallel = settings.cross_layers and not self.is_stacked and settings.hidden
        cross_width = features if is_parallel else 0
        # Listwise and pairwise losses do not depend on a constant, so its gradient would be noise.
        self.score = nn.Linear(deep_width + cross_width, 1, bias=shape.calibrated)

    def forward(self, texts: list[Tensor], numbers: Tensor, categories: Tensor) -> Tensor:
        """Return scores, [rows, candidates]; each argument is [rows, candidates, features]."""
        parts = [*texts, *self._normalize(numbers)]
        if categories.shape[2]:
            index = torch.arange(categories.shape[2], device=categories.device)
            rows = categories + index * self.rows_per_feature
            parts.append(self.category_embedding(rows).flatten(2))
        dtype = self.score.weight.dtype
        features = torch.cat([part.to(dtype) for part in parts], 2)
        crossed = features
        for cross in self.cross.values():
            crossed = cross(features, crossed)
        if self.is_stacked or not len(self.cross):
            combined = self.deep(crossed)
        elif len(self.deep):
            combined = torch.cat([crossed, self.deep(features)], 2)
        else:
            combined = crossed
        scores: Tensor = self.score(combined)[..., 0]
        return scores

    def _normalize(self, numbers: Tensor) -> list[Tensor]:
        """Return standardized numbers, 0 where missing, and a table of which are missing."""
        missing = numbers.isnan()
        values = torch.where(missing, self.mean, numbers)
        return [(values - self.mean) / self.std, missing.to(numbers.dtype)]


class CategoryEmbedding(nn.Embedding):
    """Embedding table with small initial values, so that all features start alike."""

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        nn.init.normal_(self.weight, std=CATEGORY_STD)


class CrossLayer(nn.Module):
    """Full-rank cross layer: x0 * (W x + b) + x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Return the crossed features, [..., width]; `x0` is the first layer's input."""
        crossed: Tensor = x0 * self.linear(x) + x
        return crossed


class LowRankCrossLayer(nn.Module):
    """Low-rank cross layer: x + sum over experts of gate(x) * x0 * (U tanh(C tanh(V x)) + b)."""

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.down = nn.Parameter(torch.empty(experts, width, rank))
        self.inner = nn.Parameter(torch.empty(experts, rank, rank))
        self.up = nn.Parameter(torch.empty(experts, rank, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        nn.init.zeros_(self.bias)
        for weight in (self.down, self.inner, self.up):
            for expert in weight.data:
                nn.init.xavier_normal_(expert)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Return the crossed features, [..., width]; `x0` is the first layer's input."""
        low_rank = torch.einsum("...w,ewr->...er", x, self.down).tanh()
        low_rank = torch.einsum("...er,ers->...es", low_rank, self.inner).tanh()
        experts = torch.einsum("...er,erw->...ew", low_rank, self.up) + self.bias
        gates = self.gate(x).softmax(-1)
        crossed: Tensor = x0 * (gates[..., None] * experts).sum(-2) + x
        return crossed


def _build_cross_layer(width: int, settings: Interactions) -> nn.Module:
    if settings.rank is None:
        return CrossLayer(width)
    return LowRankCrossLayer(width, settings.rank, settings.experts)


def _build_deep_network(features: int, hidden: Sequence[int]) -> nn.Sequential:
    """Build a linear layer and a ReLU for each hidden width; empty without hidden widths."""
    layers = nn.Sequential()
    for inputs, outputs in pairwise([features, *hidden]):
        layers.append(nn.Linear(inputs, outputs))
        layers.append(nn.ReLU())
    return layers
