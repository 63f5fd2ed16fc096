"""Contrastive learning of text vectors: each query finds its own document among all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from regauge.data.batches import taken
from regauge.data.buckets import added
from regauge.errors import SettingsError
from regauge.log import logger
from regauge.models import sentence_transformers
from regauge.models.io_spec import Fields
from regauge.tasks import Sums, _retrieval
from regauge.tasks._fields import FieldsTask, Texts, check_field, histogram

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from regauge.data.dataset import Manifest, Rows
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


class Contrastive(FieldsTask):
    """In-batch negatives over the global batch (InfoNCE, van den Oord et al., 2018)."""

    coupled: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    query: str = "query"
    """Field that is searched with."""
    document: str = "document"
    """Field that is found."""
    temperature: float = Field(default=0.05, gt=0)
    """Divides the cosines."""
    negatives: int | None = Field(default=None, ge=2)
    """Rows of a group whose texts are each other's negatives; by default the global batch."""
    directions: Literal["documents", "both"] = "both"
    """Whether queries choose among documents only, or documents among queries as well."""
    pooling: tuple[sentence_transformers.Mode, ...] = ()
    """What is taken of the last hidden states; by default as the weights say, or the mean."""

    def check(self, manifest: Manifest) -> None:
        super().check(manifest)
        for name in (self.query, self.document):
            check_field(manifest, name)

    def check_weights(self, folder: Path) -> None:
        told = sentence_transformers.told(folder)
        if told and told.pooling.dense:
            logger.warning("%s: no task trains the layers behind its pooling", folder)
        if told and told.reads.prompts:
            names = ", ".join(told.reads.prompts)
            logger.warning("%s: no task puts its prompts before a text: %s", folder, names)

    def check_rows(self, rows: int) -> None:
        if self.negatives is None or rows % self.negatives == 0:
            return
        fitting = [size for size in range(2, rows + 1) if rows % size == 0]
        nearest = sorted(fitting, key=lambda size: abs(size - (self.negatives or 0)))[:2]
        raise SettingsError(
            f"task.negatives = {self.negatives} does not divide batch.rows = {rows}",
            f"nearest that do: {', '.join(map(str, sorted(nearest)))}",
        )

    def lengths(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the lengths of queries and documents together."""
        found = [histogram(manifest, name) for name in (self.query, self.document)]
        return tuple(added(found).tolist())

    def slots_per_row(self) -> int:
        return 2

    def fields(self, manifest: Manifest) -> Fields:
        """Return that a record is one text, be it a query or a document."""
        limits = (manifest.fields[name].limit for name in (self.query, self.document))
        return Fields(limits=(max(limits),))

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.architectures import build
        from regauge.models.hub import at
        from regauge.models.modules import Encoder

        facts = manifest.tokenizer
        told = sentence_transformers.told(at(model.path)) if model.path else None
        usual = told.pooling if told else sentence_transformers.Pooling()
        pooling = sentence_transformers.Pooling(modes=self.pooling or usual.modes)
        return Encoder(*build(model, "none", facts.vocabulary, seed, facts.pad), pooling)

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss over the whole global batch: vectors are queries, then documents."""
        queries, documents, real = self._grouped(output["vectors"], batch["real"])
        losses = self._losses(queries, documents, real)
        if self.directions == "both":
            losses = (losses + self._losses(documents, queries, real)) / 2
        return (losses * real).sum(), real.sum()

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        """Return loss, recall and mean reciprocal rank of each query among all documents."""
        queries, documents = output["vectors"].chunk(2)
        real = batch["real"].chunk(2)[0]
        ranks = [
            _retrieval.ranks(queries[part] @ documents.T, part.start, real)
            for part in _retrieval.parts(len(real))
        ]
        return {"loss": self.loss(output, batch), **_retrieval.tally(ranks, real)}

    def rivals(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], texts: Sequence[dict[str, Any]]
    ) -> dict[str, Sums]:
        """Return what words alone find (BM25), and both together (reciprocal-rank fusion)."""
        count = len(texts)
        queries, documents = (half[:count].cpu() for half in output["vectors"].chunk(2))
        index = _retrieval.Words([text[self.document] for text in texts])
        alone: list[Tensor] = []
        together: list[Tensor] = []
        real = batch["real"][:count].cpu()
        for part in _retrieval.parts(count):
            words = index.scores([text[self.query] for text in texts[part]])
            both = _retrieval.fused(queries[part] @ documents.T, words)
            alone.append(_retrieval.ranks(words, part.start, real))
            together.append(_retrieval.ranks(both, part.start, real))
        return {
            "BM25": _retrieval.tally(alone, real),
            "fusion of both": _retrieval.tally(together, real),
        }

    def _grouped(self, vectors: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and documents, [groups, rows, width], and which are real, [groups, rows].

        The last group is filled up with rows that are not real.
        """
        from torch.nn.functional import pad

        queries, documents = vectors.chunk(2)
        real = real.chunk(2)[0]
        size = self.negatives or len(real)
        missing = -len(real) % size
        return (
            pad(queries, (0, 0, 0, missing)).unflatten(0, (-1, size)),
            pad(documents, (0, 0, 0, missing)).unflatten(0, (-1, size)),
            pad(real, (0, missing)).unflatten(0, (-1, size)),
        )

    def _losses(self, asked: Tensor, offered: Tensor, real: Tensor) -> Tensor:
        """Return the cross-entropy of choosing the own one in each group, [groups, rows]."""
        import torch
        from torch.nn.functional import cross_entropy

        own = torch.arange(real.shape[1], device=real.device).expand_as(real)
        losses = []
        for part in _retrieval.parts(real.shape[1]):
            right = own[:, part]
            scores = asked[:, part] @ offered.transpose(1, 2) / self.temperature
            absent = (real == 0)[:, None] & (right[..., None] != own[:, None])
            scores = scores.masked_fill(absent, torch.finfo(scores.dtype).min)
            found = cross_entropy(scores.flatten(0, 1), right.flatten(), reduction="none")
            losses.append(found.view_as(right))
        return torch.cat(losses, 1)

    def texts(
        self, rows: Rows, numbers: np.ndarray, parts: np.ndarray, special: tuple[int, ...] = ()
    ) -> Texts:
        del special
        names = (self.query, self.document)
        found = zip(taken(rows, numbers), parts, strict=True)
        return [None if row is None else row[names[part]] for row, part in found]
