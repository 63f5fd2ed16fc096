"""Offline evaluation of the final model of a run gives the metrics of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed.jobs import lines
from distributed.runs import TASKS, Runs, evaluation
from regauge.commands import evaluate
from regauge.evaluation.offline import evaluate_models
from regauge.models import sentence_transformers
from regauge.models.sentence_transformers import DenseLayer, Pooling, SentenceEncoder, Tokenization
from regauge.system.errors import SettingsError
from regauge.system.processes import World

SHORT: dict[str, Any] = {"stop": {"steps": 4}}


@pytest.mark.parametrize("task", [name for name in TASKS if name != "several"])
def test_offline_metrics_equal_the_metrics_of_the_run(runs: Runs, task: str) -> None:
    run = runs.train_once(1, task, **SHORT)
    folder = run.with_name(f"{run.name}-measured")
    table = evaluation(folder, runs.find_data(task), task, {"it": run}, seed=7)
    (row,) = evaluate_models(table, World())["rows"]
    last = [line for line in lines(run) if "heldout/loss" in line][-1]
    run_metrics = {name.removeprefix("heldout/"): last[name] for name in last if "heldout/" in name}
    assert row.keys() - {"name"} == run_metrics.keys()
    for name, value in run_metrics.items():
        tolerance = 1e-5 if name == "perplexity" else 1e-6  # that of an exponential
        assert row[name] == pytest.approx(value, rel=tolerance), name


def test_each_model_of_a_run_with_several_tasks_is_evaluated(runs: Runs, tmp_path: Path) -> None:
    run = runs.train_once(1, "several", **SHORT)
    with pytest.raises(SettingsError) as caught:
        evaluate.main(run, to=tmp_path / "all", dry_run=True)
    assert caught.value.problem == f"{run} has the tasks search, words, topics"
    folders = {
        "search": run / "model",
        "words": run / "tasks" / "words" / "model",
        "topics": run / "tasks" / "topics" / "model",
    }
    listed = ", ".join(map(str, folders.values()))
    assert caught.value.remedy == f"name the model of one: {listed}"
    options = ("accelerator=cpu", "execution.precision=fp32", "execution.threads=1")
    for name, folder in folders.items():
        answer = evaluate.main(folder, *options, to=tmp_path / name, json=True)
        last = [line for line in lines(run) if f"heldout.{name}/loss" in line][-1]
        row = answer["rows"][0]
        assert row["loss"] == pytest.approx(last[f"heldout.{name}/loss"], rel=1e-6)


def test_class_reports_equal_those_of_the_run(runs: Runs, tmp_path: Path) -> None:
    run = runs.train_once(1, "balanced", **SHORT)
    options = {"evaluate": {"untrained": True, "baselines": True}}
    table = evaluation(
        tmp_path / "measured", runs.data["pairs"], "balanced", {"it": run}, **options
    )
    answer = evaluate_models(table, World())
    of_run = json.loads((run / "classes.json").read_text())
    assert of_run["step"] == SHORT["stop"]["steps"]
    assert answer["classes"] == {"it": of_run["classes"]["heldout"]}
    report = answer["classes"]["it"]
    last = [line for line in lines(run) if "heldout/loss" in line][-1]
    correct = sum(report["confusion_matrix"][index][index] for index in range(3))
    assert correct / 10 == pytest.approx(last["heldout/accuracy"])
    assert [row["support"] for row in report["classes"]] == list(
        map(sum, report["confusion_matrix"])
    )
    saved = json.loads((tmp_path / "measured" / "evaluation.json").read_text())
    assert saved["classes"] == answer["classes"]


def test_ignored_layers_of_a_sentence_encoder_are_logged(
    runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = runs.train_once(1, "contrastive", **SHORT)
    dense = DenseLayer(in_features=32, out_features=4, folder="2_Dense")
    encoder = SentenceEncoder(
        tokenization=Tokenization(max_length=16), pooling=Pooling(dense=(dense,))
    )
    shutil.copytree(run / "model", tmp_path / "other")
    sentence_transformers.write_description(tmp_path / "other", encoder, dense.in_features)
    target, data = tmp_path / "measured", runs.data["pairs"]
    given = {"evaluate": {"task_settings": "given"}}
    for folder, count in ((run / "model", 0), (tmp_path / "other", 1)):
        table = evaluation(target, data, "contrastive", {"it": folder}, **given)
        evaluate_models(table, World())
        warning = "the dense layers after the pooling are not trained"
        assert sum(warning in message for message in caplog.messages) == count


def test_a_moved_run_is_evaluated_with_its_recorded_fields(runs: Runs, tmp_path: Path) -> None:
    run = tmp_path / "tasks" / "one"
    shutil.copytree(runs.train_once(1, "classify", **SHORT), run)
    changes: dict[str, Any] = {
        "seed": 7,
        "task": {"text_fields": ("of another dataset",)},
        "evaluate": {"task_settings": "run", "untrained": True, "baselines": True},
    }
    data = runs.data["pairs"]
    settings = evaluation(tmp_path / "measured", data, "classify", {"it": run}, **changes)
    assert evaluate.plan(settings)["models"] == {"it": str(run)}
    rows = {row["name"]: row for row in evaluate_models(settings, World())["rows"]}
    last = [line for line in lines(run) if "heldout/loss" in line][-1]
    assert rows["it"]["loss"] == pytest.approx(last["heldout/loss"], rel=1e-6)
    assert rows["untrained"]["loss"] != rows["it"]["loss"]
    table = json.loads((tmp_path / "measured" / "evaluation.json").read_text())
    assert table["notes"][0].startswith(f"{last['heldout/items']:.0f} held-out rows")
    changes["evaluate"] = {"task_settings": "given"}
    given = evaluation(tmp_path / "measured", data, "classify", {"it": run}, **changes)
    for verb in (evaluate.plan, lambda tables: evaluate_models(tables, World())):
        with pytest.raises(SettingsError, match="of another dataset"):
            verb(given)


def test_a_ranker_starts_from_the_encoder_and_head_of_another(runs: Runs) -> None:
    first = runs.train_once(1, "rank", **SHORT)
    model = {"path": str(first), "dropout": 0.1}
    folder = runs.folder("second")
    runs.job("train", 1, folder, "rank", {**SHORT, "model": model})
    ends, begins = (
        [line["heldout/loss"] for line in lines(run) if "heldout/loss" in line]
        for run in (first, folder)
    )
    assert begins[0] == pytest.approx(ends[-1], rel=1e-6)
