"""Ranking: which of a query's candidates come first, by their texts and their features."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from regauge.data.batches import Piece, taken
from regauge.data.buckets import fit
from regauge.data.columns import buckets
from regauge.errors import DataError
from regauge.log import logger
from regauge.models.io_spec import Fields, Ranking
from regauge.models.settings import Interactions
from regauge.tasks import Sums, _quality, _ranking, _retrieval
from regauge.tasks._fields import (
    FieldsTask,
    Texts,
    check_field,
    check_label,
    histogram,
    text_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from regauge.data.batches import Arrays, Draw, Found
    from regauge.data.dataset import Manifest, Rows
    from regauge.data.loader import Facts
    from regauge.models.io_spec import Answers
    from regauge.models.modules import TextModule
    from regauge.models.settings import Model


class Rank(FieldsTask):
    """Score the candidates of a query (rows of layout "groups") by texts, numbers, categories."""

    whole: ClassVar[bool] = True
    layout: ClassVar[str] = "groups"
    module_needs_fields: ClassVar[bool] = True

    query: tuple[str, ...] = ("query",)
    """Text fields of the query, which its candidates share."""
    document: tuple[str, ...] = ("document",)
    """Text fields of a candidate; with none, and no query, no text is read."""
    numbers: tuple[str, ...] = ()
    """Numeric features of a candidate: normalised, and 0 where one is missing."""
    categories: tuple[str, ...] = ()
    """Categorical features of a candidate: an embedding of the hash of each."""
    label: str = "label"
    """Field that says how relevant a candidate is, from 0 on."""
    objective: Literal["pointwise", "pairwise", "listwise"] = "listwise"
    """Cross-entropy of each candidate, of each pair, or of the list (softmax over a query's)."""
    at: int = Field(default=10, ge=1)
    """Candidates that NDCG looks at."""
    encoder: Literal["whole", "frozen"] | Annotated[int, Field(ge=0)] = Field(
        default="whole", union_mode="left_to_right"
    )
    """What is trained of the text encoder: all, nothing, or its last blocks, so many."""
    encoders: Literal["shared", "apart"] = "shared"
    """Whether one encoder reads all texts, or one those of queries and another those of candidates;
    both begin alike, and the second's weights are named `documents.` in `optimizer.shares`."""
    interactions: Interactions = Interactions()
    """What is made of the features."""

    @model_validator(mode="after")
    def _reads_something(self) -> Rank:
        if bool(self.query) != bool(self.document):
            raise ValueError("query and document are read together: set both, or neither")
        if not (self.query or self.numbers or self.categories):
            raise ValueError("a candidate has no feature: set query and document, or numbers")
        if self.encoders == "apart" and not self.query:
            raise ValueError("no text is read, and encoders are apart: set query and document")
        return self

    def check(self, manifest: Manifest) -> None:
        super().check(manifest)
        for name in (*self.query, *self.document):
            check_field(manifest, name)
        for name in self.query:
            if manifest.fields[name].members > 1:
                problem = f"'{name}' is a text of each candidate, and not of the query"
                raise DataError(problem, "name it in rows.shared, or in task.document")
        for name in self.document:
            if manifest.fields[name].members == 1:
                problem = f"'{name}' is shared by the candidates of a query"
                raise DataError(problem, "name it in task.query")
        for name in (*self.numbers, self.label):
            check_field(manifest, name, ("number", "real"))
        for name in self.categories:
            check_field(manifest, name, ("category",))
        self._check_values(manifest)

    def lengths(self, manifest: Manifest) -> tuple[int, ...]:
        """Return the longest text of each row, as if those of its fields met at random."""
        names = (*self.query, *self.document)
        return _ranking.longest([histogram(manifest, name) for name in names])

    def texts_per_row(self, manifest: Manifest) -> int:
        return max(1, self._texts_of(manifest.fields[self.label].members))

    def cut(
        self, rows: Rows, numbers: np.ndarray, microbatch_rows: int, ladder: tuple[int, ...]
    ) -> list[Piece]:
        """Sort the rows of a global batch by their longest text, and cut."""
        lengths = np.array([self._longest(row) for row in taken(rows, numbers)])
        longest_first = np.argsort(-lengths, kind="stable")
        return [
            Piece(
                numbers[slots], np.zeros_like(slots), slots, fit(int(lengths[slots].max()), ladder)
            )
            for slots in longest_first.reshape(-1, microbatch_rows)
        ]

    def batch(self, rows: Rows, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Return the texts of all rows, [rows x texts, length], features and labels of each row.

        Features end in [rows, candidates, features]; of labels and `present` there is one each.
        """
        found = taken(rows, piece.rows)
        table = partial(_ranking.table, found, facts.members)
        found_buckets = buckets(table(self.categories, np.int64(-1)), self.interactions.buckets)
        return {
            **self._texts(found, piece, draw, facts),
            "numbers": table(self.numbers, np.float32(np.nan)),
            "categories": found_buckets,
            "labels": table((self.label,), np.float32(0))[..., 0],
            "present": _ranking.present(found, facts.members, self.label),
            "slots": piece.slots,
            "real": (piece.rows >= 0).astype(np.float32),
        }

    def answers(self) -> Answers:
        return "scores"

    def fields(self, manifest: Manifest) -> Fields:
        """Return that a record is a query with one candidate."""
        texts = (*self.query, *self.document)
        return Fields(
            texts=texts,
            limits=tuple(manifest.fields[name].limit for name in texts),
            numbers=self.numbers,
            categories=self.categories,
            ranking=Ranking(
                queries=len(self.query),
                calibrated=self.objective == "pointwise",
                encoders=self.encoders,
                interactions=self.interactions,
            ),
        )

    def module(self, model: Model, manifest: Manifest, seed: int) -> TextModule:
        from regauge.models.architectures import blocks, build
        from regauge.models.heads import freeze, read_buffers
        from regauge.models.hub import at
        from regauge.models.ranker import Form, Ranker

        for name in (*self.numbers, self.label):
            check_field(manifest, name, ("number", "real"))
        facts = manifest.tokenizer
        make = partial(build, model, "none", facts.vocabulary, seed, facts.pad)
        made, keys = make()
        other = make(keys=keys)[0] if self.encoders == "apart" else None
        members = manifest.fields[self.label].members
        texts = (len(self.query), len(self.document))
        values = (len(self.numbers), len(self.categories))
        form = Form(*texts, members, *values, calibrated=self.objective == "pointwise")
        scale = [_ranking.scale(manifest.fields[name]) for name in self.numbers]
        module = Ranker(made, keys, form, self.interactions, scale, documents=other)
        if self.encoder != "whole" or not self.query:
            trained = 0 if isinstance(self.encoder, str) else self.encoder
            for each in (made, other) if other is not None else (made,):
                freeze(each, blocks(each), trained)
        if model.path is not None and model.weights == "saved":
            read_buffers(module, at(model.path))
        return module

    def loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses, weights = self._losses(output["scores"], batch["labels"], batch["present"])
        return losses.sum(), weights.sum()

    def kept(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        """Return scores, labels and which candidates are there, [rows, 3 x candidates]."""
        import torch

        return torch.cat([output["scores"], batch["labels"].float(), batch["present"]], 1)

    def tally(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Sums:
        """Return loss, AUC over all candidates, and NDCG and MRR over queries with a relevant one.

        Of pointwise scores also the calibration: what was predicted over what was so.
        """
        scores, labels, present = output["vectors"].cpu().chunk(3, 1)
        present = present * batch["real"].cpu()[:, None]
        losses, weights = self._losses(scores, labels, present)
        found: Sums = {
            "loss": (losses.sum(), weights.sum()),
            **self._quality(scores, labels, present),
        }
        if self.objective == "pointwise":
            told = (scores.sigmoid() * present).sum()
            found["calibration"] = (told, ((labels > 0) * present).sum())
        return found

    def rivals(
        self, output: dict[str, Tensor], batch: dict[str, Tensor], texts: Sequence[dict[str, Any]]
    ) -> dict[str, Sums]:
        """Return what words alone say (BM25); rare is what few of all held-out candidates have."""
        if not self.query:
            return {}
        _, labels, present = output["vectors"][: len(texts)].cpu().chunk(3, 1)
        present = present * batch["real"][: len(texts)].cpu()[:, None]
        asked = [" ".join(row[name] for name in self.query) for row in texts]
        shown = [
            [" ".join(parts) for parts in zip(*(row[name] for name in self.document), strict=True)]
            for row in texts
        ]
        distinct = dict.fromkeys(text for row in shown for text in row)
        numbers = {text: number for number, text in enumerate(distinct)}
        index = _retrieval.Words(list(numbers))
        scores = labels.new_zeros(labels.shape)
        for cells, query, row in zip(scores, asked, shown, strict=True):
            cells[: len(row)] = index.within(query, [numbers[text] for text in row])
        return {"BM25": self._quality(scores, labels, present)}

    def _quality(self, scores: Tensor, labels: Tensor, present: Tensor) -> Sums:
        """Return how well scores order the candidates that are present, each [rows, candidates]."""
        return {
            f"ndcg@{self.at}": _quality.ndcg(scores, labels, present, self.at),
            "mrr": _quality.mrr(scores, labels, present),
            "auc": _quality.auc(scores[present > 0], labels[present > 0] > 0),
        }

    def _losses(self, scores: Tensor, labels: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Return weighted losses and their weights, of each candidate or of each row."""
        from regauge.tasks import _objectives

        weighted: _objectives.Objective = getattr(_objectives, self.objective)
        return weighted(scores, labels, present)

    def _texts_of(self, candidates: int) -> int:
        return len(self.query) + candidates * len(self.document)

    def _texts(self, found: Found, piece: Piece, draw: Draw, facts: Facts) -> Arrays:
        """Return the arrays of all texts: of a row those of the query, then of each candidate."""
        count = max(1, self._texts_of(facts.members))
        texts = [text for row in found for text in self._of_row(row, count)]
        rows, parts = np.repeat(piece.rows, count), np.tile(np.arange(count), len(piece.rows))
        each = Piece(rows, parts, np.zeros_like(rows), piece.length)
        return text_arrays(texts, each, draw, facts)

    def _of_row(self, row: dict[str, Any] | None, count: int) -> Texts:
        if row is None or not self.query:
            return [None] * count
        asked: Texts = [row[name] for name in self.query]
        lists = [row[name] for name in self.document]
        shown = [texts[place] for place in range(len(lists[0])) for texts in lists]
        return asked + shown + [None] * (count - len(asked) - len(shown))

    def _longest(self, row: dict[str, Any] | None) -> int:
        if row is None:
            return 0
        lengths = [len(row[name]) for name in self.query]
        return max([0, *lengths, *(len(text) for name in self.document for text in row[name])])

    def _check_values(self, manifest: Manifest) -> None:
        """Raise DataError for a feature that says nothing, and for labels below 0."""
        for name in (*self.numbers, *self.categories):
            field = manifest.fields[name]
            absent = field.missing.get("train", 0) and field.mean is None and not field.distinct
            if absent or field.deviation == 0 or field.distinct == 1:
                what = "is missing everywhere" if absent else "has one value everywhere"
                raise DataError(f"feature '{name}' {what}", "leave it out of the task")
            if field.unseen:
                logger.warning("%d held-out values of '%s' are new there", field.unseen, name)
        least, _ = check_label(manifest, self.label)
        if least < 0:
            problem = f"labels in '{self.label}' go down to {least:g}"
            raise DataError(problem, "say relevance by numbers from 0 on")
        if not manifest.fields[self.label].most:
            raise DataError(
                f"no candidate is relevant: '{self.label}' is 0 everywhere", "label some"
            )
