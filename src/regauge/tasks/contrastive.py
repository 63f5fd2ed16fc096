"""Contrastive learning of text vectors: each query finds its own document among all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from regauge.data.batches import Piece, dropout_keys, padded
from regauge.data.shapes import fit, ladder, real_share
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
    negatives: int | None = Field(default=None, ge=2)
    """Rows of a group whose texts are each other's negatives; by default the global batch."""
    directions: Literal["documents", "both"] = "both"
    """Whether queries choose among documents only, or documents among queries as well."""
    shapes: int = Field(default=4, ge=1)
    """Most lengths that texts are padded to."""

    def check(self, manifest: Manifest) -> None:
        super().check(manifest)
        for name in (self.query, self.document):
            if name not in manifest.fields:
                remedy = did_you_mean(name, tuple(manifest.fields))
                raise SettingsError(f"the dataset has no field '{name}'", remedy)

    def check_rows(self, rows: int) -> None:
        if self.negatives is None or rows % self.negatives == 0:
            return
        fitting = [size for size in range(2, rows + 1) if rows % size == 0]
        nearest = sorted(fitting, key=lambda size: abs(size - (self.negatives or 0)))[:2]
        raise SettingsError(
            f"task.negatives = {self.negatives} does not divide batch.rows = {rows}",
            f"nearest that do: {', '.join(map(str, sorted(nearest)))}",
        )

    def ladder(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the lengths with the least padding over queries and documents together."""
        return ladder(self._lengths(manifest), self.shapes)

    def real_share(self, manifest: Manifest) -> float:
        """Return the share where every text has its own rung: that of batches of one length."""
        return real_share(self._lengths(manifest), self.ladder(manifest))

    def _lengths(self, manifest: Manifest) -> tuple[int, ...]:
        """Return how many texts of a row have each length."""
        histograms = [
            counts
            for name in (self.query, self.document)
            for counts in manifest.fields[name].lengths.values()
        ]
        total = np.zeros(max(map(len, histograms)), np.int64)
        for counts in histograms:
            total[: len(counts)] += counts
        return tuple(total.tolist())

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

        facts = manifest.tokenizer
        return Encoder(*build(model, "none", facts.vocabulary, seed, facts.pad))

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
        self, output: dict[str, Tensor], batch: dict[str, Tensor], texts: Sequence[dict[str, str]]
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

    def _texts(self, rows: Rows, numbers: np.ndarray, parts: np.ndarray) -> list[np.ndarray | None]:
        names = (self.query, self.document)
        wanted = np.resize(numbers, len(parts))
        found = iter(rows.take(wanted[wanted >= 0]))
        return [
            next(found)[names[part]] if number >= 0 else None
            for number, part in zip(wanted, parts, strict=True)
        ]
