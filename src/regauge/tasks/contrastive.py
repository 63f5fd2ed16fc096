"""Contrastive learning of text embeddings from (query, document) pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from regauge.data.batches import TEXT_HASHES, hash_texts, take_rows
from regauge.data.buckets import sum_histograms
from regauge.errors import SettingsError
from regauge.log import logger
from regauge.models import sentence_transformers
from regauge.models.io_spec import InputSpec
from regauge.tasks import MetricSums, _retrieval
from regauge.tasks._fields import (
    FieldsTask,
    Texts,
    build_slot_arrays,
    check_field,
    field_histogram,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


class Contrastive(FieldsTask):
    """Train embeddings with in-batch negatives (InfoNCE, van den Oord et al., 2018).

    The negatives of a query are the documents of other rows, except those with an equal query or an
    equal document. The metrics rank each different document once.
    """

    peer_names: ClassVar[tuple[str, ...]] = (
        "embed",
        "embedding",
        "embeddings",
        "retrieval",
        "multiple_negatives_ranking",
    )

    needs_global_batch: ClassVar[bool] = True
    metrics_need_all_rows: ClassVar[bool] = True

    query: str = "query"
    """Text field of the query."""
    document: str = "document"
    """Text field of the document that matches the query."""
    temperature: float = Field(default=0.05, gt=0)
    """Cosine similarities are divided by this."""
    negatives_group_size: int | None = Field(default=None, ge=2)
    """Rows whose texts are negatives of each other; by default the global batch."""
    symmetric: bool = True
    """Also rank the queries for each document, not only the documents for each query."""
    pooling: tuple[sentence_transformers.PoolingMode, ...] = ()
    """Pooling of the last hidden states; by default as in the weights folder, or the mean."""

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        for name in (self.query, self.document):
            check_field(manifest, name)

    def check_weights(self, folder: Path) -> None:
        encoder = sentence_transformers.read_if_present(folder)
        if encoder and encoder.pooling.dense:
            logger.warning("%s: the dense layers after the pooling are not trained", folder)
        if encoder and encoder.tokenization.prompts:
            names = ", ".join(encoder.tokenization.prompts)
            logger.warning("%s: training adds no prompts to the texts: %s", folder, names)

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

    def length_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Return the number of queries and documents by length."""
        histograms = [field_histogram(manifest, name) for name in (self.query, self.document)]
        return tuple(sum_histograms(histograms).tolist())

    def slots_per_row(self) -> int:
        return 2

    def read_texts(
        self,
        rows: DatasetRows,
        row_numbers: np.ndarray,
        text_numbers: np.ndarray,
        special: tuple[int, ...] = (),
    ) -> Texts:
        """Return the query of a row for text number 0, and its document for 1."""
        del special
        names = (self.query, self.document)
        records = zip(take_rows(rows, row_numbers), text_numbers, strict=True)
        return [None if row is None else row[names[number]] for row, number in records]

    def input_spec(self, manifest: DatasetManifest) -> InputSpec:
        """Return that a record is one text, either a query or a document."""
        limits = (manifest.columns[name].max_length for name in (self.query, self.document))
        return InputSpec(max_lengths=(max(limits),))

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.architectures import build_model
        from regauge.models.hub import resolve_model
        from regauge.models.modules import Encoder

        folder = resolve_model(model.path) if model.path else None
        saved = sentence_transformers.read_if_present(folder) if folder else None
        default = saved.pooling if saved else sentence_transformers.Pooling()
        pooling = sentence_transformers.Pooling(modes=self.pooling or default.modes)
        vocab_size, pad_id = manifest.tokenizer.vocab_size, manifest.tokenizer.pad_token_id
        return Encoder(*build_model(model, "none", vocab_size, seed, pad_id), pooling)

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build the token arrays of texts, with the hashes that identify equal texts."""
        texts = self.read_texts(rows, plan.row_numbers, plan.text_numbers, config.special_ids)
        return {**build_slot_arrays(texts, plan, key, config), TEXT_HASHES: hash_texts(texts)}

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of the global batch; `vectors` are all queries, then all documents."""
        queries, documents = self._split_into_groups(output["vectors"])
        hashes = self._split_into_groups(batch[TEXT_HASHES])
        real, _ = self._split_into_groups(batch["real"][:, None])
        real = real[..., 0]
        losses = self._losses(queries, documents, real, hashes)
        if self.symmetric:
            losses = (losses + self._losses(documents, queries, real, hashes)) / 2
        return (losses * real).sum(), real.sum()

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return loss, recall and mean reciprocal rank of each query among all documents."""
        queries, documents = output["vectors"].chunk(2)
        real = batch["real"].chunk(2)[0]
        query_hashes, document_hashes = batch[TEXT_HASHES].chunk(2)
        corpus = _retrieval.PairedCorpus(query_hashes, document_hashes, real)
        ranks = [
            corpus.rank(queries[part] @ documents.T, part)
            for part in _retrieval.query_slices(len(real))
        ]
        return {"loss": self.loss(output, batch), **_retrieval.retrieval_metrics(ranks, real)}

    def baselines(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], records: Sequence[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Return the metrics of BM25, and of its reciprocal rank fusion with the embeddings."""
        count = len(records)
        queries, documents = (half[:count].cpu() for half in output["vectors"].chunk(2))
        query_hashes, document_hashes = batch[TEXT_HASHES].chunk(2)
        real = batch["real"][:count].cpu()
        corpus = _retrieval.PairedCorpus(
            query_hashes[:count].cpu(), document_hashes[:count].cpu(), real
        )
        index = _retrieval.Bm25Index([record[self.document] for record in records])
        bm25_ranks: list[Tensor] = []
        fusion_ranks: list[Tensor] = []
        for part in _retrieval.query_slices(count):
            bm25_scores = index.score([record[self.query] for record in records[part]])
            scores = queries[part] @ documents.T
            fused = _retrieval.fuse_scores(scores, bm25_scores, corpus.is_document)
            bm25_ranks.append(corpus.rank(bm25_scores, part))
            fusion_ranks.append(corpus.rank(fused, part))
        return {
            "BM25": _retrieval.retrieval_metrics(bm25_ranks, real),
            "reciprocal rank fusion": _retrieval.retrieval_metrics(fusion_ranks, real),
        }

    def _split_into_groups(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of queries and of documents, each [groups, rows, width].

        The last group is filled up with zeros.
        """
        from torch.nn.functional import pad

        halves = columns.chunk(2)
        size = self.negatives_group_size or len(halves[0])
        missing = -len(halves[0]) % size
        queries, documents = (
            pad(half, (0, 0, 0, missing)).unflatten(0, (-1, size)) for half in halves
        )
        return queries, documents

    def _losses(
        self, queries: Tensor, documents: Tensor, real: Tensor, hashes: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the cross-entropy of each query over the documents of its group, [groups, rows].

        The document of query i is document i. Padding rows are no negatives, and neither are rows
        with the same query or the same document.
        """
        import torch
        from torch.nn.functional import cross_entropy

        indices = torch.arange(real.shape[1], device=real.device).expand_as(real)
        losses = []
        for part in _retrieval.query_slices(real.shape[1]):
            targets = indices[:, part]
            scores = queries[:, part] @ documents.transpose(1, 2) / self.temperature
            is_positive = targets[..., None] == indices[:, None]
            is_excluded = (real == 0)[:, None]
            for text_hashes in hashes:
                is_excluded = is_excluded | _retrieval.find_equal(text_hashes, part)
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(is_excluded & ~is_positive, lowest)
            nll = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
            losses.append(nll.view_as(targets))
        return torch.cat(losses, 1)
