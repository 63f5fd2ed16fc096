"""Ranking by words alone stands beside the rankers that are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.runs import BERT, settings
from regauge.config import build
from regauge.evaluation.offline import measure
from regauge.evaluation.settings import Evaluating
from regauge.processes import World
from regauge.tasks.rank import Rank
from regauge.training.heldout import compute_means
from regauge.training.run import attempt
from unit.preparing import prepared

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


def rivals(task: Rank, texts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    kept = torch.cat([torch.zeros(3, 3), LABELS, PRESENT], 1)
    output = {"vectors": torch.cat([kept, torch.ones(2, 9)]), "real": torch.tensor([1.0] * 5)}
    return {name: compute_means(sums) for name, sums in task.rivals(output, output, texts).items()}


def test_candidates_are_ordered_by_their_words_and_rare_ones_say_more() -> None:
    found = rivals(Rank(document=("title",), at=1), TEXTS)
    assert set(found) == {"BM25"}
    assert found["BM25"]["mrr"] == 1
    assert found["BM25"]["ndcg@1"] == 1
    assert found["BM25"]["auc"] == pytest.approx(11 / 12), "a query of more words has higher scores"
    assert found["BM25"]["items"] == 3


def test_all_texts_of_a_candidate_are_read_and_equal_scores_help_nobody() -> None:
    found = rivals(Rank(document=("title", "note"), at=1), TEXTS)["BM25"]
    assert found["mrr"] == pytest.approx((1 + 1 + 1 / 2) / 3)
    nothing = [{**text, "query": "zebra"} for text in TEXTS]
    found = rivals(Rank(document=("title",), at=1), nothing)["BM25"]
    assert found["ndcg@1"] == 0
    assert found["mrr"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert found["auc"] == 0.5


def test_a_ranker_that_reads_no_text_has_no_rival_by_words() -> None:
    assert rivals(Rank(query=(), document=(), numbers=("price",)), TEXTS) == {}


WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty")


def test_an_evaluation_of_rankers_has_a_row_of_words_alone(tmp_path: Path) -> None:
    records = [
        {
            "query": f"{word} {number}",
            "title": f"{other} {(number + place) % 40}",
            "label": 1 - place,
        }
        for number in range(40)
        for word in [WORDS[number % 10]]
        for place, other in enumerate((word, WORDS[(number + 3) % 10]))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    rows = {
        "layout": "groups",
        "group": "query",
        "shared": ["query"],
        "fields": {"query": 8, "title": 8},
        "numbers": ["label"],
        "members": 2,
    }
    data = prepared(tmp_path, rows=rows, split={"by": "query", "heldout_share": 0.3})
    task = {"kind": "rank", "document": ("title",), "numbers": (), "categories": (), "shapes": 1}
    run = settings(tmp_path / "run", data.folder, "rank", task=task, model=BERT, stop={"steps": 2})
    attempt(run, World())
    tables = {
        "output": {"folder": str(tmp_path / "evaluated")},
        "data": {"path": str(data.folder)},
        "task": {"kind": "rank", "document": ("title",)},
        "accelerator": "cpu",
        "execution": {"precision": "fp32", "threads": 1},
        "subjects": {"models": {"ranker": str(tmp_path / "run")}, "tasks": "own"},
    }
    table = measure(build(Evaluating, tables), World())["rows"]
    assert [row["name"] for row in table] == ["ranker", "BM25"]
    own, words = table
    assert words["items"] == own["items"] == data.manifest.splits["heldout"].rows
    assert words["ndcg@10"] == words["mrr"] == 1
    assert set(words) == set(own) - {"loss"}
    quiet = {**tables, "subjects": {**tables["subjects"], "rivals": "no"}}
    assert len(measure(build(Evaluating, quiet), World())["rows"]) == 1
