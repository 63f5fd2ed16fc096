"""The BM25 baseline of ranking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.runs import BERT, settings
from regauge.config import build
from regauge.evaluation.offline import evaluate_models
from regauge.evaluation.settings import EvaluateSettings
from regauge.system.processes import World
from regauge.tasks.rank import Rank
from regauge.training.heldout import compute_means
from regauge.training.run import attempt
from unit.preparing import prepare_dataset

TEXTS = [
    {"query": "red barn", "title": ["a blue fox", "the red barn"], "note": ["x", "y"]},
    {
        "query": "the fox",
        "title": ["the the the owl", "owl in the barn", "a fox"],
        "note": [""] * 3,
    },
    {"query": "owl", "title": ["an owl", "a crow"], "note": ["", "owl owl"]},
]
LABELS = torch.tensor([[0.0, 2, 0], [0, 0, 1], [1, 0, 0]])
PRESENT = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 1, 0]])


def compute_baselines(task: Rank, texts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    outputs = torch.cat([torch.zeros(3, 3), LABELS, PRESENT], 1)
    output = {"vectors": torch.cat([outputs, torch.ones(2, 9)]), "real": torch.tensor([1.0] * 5)}
    return {
        name: compute_means(sums) for name, sums in task.baselines(output, output, texts).items()
    }


def test_rare_words_rank_higher() -> None:
    metrics = compute_baselines(Rank(document=("title",), ndcg_at=1), TEXTS)
    assert set(metrics) == {"BM25"}
    assert metrics["BM25"]["mrr"] == 1
    assert metrics["BM25"]["ndcg@1"] == 1
    assert metrics["BM25"]["auc"] == pytest.approx(11 / 12), (
        "a query of more words has higher scores"
    )
    assert metrics["BM25"]["items"] == 3


def test_all_text_fields_count_and_ties_rank_last() -> None:
    metrics = compute_baselines(Rank(document=("title", "note"), ndcg_at=1), TEXTS)["BM25"]
    assert metrics["mrr"] == pytest.approx((1 + 1 + 1 / 2) / 3)
    nothing = [{**text, "query": "zebra"} for text in TEXTS]
    metrics = compute_baselines(Rank(document=("title",), ndcg_at=1), nothing)["BM25"]
    assert metrics["ndcg@1"] == 0
    assert metrics["mrr"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert metrics["auc"] == 0.5


def test_a_ranker_without_texts_has_no_baseline() -> None:
    assert compute_baselines(Rank(query=(), document=(), numeric_features=("price",)), TEXTS) == {}


WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty")


def test_an_evaluation_of_rankers_has_a_bm25_row(tmp_path: Path) -> None:
    records = [
        {
            "query": f"{word} {number}",
            "title": f"{title_word} {(number + index) % 40}",
            "label": 1 - index,
        }
        for number in range(40)
        for word in [WORDS[number % 10]]
        for index, title_word in enumerate((word, WORDS[(number + 3) % 10]))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = {
        "layout": "groups",
        "group_by": "query",
        "shared": ["query"],
        "fields": {"query": 8, "title": 8},
        "integers": ["label"],
        "max_group_size": 2,
    }
    data = prepare_dataset(
        tmp_path, rows=rows, split={"group_by": "query", "heldout_fraction": 0.3}
    )
    task = {
        "kind": "rank",
        "document": ("title",),
        "numeric_features": (),
        "categorical_features": (),
        "max_buckets": 1,
    }
    run = settings(tmp_path / "run", data.folder, "rank", task=task, model=BERT, stop={"steps": 2})
    attempt(run, World())
    tables = {
        "output": {"folder": str(tmp_path / "evaluated")},
        "data": {"path": str(data.folder)},
        "task": {"kind": "rank", "document": ("title",)},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1},
        "models": {"ranker": str(tmp_path / "run")},
        "evaluate": {"task_settings": "run"},
    }
    table = evaluate_models(build(EvaluateSettings, tables), World())["rows"]
    assert [row["name"] for row in table] == ["ranker", "BM25"]
    ranker_row, bm25_row = table
    assert bm25_row["items"] == ranker_row["items"] == data.manifest.splits["heldout"].rows
    assert bm25_row["ndcg@10"] == bm25_row["mrr"] == 1
    assert set(bm25_row) == set(ranker_row) - {"loss"}
    quiet = {**tables, "evaluate": {"task_settings": "run", "baselines": False}}
    assert len(evaluate_models(build(EvaluateSettings, quiet), World())["rows"]) == 1
