"""Ranks, BM25 and rank fusion against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from regauge.evaluation.search import rank_documents, search_metrics
from regauge.tasks import _retrieval


def build_corpus(*real: float) -> _retrieval.PairedCorpus:
    hashes = torch.arange(1.0, len(real) + 1)[:, None].repeat(1, 4)
    return _retrieval.PairedCorpus(hashes, hashes, torch.tensor(real))


def test_ranks_count_better_documents_and_share_ties() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [5.0, 4.0, 3.0], [1.0, 1.0, 1.0]])
    corpus = build_corpus(1.0, 1.0, 1.0)
    assert corpus.rank(scores, slice(0, 3)).tolist() == [1.0, 2.0, 2.0]
    assert corpus.rank(scores[1:], slice(1, 3)).tolist() == [2.0, 2.0]


def test_padding_rows_have_no_weight() -> None:
    scores = torch.tensor([[3.0, 1.0], [5.0, 4.0]])
    real = torch.tensor([1.0, 0.0])
    ranks = build_corpus(1.0, 0.0).rank(scores, slice(0, 2))
    sums = _retrieval.retrieval_metrics([ranks], real)
    assert float(sums["recall@1"][0]) == 1.0
    assert float(sums["mrr"][0] / sums["mrr"][1]) == 1.0


def test_the_bm25_formula() -> None:
    documents = ["the red fox", "the red red barn stands", "a blue barn"]
    scores = _retrieval.Bm25Index(documents).score(["Red barn!", "fox", "nothing known"])
    lengths = [3, 5, 3]
    average = sum(lengths) / 3

    def term(word: str, document: int) -> float:
        texts = [text.split() for text in documents]
        count = texts[document].count(word)
        having = sum(word in text for text in texts)
        idf = math.log(1 + (3 - having + 0.5) / (having + 0.5))
        norm = _retrieval.K1 * (1 - _retrieval.B + _retrieval.B * lengths[document] / average)
        return idf * count / (count + norm)

    expected = [
        [term("red", d) + term("barn", d) for d in range(3)],
        [term("fox", d) for d in range(3)],
    ]
    # A constant factor of the formula (k1 + 1) changes no order.
    ratio = float(scores[1, 0]) / expected[1][0]
    for query, row in enumerate(expected):
        assert scores[query].tolist() == pytest.approx([ratio * value for value in row], rel=1e-5)
    assert scores[2].tolist() == [0.0, 0.0, 0.0]


def test_fusion_adds_reciprocal_ranks() -> None:
    first = torch.tensor([[0.9, 0.1, 0.5]])
    second = torch.tensor([[1.0, 3.0, 2.0]])
    both = _retrieval.fuse_scores(first, second, torch.ones(3, dtype=torch.bool))
    expected = [1 / 61 + 1 / 63, 1 / 63 + 1 / 61, 1 / 62 + 1 / 62]
    assert both[0].tolist() == pytest.approx(expected)
    without = _retrieval.fuse_scores(first, second, torch.tensor([True, False, True]))
    assert without[0].tolist() == pytest.approx([1 / 61 + 1 / 62, 1 / 63 + 1 / 63, 1 / 62 + 1 / 61])


def test_search_metrics_equal_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(70, 300)).astype(np.float32)
    grades = np.where(draw.random((70, 300)) < 0.03, draw.integers(1, 4, (70, 300)), 0)
    grades[:, 5] = np.where(grades.sum(1), grades[:, 5], 2)
    documents = {f"d{number}": "" for number in range(300)}
    queries = {f"q{number}": str(number) for number in range(70)}
    rankings = rank_documents(
        lambda batch: scores[[int(text) for text in batch]], queries, documents
    )
    judged = {
        f"q{row}": {f"d{number}": int(grade) for number, grade in enumerate(cells) if grade}
        for row, cells in enumerate(grades)
    }
    metrics = search_metrics(rankings, judged)
    assert metrics["ndcg@10"] == pytest.approx(ndcg_score(grades, scores, k=10))
    order = np.argsort(-scores, axis=1)
    relevant = np.take_along_axis(grades > 0, order, axis=1)
    for k in (1, 10, 100):
        expected = (relevant[:, :k].sum(1) / relevant.sum(1)).mean()
        assert metrics[f"recall@{k}"] == pytest.approx(expected)
    ranks = relevant.argmax(1) + 1
    assert metrics["mrr@10"] == pytest.approx(np.where(ranks <= 10, 1 / ranks, 0).mean())


def test_search_metrics_by_hand() -> None:
    judged = {"q1": {"a": 1, "b": 2, "c": 0}, "q2": {"x": 1}}
    metrics = search_metrics({"q1": ["c", "b", "a"], "q2": ["a", "b"]}, judged)
    ndcg = (2 / math.log2(3) + 1 / math.log2(4)) / (2 + 1 / math.log2(3))
    assert metrics == pytest.approx(
        {"ndcg@10": ndcg / 2, "mrr@10": 0.25, "recall@1": 0, "recall@10": 0.5, "recall@100": 0.5}
    )


def test_a_query_does_not_find_itself() -> None:
    rankings = rank_documents(
        lambda _: np.array([[3.0, 2.0, 2.0]]), {"a": ""}, dict.fromkeys("abc", "")
    )
    assert rankings == {"a": ["c", "b"]}  # equal scores are ordered as by trec_eval
