"""Search metrics of embedding models: the queries of a collection rank its whole corpus.

The metrics and the order of equal scores are those of trec_eval: the gain of nDCG is the grade, and
a grade from 1 is relevant. As in BEIR, a query that is also a document does not find itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.evaluation.evaluation_files import write_table
from regauge.inference.export.model import load
from regauge.system.errors import DataError, SettingsError
from regauge.tasks._embeddings import DOCUMENT, QUERY
from regauge.tasks._retrieval import Bm25Index

if TYPE_CHECKING:
    from regauge.data.sources.beir import Beir, Judgments
    from regauge.evaluation.settings import EvaluateSettings
    from regauge.inference.export.model import LoadedModel

RANKED = 100
"""Documents of a ranking that count."""
RECALL_AT, NDCG_AT, MRR_AT = (1, 10, RANKED), 10, 10
TEXTS_PER_BATCH = 8192
QUERIES_PER_BATCH = 64
"""Queries scored at a time, to bound the memory of a score matrix."""
Scorer = Callable[[Sequence[str]], np.ndarray]
"""Returns the scores of some queries, [queries, documents]."""


def evaluate_search(settings: EvaluateSettings, source: Beir) -> dict[str, Any]:
    """Evaluate the models and BM25 on a collection; write and return the table.

    Raises DataError without a relevant document.
    """
    if settings.evaluate.untrained:
        raise SettingsError("a search has no untrained row", "remove evaluate.untrained")
    queries, documents, judgments = source.read_collection()
    judged = {name: grades for name, grades in judgments.items() if max(grades.values()) > 0}
    if missing := judged.keys() - queries.keys():
        problem = f"{source.folder} has no text of the query {min(missing)}"
        raise DataError(problem, "add it to queries.jsonl, or remove its judgments")
    if not judged:
        raise DataError(f"{source.folder} has no relevant document", "correct its judgments")
    scorers = {
        name: _build_scorer(load(path), list(documents.values()))
        for name, path in settings.models.items()
    }
    if settings.evaluate.baselines:
        index = Bm25Index(list(documents.values()))
        scorers["BM25"] = lambda texts: index.score(texts).numpy()
    rows = []
    for name, scorer in scorers.items():
        rankings = rank_documents(scorer, {key: queries[key] for key in judged}, documents)
        rows.append({"name": name, **search_metrics(rankings, judged)})
    return write_table(
        settings,
        rows,
        note=f"{len(judged):,} queries over {len(documents):,} documents of {source.folder}",
        data_fingerprint=source.list_pieces()[0].stamp,
        num_rows=len(judged),
    )


def _build_scorer(model: LoadedModel, texts: list[str]) -> Scorer:
    """Return a function that scores the documents by the products of their vectors."""
    starts = range(0, len(texts), TEXTS_PER_BATCH)
    batches = [_encode(model, texts[start : start + TEXTS_PER_BATCH], DOCUMENT) for start in starts]
    vectors = np.concatenate(batches)
    return lambda queries: _encode(model, queries, QUERY) @ vectors.T


def _encode(model: LoadedModel, texts: Sequence[str], prompt: str) -> np.ndarray:
    """Return vectors, [texts, width], with the model's prompt of this name, if any."""
    tokenization = model.program.tokenization
    has_prompt = tokenization is not None and prompt in tokenization.prompts
    return model.encode(texts, prompt=prompt if has_prompt else None)


def rank_documents(
    score: Scorer, queries: dict[str, str], documents: dict[str, str]
) -> dict[str, list[str]]:
    """Return the ids of each query's best documents; among equal scores, the last id is first.

    A query with a non-finite score is left out.
    """
    names, rankings = sorted(documents, reverse=True), dict[str, list[str]]()
    numbers = {name: number for number, name in enumerate(documents)}
    order = [numbers[name] for name in names]
    for start in range(0, len(queries), QUERIES_PER_BATCH):
        batch = dict(islice(queries.items(), start, start + QUERIES_PER_BATCH))
        for query, scores in zip(batch, score(list(batch.values())), strict=True):
            if not np.isfinite(scores).all():
                continue
            best = np.argsort(-scores[order], kind="stable")[: RANKED + 1].tolist()
            rankings[query] = [names[number] for number in best if names[number] != query][:RANKED]
    return rankings


def search_metrics(rankings: dict[str, list[str]], judged: Judgments) -> dict[str, float]:
    """Return the means over the queries; NaN if a ranking is missing.

    For example:

        >>> search_metrics({"q": ["a", "b"]}, {"q": {"b": 1}})["mrr@10"]
        0.5
    """
    sums: dict[str, float] = {}
    for query, grades in judged.items():
        gains = [max(grades.get(name, 0), 0) for name in rankings.get(query, ())]
        ideal = sorted((max(grade, 0) for grade in grades.values()), reverse=True)
        num_relevant = sum(gain > 0 for gain in ideal)
        first = next((rank for rank, gain in enumerate(gains[:MRR_AT], 1) if gain), math.inf)
        values = {
            f"ndcg@{NDCG_AT}": _discount(gains) / _discount(ideal),
            f"mrr@{MRR_AT}": 1 / first,
        }
        for k in RECALL_AT:
            values[f"recall@{k}"] = sum(gain > 0 for gain in gains[:k]) / num_relevant
        for name, value in values.items():
            number = value if query in rankings else math.nan
            sums[name] = sums.get(name, 0.0) + number / len(judged)
    return sums


def _discount(gains: list[int]) -> float:
    """Return the discounted gain of the first documents."""
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:NDCG_AT], 1))
