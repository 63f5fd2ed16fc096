"""The training run of a run file as the planner needs it: rows, network of `rank`, tasks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import datasets
from distributed.runs import TASKS as TASK_TABLES
from distributed.runs import settings as build_settings
from regauge import config
from regauge.data.dataset import ColumnInfo
from regauge.machines.machine_rates import find_machine
from regauge.models.ranker import RankerShape, RankingHead
from regauge.models.settings import Interactions
from regauge.planner.run_plans import option_search
from regauge.planner.run_plans.plan_document import describe_plan
from regauge.planner.run_plans.run_request import read_request
from regauge.planner.run_plans.task_plans import judge_memory, plan_tasks
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.tasks import Task
from regauge.tasks.rank import Rank
from regauge.training import dry_run
from regauge.training.strategies.fsdp import Fsdp

CANDIDATES = 5


def read_task(kind: str, **table: Any) -> Task:
    task: Task = config.build(choices.load("tasks", kind), table)
    return task


def test_a_task_of_the_user_is_planned_by_its_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from regauge.tasks.tokens import Tokens\nclass MyTask(Tokens):\n    words: str = 'w'\n"
    (tmp_path / "planned_task.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tables = {
        "task": {"kind": "planned_task.py:MyTask"},
        "model": {"architecture": "bert", "config": {"vocab_size": 100}},
        "batch": {"rows": 8, "microbatch_rows": 8},
        "rows": {"fields": {"w": 64}},
    }
    with pytest.raises(SettingsError, match="does not name it"):
        read_request(tables, tmp_path / "run.toml")
    choices.allow_imports(tables, tmp_path)
    request = read_request(tables, tmp_path / "run.toml")
    assert request.run.task.text_columns() == ("w",)
    assert request.job.length == 64


def write_queries(folder: Path) -> dict[str, Any]:
    """Write queries of 10 tokens with one of 5 documents, of 20; return a run file's tables."""
    column = ColumnInfo(max_length=1, kind="float", max_group_size=CANDIDATES)
    document = ColumnInfo(
        max_length=20, max_group_size=CANDIDATES, lengths={"train": (*[0] * 20, 64)}
    )
    rows = [{"query": [5] * 10, "document": [[6] * 20], "label": [0.5]}] * 64
    query = ColumnInfo(max_length=10, lengths={"train": (*[0] * 10, 64)})
    columns = {"query": query, "document": document, "label": column}
    datasets.write_rows(folder, "groups", columns, {"train": rows, "heldout": []})
    return {
        "task": {"kind": "rank"},
        "data": {"path": str(folder)},
        "model": {"architecture": "bert", "config": {"vocab_size": 100}},
        "batch": {"rows": 16, "microbatch_rows": 16},
    }


def test_missing_candidates_are_padding(tmp_path: Path) -> None:
    """Four of five candidates are missing."""
    tables = write_queries(tmp_path / "data")
    compiled = read_request({**tables, "execution": {"compile": "blocks"}}, tmp_path / "run.toml")
    lengths = compiled.lengths
    assert lengths.sequences_per_row == 1 + CANDIDATES
    assert lengths.length == pytest.approx(24, abs=0.01)
    assert lengths.real_fraction == pytest.approx((10 + 20) / (6 * 24), rel=0.001)
    packed = read_request(tables, tmp_path / "run.toml").lengths
    assert packed.real_fraction > 0.85
    static = {**tables, "accelerator": {"kind": "neuron"}}
    assert read_request(static, tmp_path / "run.toml").lengths == lengths


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"kind": "rank", "document": ("documnt",)}, "no text field 'documnt'; did you mean 'docu"),
        ({"kind": "clm"}, "task 'clm' needs rows of layout 'packed'"),
    ],
)
def test_data_that_does_not_suit_the_task_is_refused(
    task: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tables = {**write_queries(tmp_path / "data"), "task": task}
    with pytest.raises(SettingsError, match=message):
        read_request(tables, tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("kind", "table", "length", "sequences"),
    [
        ("classify", {"text_fields": ("a", "b")}, 192, 1),
        ("similarity", {"text_fields": ("a", "b")}, 128, 2),
        ("rank", {"query": ("a",), "document": ("b",)}, 128, 1 + 3),
        ("clm", {}, 512, 1),
    ],
)
def test_rows_that_are_not_prepared_have_the_limits_of_their_fields(
    kind: str, table: dict[str, Any], length: int, sequences: int, tmp_path: Path
) -> None:
    tables = {
        "task": {"kind": kind, **table},
        "model": {"architecture": "bert", "config": {"vocab_size": 100}},
        "batch": {"rows": 8, "microbatch_rows": 8},
        "rows": {"fields": {"a": 64, "b": 128, "c": 900}, "max_group_size": 3},
    }
    request = read_request(tables, tmp_path / "run.toml")
    assert (request.job.length, request.sequences_per_row) == (length, sequences)


@pytest.mark.parametrize(
    "interactions",
    [
        Interactions(),
        Interactions(structure="stacked", cross_layers=3, hidden=(32,)),
        Interactions(cross_layers=0),
        Interactions(hidden=()),
        Interactions(rank=4, experts=3, buckets=50, width=6),
    ],
    ids=["default", "stacked", "deep alone", "cross alone", "low rank"],
)
@pytest.mark.parametrize(
    "shape",
    [
        RankerShape(1, 1, CANDIDATES, 0, 0, calibrated=False),
        RankerShape(1, 2, CANDIDATES, 3, 2, calibrated=True),
        RankerShape(2, 1, CANDIDATES, 1, 0, calibrated=True),
    ],
)
def test_parameters_are_those_of_the_module(interactions: Interactions, shape: RankerShape) -> None:
    with torch.device("meta"):
        head = RankingHead(shape, 48, interactions, [(0.0, 1.0)] * shape.numeric_features)
    names = [f"field {number}" for number in range(10)]
    task = Rank(
        query=tuple(names[: shape.query_texts]),
        document=tuple(names[-shape.document_texts :]),
        numeric_features=tuple(names[: shape.numeric_features]),
        categorical_features=tuple(names[: shape.categorical_features]),
        objective="pointwise" if shape.calibrated else "listwise",
        interactions=interactions,
    )
    counted = sum(parameter.numel() for parameter in head.parameters())
    assert task.count_other_parameters(48, encoder=0) == counted


def test_several_tasks_share_the_steps(tmp_path: Path) -> None:
    """Steps and batch shapes are those of the dry run; a step is the mean over the tasks."""
    pairs = datasets.write_pairs(tmp_path / "pairs")
    packed = datasets.write_packed(tmp_path / "packed")
    tasks = [dict(table) for table in TASK_TABLES["several"]["task"]]
    tasks[1]["data"] = {"path": str(packed)}
    run = build_settings(
        tmp_path / "run", pairs, "several", task=tuple(tasks), stop={"steps": None, "epochs": 3}
    )
    tables = config.dump(run)
    request = read_request(tables, tmp_path / "run.json")
    plan = dry_run.plan_run(run)
    assert request.steps == plan["steps"]
    assert [other.name for other in request.others] == ["words", "topics"]
    job, machine = request.place(1), find_machine("g5.xlarge")
    assert job is not None
    mixed = plan_tasks(request, job, machine, 1)
    assert [round(share, 6) for share, _ in mixed.tasks] == [0.5, 0.25, 0.25]
    described = describe_plan(request, option_search.plan_option(request, job, machine, 1))
    sizes = [plan.memory.parts.total for _, plan in mixed.tasks]
    assert len(set(sizes)) == 3
    assert mixed.memory.parts.total == max(sizes)
    for task in described["tasks"]:
        assert task["batch_shapes"] == plan[f"{task['task']}_batch_shapes"]
    single = (
        (TASK_TABLES["contrastive"]["task"], pairs, tables["batch"]),
        ({"kind": "mlm"}, packed, tasks[1]["batch"]),
        (TASK_TABLES["classify"]["task"], pairs, tables["batch"]),
    )
    alone = [
        read_request(tables | {"task": task, "data": {"path": str(data)}, "batch": batch}, tmp_path)
        for task, data, batch in single
    ]
    plans = [plan_tasks(item, item.place(1), machine, 1) for item in alone]
    mean = sum(s * item.step_seconds.p50 for s, item in zip((0.5, 0.25, 0.25), plans, strict=True))
    assert mixed.step_seconds.p50 == pytest.approx(mean)
    assert mixed.memory.total.p50 == max(item.memory.total.p50 for item in plans)
    tokens = [item.tokens_per_step for item in plans]
    assert mixed.tokens_per_step == pytest.approx(tokens[0] / 2 + (tokens[1] + tokens[2]) / 4)


def test_a_task_with_fewer_rows_than_devices_cannot_be_placed(tmp_path: Path) -> None:
    tables = {
        "task": [
            {"kind": "contrastive", "name": "a"},
            {"kind": "mlm", "name": "b", "batch": {"rows": 4, "microbatch_rows": 4}},
        ],
        "model": {"architecture": "bert", "config": {"vocab_size": 100}},
        "batch": {"rows": 64, "microbatch_rows": 8},
        "rows": {"length": 64},
    }
    request = read_request(tables, tmp_path / "run.toml")
    assert request.place(4) is not None
    assert request.place(8) is None
    with pytest.raises(SettingsError, match=r"batch.rows = 4 is less than the 8 devices"):
        option_search.place_job(request, find_machine("p5.48xlarge"), 1)


def test_every_task_must_fit_with_the_strategy_of_the_first_one(tmp_path: Path) -> None:
    batch = {"rows": 4096, "microbatch_rows": 4096}
    tables = {
        "task": [{"kind": "mlm", "name": "a"}, {"kind": "mlm", "name": "b", "batch": batch}],
        "model": {"architecture": "bert", "config": {"vocab_size": 30000}},
        "batch": {"rows": 64, "microbatch_rows": 8},
        "rows": {"length": 512},
    }
    request, machine = read_request(tables, tmp_path / "run.toml"), find_machine("g5.12xlarge")
    job = request.place(machine.devices)
    assert job is not None
    small = dataclasses.replace(request, others=())
    assert judge_memory(small, job, machine, 1) == "fits"
    assert judge_memory(request, job, machine, 1) == "does not fit"
    sharded = dataclasses.replace(job, strategy=Fsdp(), recomputation="full")
    plans = [plan for _, plan in plan_tasks(request, sharded, machine, 1).tasks]
    assert [plan.job.strategy for plan in plans] == [Fsdp(), Fsdp()]
    assert [plan.job.recomputation for plan in plans] == ["full", "full"]
