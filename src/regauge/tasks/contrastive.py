"""Contrastive learning of text vectors: each query finds its own document among all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from regauge.data.batches import Piece, dropout_keys, padded
from regauge.data.shapes import fit, ladder
from regauge.errors import SettingsError
from regauge.registry import did_you_mean
from regauge.tasks import Sums, Task, _retrieval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from regauge.data.batches import Arrays, Draw
    from regauge.data.loader import Facts
    from regauge.data.shards import Manifest, Rows
    from regauge.models.settings import Model
    from regauge.models.text import TextModule


class Contrastive(Task):
    """In-batch negatives over the global batch (InfoNCE, van den Oord et al., 2018)."""

    coupled: ClassVar[bool] = True
    layout: ClassVar[Literal["packed", "fields"]] = "fields"

    query: str = "query"
    """Field that is searched with."""
    document: str = "document"
    """Field that is found."""
    temperature: float = Field(default=0.05, gt=0)
    """Divides the cosines."""
    negatives: Literal["documents", "both"] = "both"
    """Whether queries choose among documents only, or documents among queries as well."""
    shapes: int = Field(default=4, ge=1)
    """Most lengths that texts are padded to."""

    def check(self, manifest: Manifest) -> None:
        super().check(manifest)
        for name in (self.query, self.document):
            if name not in manifest.fields:
                remedy = did_you_mean(name, tuple(manifest.fields))
                raise SettingsError(f"the dataset has no field '{name}'", remedy)

    def ladder(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the lengths with the least padding over queries and documents together."""
        histograms = [
            counts
            for name in (self.query, self.document)
            for counts in manifest.fields[name].lengths.values()
        ]
        total = np.zeros(max(map(len, histograms)), np.int64)
        for counts in histograms:
            total[: len(counts)] += counts
        return ladder(tuple(total.tolist()), self.shapes)

    def texts_per_row(self) -> int:
        return 2

    def cut(
        self, rows: Rows, numbers: np.ndarray, microbatch_rows: int, ladder: tuple[int, ...]
    ) -> list[Piece]:
        """Sort all texts of a global batch by length, and cut; slots are queries, documents."""
        texts = self._texts(rows, numbers, np.repeat([0, 1], len(numbers)))
        lengths = np.array([1 if text is None else len(text) for text in texts])
        longest_first = np.argsort(-lengths, kind="stable")
        pieces = []
        for slots in longest_first.reshape(-1, 2 * microbatch_rows):
            parts, places = np.divmod(slots, len(numbers))
            length = fit(int(lengths[slots].max()), ladder)
            pieces.append(Piece(numbers[places], parts, slots, length))
        return pieces

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Return texts, [batch, length], with their slots in the global batch."""
        texts = self._texts(rows, piece.rows, piece.parts)
        lengths = np.array([1 if text is None else len(text) for text in texts])
        places = np.arange(piece.length, dtype=np.int32)
        return {
            "tokens": padded(texts, piece.length, facts.pad),
            "segments": (places < lengths[:, None]).astype(np.int32),
            "positions": np.broadcast_to(places, (len(texts), piece.length)).copy(),
            "keys": dropout_keys(piece, draw),
            "slots": piece.slots,
            "real": (piece.rows >= 0).astype(np.float32),
        }

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.build import build
        from regauge.models.text import Encoder

        return Encoder(*build(model, "none", manifest.tokenizer.vocabulary, seed))

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss over the whole global batch: vectors are queries, then documents."""
        from torch.nn.functional import cross_entropy

        scores, real, own = self._scores(output, batch)
        losses = cross_entropy(scores, own, reduction="none")
        if self.negatives == "both":
            losses = (losses + cross_entropy(scores.T, own, reduction="none")) / 2
        return (losses * real).sum(), real.sum()

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        """Return loss, recall and mean reciprocal rank of each query among all documents."""
        scores, real, _ = self._scores(output, batch)
        return {"loss": self.loss(output, batch), **_retrieval.tally(scores, real)}

    def rivals(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], texts: Sequence[dict[str, str]]
    ) -> dict[str, Sums]:
        """Return what words alone find (BM25), and both together (reciprocal-rank fusion)."""
        scores, real, _ = self._scores(output, batch)
        count = len(texts)
        queries = [text[self.query] for text in texts]
        words = _retrieval.bm25(queries, [text[self.document] for text in texts])
        both = _retrieval.fused(scores[:count, :count].cpu(), words)
        weight = real[:count].cpu()
        return {
            "BM25": _retrieval.tally(words, weight),
            "fusion of both": _retrieval.tally(both, weight),
        }

    def _scores(
        self, output: dict[str, Tensor], batch: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines over temperature [rows, rows], rows that are real, and own columns."""
        import torch

        queries, documents = output["vectors"].chunk(2)
        real = batch["real"].chunk(2)[0]
        scores = queries @ documents.T / self.temperature
        absent = (real == 0)[None, :]
        own = torch.arange(len(real), device=scores.device)
        diagonal = own[None, :] == own[:, None]
        scores = scores.masked_fill((absent | absent.T) & ~diagonal, torch.finfo(scores.dtype).min)
        return scores, real, own

    def _texts(self, rows: Rows, numbers: np.ndarray, parts: np.ndarray) -> list[np.ndarray | None]:
        names = (self.query, self.document)
        wanted = np.resize(numbers, len(parts))
        found = iter(rows.take(wanted[wanted >= 0]))
        return [
            next(found)[names[part]] if number >= 0 else None
            for number, part in zip(wanted, parts, strict=True)
        ]
