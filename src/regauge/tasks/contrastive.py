"""Contrastive learning: text embeddings from queries with their documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from regauge.system.errors import SettingsError
from regauge.tasks import TEXT_HASHES, MetricSums, _retrieval
from regauge.tasks._embeddings import DOCUMENT, QUERY, EmbeddingTask, measure_vectors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.io_spec import ModelHead
    from regauge.models.modules import Encoder
    from regauge.models.settings import Model
    from regauge.tasks._negatives import TextGroups


class Contrastive(EmbeddingTask):
    """Train embeddings with in-batch negatives (InfoNCE, van den Oord et al., 2018).

    A query's negatives are the documents in other rows, except those with an equal query or an
    equal document, and the hard negatives in all rows. If a row has several documents, its loss is
    the mean over them (Khosla et al., 2020, L_out), and they are not negatives for its query. The
    metrics rank each different text once.
    """

    peer_names: ClassVar[tuple[str, ...]] = (
        "embed",
        "embedding",
        "embeddings",
        "retrieval",
        "multiple_negatives_ranking",
        "multiplenegativesrankingloss",
        "cachedmultiplenegativesrankingloss",
        "matryoshkaloss",
        "infonce",
        "simcse",
    )
    maximized: ClassVar[tuple[str, ...]] = ("recall", "mrr")

    query: str = "query"
    """Query text field."""
    document: str | Annotated[tuple[str, ...], Field(min_length=1)] = "document"
    """Text field, or fields, with a document that matches the query."""
    negatives: tuple[str, ...] = ()
    """Hard negative text fields: documents that do not match the query."""
    temperature: float = Field(default=0.05, gt=0)
    """Cosine similarities are divided by this."""
    negatives_group_size: int | None = Field(default=None, ge=2)
    """Rows whose texts are each other's negatives; by default the global batch."""
    symmetric: bool = True
    """Also rank the queries for each document, not only the documents for each query."""
    matryoshka_dims: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Sizes to which vectors may be truncated; the largest is the full size. The loss is summed
    over all sizes (Kusupati et al., 2022)."""

    @model_validator(mode="after")
    def _check_matryoshka_dims(self) -> Contrastive:
        if len(set(self.matryoshka_dims)) < len(self.matryoshka_dims):
            raise ValueError("matryoshka_dims has a number twice; remove one")
        return self

    def document_columns(self) -> tuple[str, ...]:
        """Return the document fields that match the query."""
        return (self.document,) if isinstance(self.document, str) else self.document

    def text_columns(self) -> tuple[str, ...]:
        return (self.query, *self.document_columns(), *self.negatives)

    def prompt_columns(self) -> dict[str, tuple[str, ...]]:
        return {QUERY: (self.query,), DOCUMENT: (*self.document_columns(), *self.negatives)}

    def check_global_batch(self, num_rows: int) -> None:
        group_size = self.negatives_group_size
        if group_size is None or num_rows % group_size == 0:
            return
        divisors = [size for size in range(2, num_rows + 1) if num_rows % size == 0]
        nearest = sorted(divisors, key=lambda size: abs(size - group_size))[:2]
        raise SettingsError(
            f"task.negatives_group_size = {group_size} does not divide batch.rows = {num_rows}",
            f"nearest divisors: {', '.join(map(str, sorted(nearest)))}",
        )

    def find_head(self, manifest: DatasetManifest) -> ModelHead | None:
        return None if self.matryoshka_dims else super().find_head(manifest)

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> Encoder:
        module = super().build_module(model, manifest, seed)
        size = measure_vectors(module)
        if self.matryoshka_dims and max(self.matryoshka_dims) != size:
            raise SettingsError(
                f"the largest of task.matryoshka_dims is {max(self.matryoshka_dims)}, but the"
                f" vectors have {size} dimensions",
                f"make {size} the largest",
            )
        return module

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build token arrays, with hashes that identify equal texts."""
        from regauge.data.batches import hash_texts
        from regauge.tasks import _arrays

        texts = self.read_texts(rows, plan.row_numbers, plan.text_numbers, config.special_ids)
        return {
            **_arrays.build_slot_arrays(texts, plan, key, config),
            TEXT_HASHES: hash_texts(texts),
        }

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        import torch

        from regauge.tasks import _negatives

        hashes = self._group_texts(batch[TEXT_HASHES])
        real = self._group_texts(batch["real"][:, None]).query[..., 0]
        embeddings = [
            self._group_texts(_truncate(output["vectors"], dims))
            for dims in self.matryoshka_dims or (output["vectors"].shape[1],)
        ]
        losses = []
        for part in _retrieval.query_slices(real.shape[1]):
            excluded = _negatives.find_excluded_candidates(hashes, real, part)
            terms = [self._query_losses(texts, excluded, part) for texts in embeddings]
            if self.symmetric:
                masks = _negatives.find_excluded_queries(hashes, real, part)
                backward = [self._document_losses(texts, masks, part) for texts in embeddings]
                terms = [(left + right) / 2 for left, right in zip(terms, backward, strict=True)]
            losses.append(torch.stack(terms).sum(0))
        return (torch.cat(losses, 1) * real).sum(), real.sum()

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return loss, recall and mean reciprocal rank for each query's documents among all texts.

        Metrics for truncated vectors have their size as suffix, such as `mrr_dim64`.
        """
        real = batch["real"].chunk(self.slots_per_row())[0]
        hashes, width = batch[TEXT_HASHES], output["vectors"].shape[1]
        corpus = _retrieval.PairedCorpus(
            hashes[: len(real)], hashes[len(real) :], real, len(self.document_columns())
        )
        sums: MetricSums = {"loss": self.loss(output, batch)}
        for dims in (width, *(dims for dims in self.matryoshka_dims if dims < width)):
            vectors = _truncate(output["vectors"], dims)
            queries, texts = vectors[: len(real)], vectors[len(real) :]
            ranks = [
                corpus.rank_documents(queries[part] @ texts.T, part)
                for part in _retrieval.query_slices(len(real))
            ]
            suffix = "" if dims == width else f"_dim{dims}"
            metrics = _retrieval.retrieval_metrics(ranks, real)
            sums |= {f"{name}{suffix}": value for name, value in metrics.items()}
        return sums

    def baselines(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], records: Sequence[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Return metrics for BM25, and its reciprocal rank fusion with the embeddings."""
        import torch

        count, names = len(records), self.text_columns()[1:]
        queries, *texts = self._select_rows(output["vectors"], count)
        query_hashes, *text_hashes = self._select_rows(batch[TEXT_HASHES], count)
        real = batch["real"][:count].cpu()
        corpus = _retrieval.PairedCorpus(
            query_hashes, torch.cat(text_hashes), real, len(self.document_columns())
        )
        index = _retrieval.Bm25Index([record[name] for name in names for record in records])
        bm25_ranks: list[Tensor] = []
        fusion_ranks: list[Tensor] = []
        for part in _retrieval.query_slices(count):
            bm25_scores = index.score([record[self.query] for record in records[part]])
            scores = queries[part] @ torch.cat(texts).T
            fused = _retrieval.fuse_scores(scores, bm25_scores, corpus.is_document)
            bm25_ranks.append(corpus.rank_documents(bm25_scores, part))
            fusion_ranks.append(corpus.rank_documents(fused, part))
        return {
            "BM25": _retrieval.retrieval_metrics(bm25_ranks, real),
            "reciprocal rank fusion": _retrieval.retrieval_metrics(fusion_ranks, real),
        }

    def _select_rows(self, columns: Tensor, count: int) -> list[Tensor]:
        """Select the first rows for each text number, [count, width] each, on the CPU."""
        return [part[:count].cpu() for part in columns.chunk(self.slots_per_row())]

    def _group_texts(self, columns: Tensor) -> TextGroups:
        """Arrange text columns by text number and group; the last group ends with zeros."""
        from torch.nn.functional import pad

        from regauge.tasks._negatives import TextGroups

        parts = columns.chunk(self.slots_per_row())
        size = self.negatives_group_size or len(parts[0])
        missing = -len(parts[0]) % size
        query, *texts = (pad(part, (0, 0, 0, missing)).unflatten(0, (-1, size)) for part in parts)
        count = len(self.document_columns())
        return TextGroups(query, tuple(texts[:count]), tuple(texts[count:]))

    def _query_losses(self, texts: TextGroups, excluded: Tensor, queries: slice) -> Tensor:
        """Return the losses of some queries over their group's candidates, [groups, queries].

        `excluded`, [groups, queries, texts], is true for candidates that are not negatives.
        """
        import torch

        scores = texts.query[:, queries] @ texts.candidates.transpose(1, 2) / self.temperature
        num_rows = texts.query.shape[1]
        rows = torch.arange(num_rows, device=scores.device)[queries]
        losses = [
            _cross_entropy(scores, excluded, rows + number * num_rows)
            for number in range(len(texts.documents))
        ]
        return torch.stack(losses).mean(0)

    def _document_losses(
        self, texts: TextGroups, excluded: tuple[Tensor, ...], rows: slice
    ) -> Tensor:
        """Return the losses of some rows' documents over the queries, [groups, rows].

        For each document in a row, `excluded` masks the queries that are not negatives.
        """
        import torch

        targets = torch.arange(texts.query.shape[1], device=texts.query.device)[rows]
        losses = [
            _cross_entropy(
                document[:, rows] @ texts.query.transpose(1, 2) / self.temperature, mask, targets
            )
            for document, mask in zip(texts.documents, excluded, strict=True)
        ]
        return torch.stack(losses).mean(0)


def _truncate(vectors: Tensor, dims: int) -> Tensor:
    """Truncate vectors to their first dimensions, and scale them to length 1."""
    from torch.nn.functional import normalize

    return vectors if dims == vectors.shape[-1] else normalize(vectors[..., :dims], dim=-1)


def _cross_entropy(scores: Tensor, excluded: Tensor, targets: Tensor) -> Tensor:
    """Return a target's cross-entropy among the texts not excluded, [groups, rows].

    Scores and `excluded` are [groups, rows, texts]; targets are [rows].
    """
    import torch
    from torch.nn.functional import cross_entropy

    is_target = targets[:, None] == torch.arange(scores.shape[2], device=scores.device)
    masked = scores.masked_fill(excluded & ~is_target, torch.finfo(scores.dtype).min)
    expanded = targets.expand(scores.shape[:2])
    nll = cross_entropy(masked.flatten(0, 1), expanded.flatten(), reduction="none")
    return nll.view(scores.shape[:2])
