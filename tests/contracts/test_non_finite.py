"""Numbers that are not finite never give a good score, in any task."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from distributed import datasets
from distributed.runs import TASKS
from regauge import config
from regauge.config import build
from regauge.data.dataset import Dataset
from regauge.evaluation.offline import compute_heldout_metrics
from regauge.evaluation.search import rank_documents, search_metrics
from regauge.models.init_weights import META, build_initial_weights, materialize
from regauge.models.settings import Model
from regauge.run_folders.run_list import COLUMNS, RunSummary, sort_runs
from regauge.system import choices
from regauge.tasks import ITEMS, Task
from regauge.training.settings import Target

VARIANTS = ("next-sentence", "negatives", "multi-label")
REGRESSION = {
    "task": {
        **TASKS["similarity"]["task"],
        "kind": "classify",
        "label": "similarity",
        "problem_type": "regression",
    },
    "model": TASKS["classify"]["model"],
}
RUNS = {**TASKS, "regression": REGRESSION}
DAMAGED = [
    ("the weights", math.nan),
    ("an output", math.nan),
    ("an output", math.inf),
    ("an output", -math.inf),
]


class Damaged(nn.Module):
    """A task module with a number in the outputs of one row."""

    def __init__(self, module: Any, number: float) -> None:
        super().__init__()
        self.module, self.compute_dtype, self.number = module, module.compute_dtype, number

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        output: dict[str, Tensor] = self.module(batch)
        row = int((batch["segments"][:, 0] > 0).nonzero()[0])
        for name, values in output.items():
            if values.is_floating_point() and values.ndim:
                output[name] = values.clone()
                output[name][row * len(values) // len(batch["segments"])] = self.number
        return output


@pytest.fixture(params=[*choices.names("tasks"), *VARIANTS, "regression"], scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Task, Path, Any]:
    """Return a task, its dataset and a module with random weights."""
    run = RUNS[request.param]
    task: Task = config.parse_choice("tasks", run["task"])
    folder = datasets.WRITERS[task.row_layout()](tmp_path_factory.mktemp("data") / "data")
    dataset, model = Dataset(folder), build(Model, run["model"])
    with META:
        module = task.resolve_defaults(dataset.manifest).build_module(model, dataset.manifest, 0)
    materialize(module, build_initial_weights(module, model, 0))
    return task, folder, module


@pytest.mark.parametrize(("part", "number"), DAMAGED)
def test_all_metrics_of_a_damaged_model_are_nan(
    case: tuple[Task, Path, Any], part: str, number: float
) -> None:
    """Among them are those of ranks and of highest scores, which NaN leaves finite."""
    task, folder, module = case
    damaged = Damaged(module, number) if part == "an output" else copy.deepcopy(module)
    if part == "the weights":
        for weight in damaged.parameters():
            nn.init.constant_(weight, number)
    metrics = compute_heldout_metrics(damaged, task, folder, 10)
    values = {name: value for name, value in metrics.items() if name != ITEMS}
    assert len(values) > 1
    assert all(map(math.isnan, values.values())), values


def test_a_search_with_damaged_vectors_has_no_metrics() -> None:
    documents = {"a": "", "b": "", "c": ""}
    scores = np.array([[1, 2, 3], [3, math.nan, 1]], np.float32)
    judged = {"p": {"c": 1}, "q": {"a": 1}}
    for number in (math.nan, math.inf):
        scores[1, 1] = number
        rankings = rank_documents(lambda _: scores, {"p": "", "q": ""}, documents)
        assert rankings["p"] == ["c", "b", "a"]
        assert all(map(math.isnan, search_metrics(rankings, judged).values()))
        assert search_metrics(rankings, {"p": judged["p"]})["mrr@10"] == 1


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_target_is_reached(number: float) -> None:
    for side in ("at_least", "at_most"):
        target = build(Target, {"metric": "heldout/score", side: 0.5})
        assert not target.is_reached({"heldout/score": number})
        assert target.is_reached({"heldout/score": 0.5})


@pytest.mark.parametrize("is_reversed", [False, True])
def test_runs_without_a_number_are_sorted_last(*, is_reversed: bool) -> None:
    """Python's order of numbers with NaN depends on the position of NaN."""
    values = [0.5, math.nan, 0.9, None, 0.1]
    empty: dict[str, Any] = dict.fromkeys(COLUMNS)
    runs = [RunSummary(**{**empty, "value": value}, settings={}) for value in values]
    ordered = [run.value for run in sort_runs(runs, "value", is_reversed=is_reversed)]
    assert ordered[:3] == sorted([0.1, 0.5, 0.9], reverse=is_reversed)
