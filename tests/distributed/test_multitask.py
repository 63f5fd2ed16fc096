"""Several tasks on one encoder: steps, evaluation, checkpoints and final models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from distributed.jobs import lines
from distributed.runs import TASKS, Runs, evaluation, settings
from regauge import config
from regauge.commands import compare
from regauge.config import build
from regauge.data.dataset import Dataset
from regauge.evaluation.compare.compare import compare_runs
from regauge.evaluation.compare.settings import Comparison
from regauge.evaluation.offline import evaluate_models
from regauge.evaluation.report.page import build_report
from regauge.models.multitask import modules_by_task
from regauge.run_folders.run_folder import read_run_folder
from regauge.system.errors import DataError, SettingsError
from regauge.system.processes import World
from regauge.training import dry_run
from regauge.training.batch_finder.model_size import describe_model
from regauge.training.defaults import resolve_defaults
from regauge.training.export_models import write_models
from regauge.training.run_setup import Run, set_up
from regauge.training.settings import TrainSettings
from regauge.training.task_schedule import read_manifests

STEPS: dict[str, Any] = {"stop": {"steps": 12}, "evaluation": {"every_steps": 4}}
NAMES = ("search", "words", "topics")


def open_run(run_settings: TrainSettings) -> Run:
    return set_up(resolve_defaults(run_settings, World()), World())


def list_tasks() -> list[dict[str, Any]]:
    return [dict(table) for table in TASKS["several"]["task"]]


@pytest.fixture(scope="module")
def run(runs: Runs) -> Path:
    return runs.train_once(1, "several", **STEPS)


@pytest.fixture(scope="module")
def prepared_run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("opened") / "run"
    return open_run(settings(folder, runs.data["pairs"], "several"))


def test_every_task_is_evaluated_and_learns(run: Path) -> None:
    run_lines = lines(run)
    held = [line for line in run_lines if "heldout.search/loss" in line]
    assert [line["step"] for line in held] == [0, 4, 8, 12]
    for name in ("search", "words"):
        assert held[-1][f"heldout.{name}/loss"] < held[0][f"heldout.{name}/loss"]
    assert {"heldout.topics/accuracy", "heldout.words/accuracy"} <= held[-1].keys()
    trained = [line for line in run_lines if "train/loss" in line]
    turns = [[name for name in NAMES if f"train.{name}/loss" in line] for line in trained]
    assert turns == [["search"], ["words"], ["topics"], ["search"]] * 3
    for line, (name,) in zip(trained, turns, strict=True):
        assert line["train/loss"] == line[f"train.{name}/loss"]


def test_all_tasks_share_one_encoder(prepared_run: Run) -> None:
    search, words, topics = modules_by_task(prepared_run.state.model.module).values()
    layers = [part.model.base_model.encoder for part in (search, words, topics)]
    assert layers[0] is layers[1] is layers[2]
    assert topics.model.base_model.pooler is not None
    decoder = words.model.get_output_embeddings()
    assert decoder.weight is search.model.base_model.embeddings.word_embeddings.weight
    assert search.dropout_keys is words.dropout_keys is topics.dropout_keys
    names = [name for name, _ in prepared_run.state.model.module.named_parameters()]
    assert len(names) == len(set(names))
    assert sum("encoder.layer.0.intermediate.dense.weight" in name for name in names) == 1


def test_a_step_has_gradients_for_the_encoder_and_one_head(prepared_run: Run) -> None:
    named = dict(prepared_run.state.model.module.named_parameters())
    heads = {
        "words": "tasks.words.model.cls.predictions.transform.dense.weight",
        "topics": "tasks.topics.model.classifier.weight",
    }
    device = next(iter(named.values())).device
    for step, objective in enumerate(prepared_run.context.tasks[:3]):
        arrays = prepared_run.context.read_batches(
            {"search": 0, "words": 1, "topics": 2}[objective.name]
        )
        batches = [
            {name: torch.from_numpy(value).to(device) for name, value in batch.items()}
            for batch in arrays
        ]
        scheduled = prepared_run.context.task_schedule.task_at(step).task
        assert scheduled == prepared_run.context.tasks.index(objective)
        objective.gradients.accumulate_gradients(batches, torch.ones((), device=device))
        moved = {name for name, value in named.items() if value.grad.abs().sum() > 0}
        shared = "tasks.search.model.encoder.layer.0.intermediate.dense.weight"
        assert shared in moved
        assert {name for name in heads if heads[name] in moved} == {objective.name} & set(heads)
        prepared_run.state.model.clear_gradients()


def test_the_row_order_of_a_task_does_not_depend_on_other_tasks(
    prepared_run: Run, runs: Runs
) -> None:
    """The rows of the second task equal the rows of a run with that task alone."""
    run_settings = settings(
        prepared_run.context.folder / "alone", runs.data["packed"], "mlm", batch={"rows": 4}
    )
    alone = open_run(run_settings).context.tasks[0]
    words = prepared_run.context.tasks[1]
    turns = map(prepared_run.context.task_schedule.task_at, range(12))
    assert [turn.step for turn in turns if turn.task == 1] == [0, 1, 2]
    for step in range(25):
        assert words.order.batch(step).tolist() == alone.order.batch(step).tolist()


def test_every_task_writes_a_model_that_transformers_loads(run: Path) -> None:
    words = AutoModelForMaskedLM.from_pretrained(run / "tasks" / "words" / "model")
    topics = AutoModelForSequenceClassification.from_pretrained(run / "tasks" / "topics" / "model")
    search = load_file(run / "model" / "model.safetensors")
    for name, value in search.items():
        for other in (words, topics):
            assert torch.equal(other.base_model.get_parameter(name), value), name
    assert topics.config.num_labels == 3
    assert (run / "tasks" / "topics" / "model" / "tokenizer.json").is_file()


def test_offline_evaluation_of_one_task_equals_the_run(run: Path, runs: Runs) -> None:
    folder, models = run.parent / f"{run.name}-measured", {"topics": run / "tasks" / "topics"}
    changes = {"seed": 7, "task": {"text_fields": ("query",)}}
    changes["evaluate"] = {"task_settings": "run"}
    table = evaluation(folder, runs.data["pairs"], "classify", models, **changes)
    (row,) = evaluate_models(table, World())["rows"]
    last = [line for line in lines(run) if "heldout.topics/loss" in line][-1]
    assert row["loss"] == pytest.approx(last["heldout.topics/loss"], rel=1e-6)
    assert row["accuracy"] == last["heldout.topics/accuracy"]


def test_a_run_is_resumed_only_with_the_same_tasks(run: Path, runs: Runs) -> None:
    def start_again(**changes: Any) -> None:
        tasks = list_tasks()
        tasks[1] |= changes
        run_settings = settings(run, runs.data["pairs"], "several", task=tuple(tasks), **STEPS)
        dry_run.check_run(run_settings)

    start_again()
    start_again(batch={"rows": 4, "microbatch_rows": 2})  # the result is equal
    with pytest.raises(SettingsError, match=r"task\.words\.weight is 1, not 2"):
        start_again(weight=2)
    with pytest.raises(SettingsError, match=r"task\.words\.batch\.rows"):
        start_again(batch={"rows": 8})


def test_a_dry_run_describes_every_task(runs: Runs, tmp_path: Path) -> None:
    plan = dry_run.plan_run(settings(tmp_path / "run", runs.data["pairs"], "several", **STEPS))
    tasks = (plan["search_task"], plan["search_weight"], plan["words_task"])
    assert tasks == ("contrastive", 2, "mlm")
    assert plan["steps"] == 12
    assert plan["steps_per_epoch"] == 10, "5 batches of the first task, which has every second"
    assert plan["words_global_batch_rows"] == 4


def test_a_single_task_entry_equals_a_task_table(runs: Runs, tmp_path: Path) -> None:
    one = {**TASKS["several"]["task"][2], "batch": {"rows": 4}}
    run_settings = settings(tmp_path / "run", runs.data["pairs"], "classify", task=(one,), **STEPS)
    (aim,) = run_settings.task_configs
    assert (aim.name, aim.batch.rows) == ("", 4)
    assert dry_run.plan_run(run_settings)["task"] == "classify"
    assert describe_model(run_settings)["parameters"] > 0
    prepared_run = open_run(run_settings)
    assert list(prepared_run.context.heldout) == ["heldout"]
    write_models(*prepared_run, 0)
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert not (tmp_path / "run" / "tasks").exists()


def test_every_task_may_have_a_separate_dataset(runs: Runs, tmp_path: Path) -> None:
    """The tokenizer comes from the dataset of the first task."""
    tasks = list_tasks()
    for table in (tasks[0], tasks[2]):
        table["data"] = {"path": str(runs.data["pairs"])}
    nowhere = runs.data["pairs"].parent / "nowhere"
    run_settings = settings(tmp_path / "run", nowhere, "several", task=tuple(tasks), **STEPS)
    assert dry_run.find_count_obstacle(run_settings) is None
    prepared_run = open_run(run_settings)
    write_models(*prepared_run, 0)
    for folder in ("model", "tasks/words/model"):
        assert (tmp_path / "run" / folder / "tokenizer.json").is_file()


def test_the_mixture_of_a_task_is_checked(runs: Runs, tmp_path: Path) -> None:
    tasks = list_tasks()
    mix = [{"path": "a", "fraction": 0.6}, {"path": "b", "fraction": 0.6}]
    tasks[1]["data"] = {"path": "packed", "mix": mix}
    with pytest.raises(SettingsError, match="words"):
        settings(tmp_path / "run", runs.data["pairs"], "several", task=tuple(tasks))


def test_datasets_with_different_tokenizers_are_refused(runs: Runs, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    manifest = json.loads((runs.data["packed"] / "manifest.json").read_text())
    manifest["tokenizer"]["vocab_size"] += 1
    (other / "manifest.json").write_text(json.dumps(manifest))
    tasks = list_tasks()
    tasks[1]["data"] = {"path": str(other)}
    run_settings = settings(tmp_path / "run", runs.data["pairs"], "several", task=tuple(tasks))
    with pytest.raises(DataError, match="have different tokenizers"):
        read_manifests(run_settings)


def test_a_task_without_texts_shares_no_encoder(runs: Runs, tmp_path: Path) -> None:
    features = {**TASKS["frozen"]["task"], "name": "rank", "data": {"path": "groups"}}
    tasks = (TASKS["several"]["task"][0], {**features, "query": (), "document": ()})
    run_settings = settings(tmp_path / "run", runs.data["pairs"], "several", task=tasks)
    with pytest.raises(SettingsError, match="tasks 'search' and 'rank' train different layers"):
        open_run(run_settings)


def test_a_multitask_run_starts_from_the_model_of_one_task(runs: Runs, tmp_path: Path) -> None:
    first = runs.train_once(1, "classify", stop={"steps": 4})
    model = {"path": str(first), "dropout": 0.1}
    run_settings = settings(tmp_path / "run", runs.data["pairs"], "several", model=model)
    prepared_run = open_run(run_settings)
    saved = load_file(first / "model" / "model.safetensors")
    search, _, topics = modules_by_task(prepared_run.state.model.module).values()
    for name, value in search.model.named_parameters():
        assert torch.equal(value.cpu(), saved[f"bert.{name}"]), name
    assert torch.equal(topics.model.classifier.weight.cpu(), saved["classifier.weight"])
    assert len(Dataset(runs.data["pairs"]).rows("train")) == 40


def test_a_noise_run_reorders_the_sums_of_every_task(run: Path) -> None:
    run_settings = build(TrainSettings, config.read(run / "run.json"))
    for before, after in zip(
        run_settings.task_configs, compare.build_repeat(run).task_configs, strict=True
    ):
        assert after.batch.rows == before.batch.rows
        assert after.batch.microbatch != before.batch.microbatch


def test_reports_and_comparisons_include_every_task(run: Path, runs: Runs) -> None:
    second_run = runs.train_once(2, "several", strategy="zero1", **STEPS)
    section = build_report(tuple(map(read_run_folder, (run, second_run)))).training_sections[0]
    assert section.description == "train contrastive and mlm and classify"
    assert 'task.words.kind="mlm"' in section.settings
    comparison = compare_runs(Comparison(runs=(str(run), str(second_run))))
    (parity,) = comparison.parities
    assert not parity.blocking_differences
    assert {"heldout.search/loss", "heldout.topics/accuracy"} <= {m.name for m in parity.metrics}
    assert parity.verdict == "pass"
