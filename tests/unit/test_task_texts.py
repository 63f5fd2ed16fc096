"""The planner's view of a task's rows against the class of the task, and the network of `rank`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distributed import datasets
from distributed.runs import TASKS as TASK_TABLES
from distributed.runs import settings as build_settings
from regauge import config
from regauge.data.buckets import BatchForm
from regauge.data.dataset import ColumnInfo, Dataset, DatasetManifest, SplitInfo, TokenizerInfo
from regauge.machines.machine_rates import find_machine
from regauge.models.ranker import RankerShape, RankingHead
from regauge.models.settings import Interactions
from regauge.planner.run_plans import option_search
from regauge.planner.run_plans.plan_document import describe_plan
from regauge.planner.run_plans.prepared_data import read_lengths
from regauge.planner.run_plans.ranking_network import RankingNetwork
from regauge.planner.run_plans.run_request import read_request
from regauge.planner.run_plans.task_plans import judge_memory, plan_tasks
from regauge.planner.run_plans.task_texts import READERS, read_task_texts
from regauge.system import choices
from regauge.system.errors import SettingsError
from regauge.training import dry_run
from regauge.training.task_runtime import build_module

FORM = BatchForm(rows=16, microbatch_rows=16, has_any_shape=False)

CANDIDATES = 5
TASKS: dict[str, tuple[dict[str, Any], ...]] = {
    "classify": ({}, {"text_fields": ["first", "second"], "max_buckets": 2}),
    "clm": ({},),
    "contrastive": (
        {},
        {"query": "a", "document": ["b", "c"], "negatives": ["d"], "max_buckets": 1},
    ),
    "distill": ({}, {"text_fields": ["a", "b"]}),
    "dpo": ({},),
    "mlm": ({}, {"next_sentence": True}),
    "rank": ({}, {"query": ["a"], "document": ["b", "c"], "numeric_features": ["price"]}),
    "sft": ({},),
    "similarity": ({}, {"text_fields": ["left", "right"]}),
    "tokens": ({}, {"words": "words"}),
    "triplet": ({}, {"anchor": "a", "negative": "c"}),
}
CASES = [(kind, table) for kind, tables in TASKS.items() for table in tables]
TOKENIZER = TokenizerInfo(
    sha256="",
    vocab_size=100,
    pad_token_id=0,
    mask_token_id=1,
    sep_token_id=2,
    special_token_ids=(0, 1, 2),
)
histograms = st.lists(st.integers(0, 40), min_size=2, max_size=200).filter(
    lambda item: any(item[1:])
)


def test_every_task_is_compared() -> None:
    assert set(TASKS) == set(READERS) == set(choices.names("tasks"))


def test_a_task_of_the_user_has_a_note(tmp_path: Path) -> None:
    tables = {
        "task": {"kind": "my_task.py:MyTask"},
        "model": {"architecture": "bert", "config": {"vocab_size": 100}},
        "batch": {"rows": 8, "microbatch_rows": 8},
        "rows": {"length": 64},
    }
    request = read_request(tables, tmp_path / "run.toml")
    assert "each row of task 'my_task.py:MyTask' is planned as one text" in request.notes[0]
    assert request.job.length == 64


def write_manifest(
    folder: Path, kind: str, table: dict[str, Any], counts: list[list[int]]
) -> DatasetManifest:
    """Write the manifest of data for a task; return it. `counts` are length histograms."""
    texts = read_task_texts({"kind": kind, **table})
    columns = {}
    for number, name in enumerate(texts.all_fields or ("tokens",)):
        train, heldout = counts[number % len(counts)], counts[(number + 1) % len(counts)]
        columns[name] = ColumnInfo(
            max_length=max(len(train), len(heldout)) - 1,
            lengths={"train": tuple(train), "heldout": tuple(heldout)},
            max_group_size=CANDIDATES if name in texts.candidate_fields else 1,
        )
    columns["label"] = ColumnInfo(max_length=1, kind="float", max_group_size=CANDIDATES)
    columns["unused"] = ColumnInfo(max_length=900, lengths={"train": (0,) * 900 + (7,)})
    if not texts.all_fields:
        del columns["unused"]
    split = SplitInfo(rows=max(sum(counts[0]), 1), tokens=1000, shards=())
    manifest = DatasetManifest(
        layout="fields",
        columns=columns,
        splits={"train": split, "heldout": split},
        tokenizer=TOKENIZER,
        settings={},
    )
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(manifest.model_dump_json(), encoding="utf-8")
    return manifest


@pytest.mark.parametrize(("kind", "table"), CASES, ids=[f"{kind} {len(t)}" for kind, t in CASES])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(counts=st.lists(histograms, min_size=1, max_size=3))
def test_rows_are_those_of_the_task(
    kind: str, table: dict[str, Any], counts: list[list[int]], tmp_path: Path
) -> None:
    manifest = write_manifest(tmp_path / "data", kind, table, counts)
    task = config.build(choices.load("tasks", kind), table)
    texts = read_task_texts({"kind": kind, **table})
    lengths = read_lengths(tmp_path / "data", texts, FORM, getattr(task, "max_buckets", 4))
    assert lengths is not None
    assert lengths.shapes == task.bucket_lengths(manifest)
    assert lengths.sequences_per_row == task.sequences_per_row(manifest)
    assert lengths.max_length == lengths.shapes[-1]
    assert 0 < lengths.length <= lengths.max_length
    assert 0 < lengths.real_fraction <= 1


@pytest.mark.parametrize(("kind", "table"), CASES, ids=[f"{kind} {len(t)}" for kind, t in CASES])
@pytest.mark.parametrize("has_any_shape", [False, True])
def test_the_expected_padding_is_that_of_the_task(
    kind: str, table: dict[str, Any], has_any_shape: Any, tmp_path: Path
) -> None:
    """The plan reads training rows, the task all rows; here both have the same lengths."""
    counts = [[0] * 8 + [30] * 4 + [0] * 20 + [9]]
    manifest = write_manifest(tmp_path / "data", kind, table, counts)
    task = config.build(choices.load("tasks", kind), table)
    form = FORM._replace(has_any_shape=has_any_shape)
    texts = read_task_texts({"kind": kind, **table})
    lengths = read_lengths(tmp_path / "data", texts, form, getattr(task, "max_buckets", 4))
    assert lengths is not None
    assert lengths.length == pytest.approx(task.padded_length(manifest, form), rel=0.05)


def test_missing_candidates_are_padding(tmp_path: Path) -> None:
    """Queries of 10 tokens with one document of 20 have 4 of 5 candidates missing."""
    query, document = [0] * 10 + [4000], [0] * 20 + [4000]
    table = {"kind": "rank"}
    write_manifest(tmp_path / "data", "rank", table, [query, document])
    lengths = read_lengths(tmp_path / "data", read_task_texts(table), FORM)
    assert lengths is not None
    assert lengths.sequences_per_row == 1 + CANDIDATES
    assert lengths.length == pytest.approx(24, abs=0.01)
    assert lengths.real_fraction == pytest.approx((10 + 20) / (6 * 24), rel=0.001)
    packed = FORM._replace(has_any_shape=True)
    lengths = read_lengths(tmp_path / "data", read_task_texts(table), packed)
    assert lengths is not None
    assert lengths.real_fraction > 0.85


def test_a_field_that_the_data_lacks_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path / "data", "contrastive", {}, [[0, 1]])
    texts = read_task_texts({"kind": "contrastive", "document": "documnt"})
    with pytest.raises(SettingsError, match=r"no text field 'documnt'; did you mean 'document'"):
        read_lengths(tmp_path / "data", texts, FORM)


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
    network = RankingNetwork(
        shape.query_texts,
        shape.document_texts,
        shape.numeric_features,
        shape.categorical_features,
        shape.calibrated,
        1,
        interactions,
    )
    counted = sum(parameter.numel() for parameter in head.parameters())
    assert network.count_parameters(48) == counted


RUNS = {
    "mlm": datasets.write_packed,
    "next-sentence": datasets.write_halves,
    "sft": datasets.write_chats,
    "dpo": datasets.write_preferences,
    "negatives": datasets.write_pairs,
    "triplet": datasets.write_pairs,
    "classify": datasets.write_pairs,
    "rank": datasets.write_groups,
    "apart": datasets.write_groups,
    "tokens": datasets.write_tagged,
}


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_plan_counts_the_parameters_of_the_run(name: str, tmp_path: Path) -> None:
    """Layers for classes are small and not counted; the model here is small, too."""
    data = RUNS[name](tmp_path / "data")
    run = build_settings(tmp_path / "run", data, name)
    request = read_request(config.dump(run), tmp_path / "run.json")
    with torch.device("meta"):
        module = build_module(run, [Dataset(data).manifest])
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert request.job.shape.parameters(request.job.head) == pytest.approx(counted, rel=0.01)


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
    sharded = dataclasses.replace(job, strategy="fsdp", recomputation="full")
    plans = [plan for _, plan in plan_tasks(request, sharded, machine, 1).tasks]
    assert [plan.job.strategy for plan in plans] == ["fsdp", "fsdp"]
    assert [plan.job.recomputation for plan in plans] == ["full", "full"]
