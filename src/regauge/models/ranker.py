"""A ranker: texts through an encoder, then explicit and implicit interactions of all features.

Explicit ones are the crosses of DCN-v2 (Wang et al., 2021, "DCN V2: Improved Deep & Cross
Network"), of full rank (equation 1) or as a mixture of experts of low rank (equations 3 to 5);
implicit ones a deep network, beside the crosses or behind them.
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

READ = ("tokens", "segments", "positions", "keys")
"""What an encoder reads of a batch."""
SPREAD = 0.05
"""Standard deviation of the embeddings of categories before training."""


class Form(NamedTuple):
    """What a row holds: texts of the query, and of each of its candidates texts and values."""

    queries: int
    documents: int
    candidates: int
    numbers: int
    categories: int
    calibrated: bool
    """Whether scores are logits of a probability, and not an order alone."""

    @property
    def texts(self) -> int:
        """Texts of a row: those of the query, then those of each candidate."""
        return self.queries + self.candidates * self.documents


class Ranker(TextModule):
    """Scores the candidates of each row.

    Beside the texts, [rows x texts, length], a batch holds `numbers`, [rows, candidates, numbers]
    fp32 with NaN where one is missing, and `categories`, [rows, candidates, categories] int64,
    buckets from 1 and 0 where one is missing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        keys: DropoutKeys,
        form: Form,
        settings: Interactions,
        scale: Sequence[tuple[float, float]],
        *,
        documents: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(model, keys)
        self.documents = documents
        """What reads the texts of candidates, where that is not what reads the query's."""
        self.form = form
        self.reads = form.texts > 0
        width = model.config.hidden_size if self.reads else 0
        self.head = Head(form, width, settings, scale)

    def forward(self, batch: Batch) -> Batch:
        """Return `scores`, [rows, candidates] fp32."""
        rows = batch["numbers"].shape[0]
        texts = [self._texts(batch, rows)] if self.reads else []
        return {"scores": self.head(texts, batch["numbers"], batch["categories"]).float().clone()}

    def _texts(self, batch: Batch, rows: int) -> Tensor:
        """Return what is known of each candidate by its texts, [rows, candidates, features]."""
        form = self.form
        if self.documents is None:
            vectors = self._vectors(batch, self.model).view(rows, form.texts, -1)
            asked, offered = vectors[:, : form.queries], vectors[:, form.queries :]
        else:
            both = {name: batch[name].unflatten(0, (rows, -1)) for name in READ}
            queries = {name: each[:, : form.queries].flatten(0, 1) for name, each in both.items()}
            shown = {name: each[:, form.queries :].flatten(0, 1) for name, each in both.items()}
            asked = self._vectors(queries, self.model).unflatten(0, (rows, -1))
            offered = self._vectors(shown, self.documents).unflatten(0, (rows, -1))
        offered = offered.view(rows, form.candidates, form.documents, -1)
        asked = asked[:, None].expand(-1, form.candidates, -1, -1)
        alike = cosine_similarity(asked[:, :, :, None], offered[:, :, None], dim=-1)
        everything = torch.cat([asked, offered], 2)
        normal = layer_norm(everything, everything.shape[-1:])
        return torch.cat([normal.flatten(2), alike.flatten(2)], 2)

    def _vectors(self, batch: Batch, model: PreTrainedModel) -> Tensor:
        """Return what an encoder makes of texts, [texts, width] fp32."""
        return mean_pool(self.hidden(batch, packed=False, model=model), batch["segments"])


class Head(nn.Module):
    """From the features of candidates to their scores."""

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        form: Form,
        width: int,
        settings: Interactions,
        scale: Sequence[tuple[float, float]],
    ) -> None:
        super().__init__()
        moments = torch.tensor(scale, dtype=torch.float32, device="cpu").view(-1, 2)
        self.register_buffer("mean", moments[:, 0].clone())
        self.register_buffer("deviation", moments[:, 1].clone())
        self.buckets = settings.buckets + 1
        self.categories = Categories(self.buckets * max(form.categories, 1), settings.width)
        if not form.categories:
            self.categories.requires_grad_(requires_grad=False)
        texts = form.queries + form.documents
        features = texts * width + (form.queries * form.documents if width else 0)
        features += 2 * form.numbers + form.categories * settings.width
        self.stacked = settings.structure == "stacked"
        self.crosses = nn.ModuleDict(
            {str(layer): _cross(features, settings) for layer in range(settings.crosses)}
        )
        self.deep = _deep(features, settings.hidden)
        last = settings.hidden[-1] if settings.hidden else features
        beside = features if settings.crosses and not self.stacked and settings.hidden else 0
        # Losses over lists and pairs see no constant: its gradient would be rounding alone.
        self.score = nn.Linear(last + beside, 1, bias=form.calibrated)

    def forward(self, texts: list[Tensor], numbers: Tensor, categories: Tensor) -> Tensor:
        """Return [rows, candidates]; each of the arguments is [rows, candidates, …]."""
        parts = [*texts, *self._numbers(numbers)]
        if categories.shape[2]:
            first = torch.arange(categories.shape[2], device=categories.device) * self.buckets
            parts.append(self.categories(categories + first).flatten(2))
        dtype = self.score.weight.dtype
        features = torch.cat([part.to(dtype) for part in parts], 2)
        crossed = features
        for cross in self.crosses.values():
            crossed = cross(features, crossed)
        if self.stacked or not len(self.crosses):
            found = self.deep(crossed)
        elif len(self.deep):
            found = torch.cat([crossed, self.deep(features)], 2)
        else:
            found = crossed
        scores: Tensor = self.score(found)[..., 0]
        return scores

    def _numbers(self, numbers: Tensor) -> list[Tensor]:
        """Return normalised numbers, 0 where one is missing, and which ones are."""
        missing = numbers.isnan()
        known = torch.where(missing, self.mean, numbers)
        return [(known - self.mean) / self.deviation, missing.to(numbers.dtype)]


class Categories(nn.Embedding):
    """Embeddings that begin small, so that features begin alike."""

    def reset_parameters(self) -> None:
        """Draw the weights before training."""
        nn.init.normal_(self.weight, std=SPREAD)


class Cross(nn.Module):
    """x0 * (W x + b) + x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, width)

    def forward(self, first: Tensor, here: Tensor) -> Tensor:
        """Return [..., width]; `first` is what the first layer was given."""
        crossed: Tensor = first * self.weight(here) + here
        return crossed


class LowRankCross(nn.Module):
    """The sum over experts of gate(x) * x0 * (U tanh(C tanh(V x)) + b), and x."""

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.down = nn.Parameter(torch.empty(experts, width, rank))
        self.inner = nn.Parameter(torch.empty(experts, rank, rank))
        self.up = nn.Parameter(torch.empty(experts, rank, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights before training."""
        nn.init.zeros_(self.bias)
        for weight in (self.down, self.inner, self.up):
            for expert in weight.data:
                nn.init.xavier_normal_(expert)

    def forward(self, first: Tensor, here: Tensor) -> Tensor:
        """Return [..., width]; `first` is what the first layer was given."""
        low = torch.einsum("...w,ewr->...er", here, self.down).tanh()
        low = torch.einsum("...er,ers->...es", low, self.inner).tanh()
        each = torch.einsum("...er,erw->...ew", low, self.up) + self.bias
        gates = self.gate(here).softmax(-1)
        crossed: Tensor = first * (gates[..., None] * each).sum(-2) + here
        return crossed


def _cross(width: int, settings: Interactions) -> nn.Module:
    if settings.rank is None:
        return Cross(width)
    return LowRankCross(width, settings.rank, settings.experts)


def _deep(features: int, hidden: Sequence[int]) -> nn.Sequential:
    """Return linear layers with a ReLU behind each; none for no width."""
    layers = nn.Sequential()
    for before, after in pairwise([features, *hidden]):
        layers.append(nn.Linear(before, after))
        layers.append(nn.ReLU())
    return layers
