"""Learning to rank: score a query's candidates by texts and features."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from regauge.data.buckets import longest_text_histogram
from regauge.models.io_spec import InputSpec, RankingSpec
from regauge.models.settings import Interactions
from regauge.system.errors import DataError
from regauge.system.log import logger
from regauge.tasks import MetricSums, _quality, _retrieval
from regauge.tasks._fields import (
    TEXT_TOKENS,
    FieldsTask,
    check_field,
    field_histogram,
    label_range,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from regauge.data.batches import Arrays, MicrobatchPlan, OptionalRows, RandomKey
    from regauge.data.dataset import DatasetManifest, DatasetRows
    from regauge.data.loader import CollatorConfig
    from regauge.models.architectures import HeadKind
    from regauge.models.io_spec import OutputKind
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model
    from regauge.tasks._arrays import Texts


class Rank(FieldsTask):
    """Score a query's candidates by texts and features (rows with layout "groups")."""

    peer_names: ClassVar[tuple[str, ...]] = ("ranking", "reranker", "cross_encoder", "crossencoder")

    metrics_need_all_rows: ClassVar[bool] = True
    maximized: ClassVar[tuple[str, ...]] = ("ndcg", "mrr", "auc")
    layout: ClassVar[str] = "groups"
    module_needs_fields: ClassVar[bool] = True

    query: tuple[str, ...] = ("query",)
    """Query text fields."""
    document: tuple[str, ...] = ("document",)
    """Candidate text fields. Leave `query` and `document` empty to use features only."""
    numeric_features: tuple[str, ...] = ()
    """Numeric candidate features; they are standardized, and missing values become 0."""
    categorical_features: tuple[str, ...] = ()
    """Categorical candidate features; each value is hashed to an embedding."""
    label: str = "label"
    """Field with a candidate's relevance, 0 or more."""
    objective: Literal["pointwise", "pairwise", "listwise"] = "listwise"
    """Loss per candidate (cross-entropy), candidate pair (RankNet) or list (ListNet)."""
    ndcg_at: int = Field(default=10, ge=1)
    """Cutoff k for NDCG@k."""
    encoders: Literal["shared", "separate"] = "shared"
    """One encoder for all texts, or separate encoders for queries and candidates. Both start with
    the same weights; `optimizer.lr_multipliers` addresses the second one as `documents.`."""
    interactions: Interactions = Interactions()
    """Network that computes the score from the features."""

    @model_validator(mode="after")
    def _check_features(self) -> Rank:
        if bool(self.query) != bool(self.document):
            raise ValueError("query and document belong together; set both or neither")
        if not (self.query or self.numeric_features or self.categorical_features):
            raise ValueError(
                "a candidate has no features; set query and document, or numeric_features"
            )
        if self.encoders == "separate" and not self.query:
            raise ValueError('encoders = "separate" needs texts; set query and document')
        return self

    @property
    def head(self) -> HeadKind:
        return "none"

    def text_columns(self) -> tuple[str, ...]:
        return (*self.query, *self.document)

    def find_head(self, manifest: DatasetManifest) -> None:
        """Return None, because the network on the vectors has weights, too."""
        del manifest

    def count_other_parameters(self, width: int, encoder: int) -> int:
        """Count the parameters in the network, and in a second encoder.

        A cross layer with width w has w² + w parameters; one with low rank r and e experts has e (w
        + 2 w r + r²) + w.
        """
        network, num_features = self.interactions, len(self.categorical_features)
        features = len(self.text_columns()) * width + len(self.query) * len(self.document)
        features += 2 * len(self.numeric_features) + num_features * network.width
        table = (network.buckets + 1) * max(num_features, 1) * network.width
        cross = features * features + features
        if network.rank is not None:
            expert = features + 2 * features * network.rank + network.rank**2
            cross = network.experts * expert + features
        deep = sum(a * b + b for a, b in pairwise((features, *network.hidden)))
        scored = network.hidden[-1] if network.hidden else features
        if network.cross_layers and network.hidden and network.structure == "parallel":
            scored += features
        scored += self.objective == "pointwise"
        others = encoder if self.encoders == "separate" else 0
        return table + network.cross_layers * cross + deep + scored + others

    def default_rows(self) -> dict[str, Any]:
        """Group rows by one query; several query fields need `rows.group_by`."""
        group_by = {"group_by": self.query[0]} if len(self.query) == 1 else {}
        return {
            **super().default_rows(),
            **group_by,
            "fields": dict.fromkeys(self.text_columns(), TEXT_TOKENS),
            "shared": self.query,
            "floats": [self.label, *self.numeric_features],
            "categories": self.categorical_features,
        }

    def check_dataset(self, manifest: DatasetManifest) -> None:
        super().check_dataset(manifest)
        for name in self.query:
            if manifest.columns[name].max_group_size > 1:
                problem = f"'{name}' is a text of each candidate, not of the query"
                raise DataError(problem, "add it to rows.shared, or move it to task.document")
        for name in self.document:
            if manifest.columns[name].max_group_size == 1:
                problem = f"'{name}' is shared by the candidates of a query"
                raise DataError(problem, "move it to task.query")
        for name in (*self.numeric_features, self.label):
            check_field(manifest, name, ("integer", "float"))
        for name in self.categorical_features:
            check_field(manifest, name, ("category",))
        self._check_features_vary(manifest)
        self._check_labels(manifest)

    def length_histogram(self, manifest: DatasetManifest) -> tuple[int, ...]:
        """Count rows by the length of their longest text.

        Lengths in different fields are assumed independent.
        """
        names = self.text_columns()
        return longest_text_histogram([field_histogram(manifest, name) for name in names])

    @property
    def packs_texts(self) -> bool:
        return self.encoders == "shared"

    def sequences_per_row(self, manifest: DatasetManifest) -> int:
        return max(1, self._count_texts(manifest.columns[self.label].max_group_size))

    def slot_lengths(self, rows: DatasetRows, row_numbers: np.ndarray) -> list[int]:
        """Return the length of each row's longest text."""
        from regauge.data.batches import take_rows

        return [self._longest_text(row) for row in take_rows(rows, row_numbers)]

    def build_batch(
        self, rows: DatasetRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build arrays for texts, [rows x texts, length], features and labels.

        `numbers` and `categories` are [rows, candidates, features]; `labels` and `present` are
        [rows, candidates]. `present` is 0 for padding candidates.
        """
        import numpy as np

        from regauge.data.batches import take_rows
        from regauge.data.columns import find_embedding_rows

        records = take_rows(rows, plan.row_numbers)
        max_candidates = config.max_group_size
        table = partial(build_feature_table, records, max_candidates)
        hashes = table(self.categorical_features, np.int64(-1))
        return {
            **self._build_text_arrays(records, plan, key, config),
            "numbers": table(self.numeric_features, np.float32(np.nan)),
            "categories": find_embedding_rows(hashes, self.interactions.buckets),
            "labels": table((self.label,), np.float32(0))[..., 0],
            "present": build_candidate_mask(records, max_candidates, self.label),
            "slots": plan.slots,
            "real": (plan.row_numbers >= 0).astype(np.float32),
        }

    def output_kind(self) -> OutputKind:
        return "scores"

    def input_spec(self, manifest: DatasetManifest) -> InputSpec:
        """Read a query with one candidate per record."""
        texts = self.text_columns()
        return InputSpec(
            text_fields=texts,
            max_lengths=tuple(manifest.columns[name].max_length for name in texts),
            numeric_features=self.numeric_features,
            categorical_features=self.categorical_features,
            ranking=RankingSpec(
                num_query_texts=len(self.query),
                is_calibrated=self.objective == "pointwise",
                encoders=self.encoders,
                interactions=self.interactions,
            ),
        )

    def build_module(self, model: Model, manifest: DatasetManifest, seed: int) -> TextModule:
        from regauge.models.heads import read_head_buffers
        from regauge.models.ranker import Ranker, RankerShape
        from regauge.system.hub import resolve_model

        for name in (*self.numeric_features, self.label):
            check_field(manifest, name, ("integer", "float"))
        build = partial(self.build_model, model, manifest, seed)
        encoder, keys = build()
        document_encoder = build(keys=keys)[0] if self.encoders == "separate" else None
        shape = RankerShape(
            len(self.query),
            len(self.document),
            manifest.columns[self.label].max_group_size,
            len(self.numeric_features),
            len(self.categorical_features),
            calibrated=self.objective == "pointwise",
        )
        columns = [manifest.columns[name] for name in self.numeric_features]
        scale = [(column.mean or 0.0, column.std or 1.0) for column in columns]
        module = Ranker(encoder, keys, shape, self.interactions, scale, documents=document_encoder)
        if not self.query:  # no text reaches the encoder
            encoder.requires_grad_(requires_grad=False)
        if model.path is not None and model.weights == "pretrained":
            read_head_buffers(module, resolve_model(model.path))
        return module

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses, weights = self._losses(output["scores"], batch["labels"], batch["present"])
        return losses.sum(), weights.sum()

    def eval_outputs(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return scores, labels and `present`, concatenated to [rows, 3 x candidates]."""
        import torch

        return torch.cat([output["scores"], batch["labels"].float(), batch["present"]], 1)

    def metric_arrays(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `scores`, `labels` and `present`, all [rows, candidates]."""
        parts = outputs["vectors"].chunk(3, 1)
        return dict(zip(("scores", "labels", "present"), parts, strict=True))

    def metric_sums(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> MetricSums:
        """Return loss, AUC over all candidates, and NDCG and MRR.

        NDCG and MRR are means over the queries with a relevant candidate. Pointwise scores also
        have a calibration: the expected over the actual number of relevant candidates.
        """
        scores, labels, present = output["vectors"].cpu().chunk(3, 1)
        present = present * batch["real"].cpu()[:, None]
        losses, weights = self._losses(scores, labels, present)
        sums: MetricSums = {
            "loss": (losses.sum(), weights.sum()),
            **self._ranking_metrics(scores, labels, present),
        }
        if self.objective == "pointwise":
            expected = (scores.sigmoid() * present).sum()
            sums["calibration"] = (expected, ((labels > 0) * present).sum())
        return sums

    def baselines(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], records: Sequence[dict[str, Any]]
    ) -> dict[str, MetricSums]:
        """Return BM25 metrics, with document frequencies over all held-out candidates."""
        if not self.query:
            return {}
        _, labels, present = output["vectors"][: len(records)].cpu().chunk(3, 1)
        present = present * batch["real"][: len(records)].cpu()[:, None]
        queries = [" ".join(record[name] for name in self.query) for record in records]
        candidates = [
            [
                " ".join(texts)
                for texts in zip(*(record[name] for name in self.document), strict=True)
            ]
            for record in records
        ]
        distinct = dict.fromkeys(text for texts in candidates for text in texts)
        numbers = {text: number for number, text in enumerate(distinct)}
        index = _retrieval.Bm25Index(list(numbers))
        scores = labels.new_zeros(labels.shape)
        for cells, query, texts in zip(scores, queries, candidates, strict=True):
            cells[: len(texts)] = index.score([query])[0, [numbers[text] for text in texts]]
        return {"BM25": self._ranking_metrics(scores, labels, present)}

    def _ranking_metrics(self, scores: Tensor, labels: Tensor, present: Tensor) -> MetricSums:
        """Sum NDCG, MRR and AUC; the arguments are [rows, candidates]."""
        return {
            f"ndcg@{self.ndcg_at}": _quality.ndcg(scores, labels, present, self.ndcg_at),
            "mrr": _quality.mrr(scores, labels, present),
            "auc": _quality.auc(scores[present > 0], labels[present > 0] > 0),
        }

    def _losses(self, scores: Tensor, labels: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return weighted losses and their weights, [rows, candidates] or [rows]."""
        from regauge.tasks import _objectives

        ranking_loss: _objectives.RankingLoss = getattr(_objectives, self.objective)
        return ranking_loss(scores, labels, present)

    def _count_texts(self, candidates: int) -> int:
        return len(self.query) + candidates * len(self.document)

    def _build_text_arrays(
        self, records: OptionalRows, plan: MicrobatchPlan, key: RandomKey, config: CollatorConfig
    ) -> Arrays:
        """Build arrays for all texts; in a row, query texts precede candidate texts."""
        from regauge.tasks import _arrays

        count = max(1, self._count_texts(config.max_group_size))
        texts = [text for row in records for text in self._row_texts(row, count)]
        return _arrays.build_row_arrays(texts, plan, key, config)

    def _row_texts(self, row: dict[str, Any] | None, count: int) -> Texts:
        """Return a row's texts, padded with None to `count`."""
        if row is None or not self.query:
            return [None] * count
        queries: Texts = [row[name] for name in self.query]
        columns = [row[name] for name in self.document]
        documents = [texts[index] for index in range(len(columns[0])) for texts in columns]
        return queries + documents + [None] * (count - len(queries) - len(documents))

    def _longest_text(self, row: dict[str, Any] | None) -> int:
        if row is None:
            return 0
        lengths = [len(row[name]) for name in self.query]
        return max([0, *lengths, *(len(text) for name in self.document for text in row[name])])

    def _check_features_vary(self, manifest: DatasetManifest) -> None:
        """Raise DataError for a constant feature; warn about new values in held-out rows."""
        for name in (*self.numeric_features, *self.categorical_features):
            field = manifest.columns[name]
            absent = (
                field.num_missing.get("train", 0) and field.mean is None and not field.num_distinct
            )
            if absent or field.std == 0 or field.num_distinct == 1:
                reason = "is missing in every record" if absent else "is constant"
                raise DataError(f"feature '{name}' {reason}", "remove it from the task")
            if field.num_unseen:
                logger.warning(
                    "%d held-out values of '%s' do not occur in training", field.num_unseen, name
                )

    def _check_labels(self, manifest: DatasetManifest) -> None:
        lowest, highest = label_range(manifest, self.label)
        if lowest < 0:
            problem = f"labels in '{self.label}' include {lowest:g}"
            raise DataError(problem, "use relevance values from 0 upward")
        if not highest:
            raise DataError(
                f"no candidate is relevant: every '{self.label}' is 0",
                "label relevant candidates above 0",
            )


def build_feature_table(
    rows: OptionalRows, max_candidates: int, names: tuple[str, ...], missing: np.generic
) -> np.ndarray:
    """Return feature columns, [rows, candidates, features], filled up with `missing`.

    The array has the dtype of `missing`.
    """
    import numpy as np

    table = np.full((len(rows), max_candidates, len(names)), missing)
    for cells, row in zip(table, rows, strict=True):
        if row is not None:
            for column, name in enumerate(names):
                cells[: len(row[name]), column] = row[name]
    return table


def build_candidate_mask(rows: OptionalRows, max_candidates: int, name: str) -> np.ndarray:
    """Return 1 for each candidate and 0 for padding, [rows, candidates] fp32."""
    import numpy as np

    counts = np.array([0 if row is None else len(row[name]) for row in rows])
    return (np.arange(max_candidates) < counts[:, None]).astype(np.float32)
