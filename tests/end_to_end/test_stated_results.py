"""Model cards, registry, reports and lists state what `result.json` does, of the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from distributed import datasets
from distributed.runs import TASKS, settings
from regauge.cli import main
from regauge.system.processes import World
from regauge.training.run import attempt

CLASSES, WORDS = "heldout.topics", "heldout.words"
METRIC = f"{CLASSES}/loss"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two tasks that diverges, so that its best step is an early one."""
    root = tmp_path_factory.mktemp("stated")
    data = datasets.write_pairs(root / "pairs")
    datasets.write_packed(root / "packed")
    _, words, topics = TASKS["several"]["task"]
    words["data"] = {"path": str(root / "packed")}
    changes = {
        "task": (topics, words),
        "stop": {"steps": 12, "patience": 2},
        "evaluation": {"every_steps": 2},
        "optimizer": {"learning_rate": 0.1},
    }
    attempt(settings(root / "runs" / "two", data, "several", **changes), World())
    return root / "runs" / "two"


@pytest.fixture(scope="module")
def result(run: Path) -> dict[str, Any]:
    """Return the result, whose metrics are those that the run logged at the model's step."""
    document: dict[str, Any] = json.loads((run / "result.json").read_text())
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = {line["step"]: line for line in lines if METRIC in line}
    best = min(steps, key=lambda step: steps[step][METRIC])
    assert 0 < best < max(steps) == document["steps"] < 12
    assert (document["model_step"], document["best_step"]) == (best, best)
    logged = {name: value for name, value in steps[best].items() if "heldout" in name}
    assert document["metrics"] == logged
    assert set(document["metrics"]) == set(document["initial_metrics"])
    return document


def read_answer(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    assert main([*command, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def select(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics of a task, without its number of items."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(f"{prefix}/") and not name.endswith("/items")
    }


def assert_card(folder: Path, prefix: str, result: dict[str, Any]) -> None:
    """Check a card, which states the tokens of all steps among the costs of the run."""
    step, metrics = result["model_step"], result["metrics"]
    card = ModelCard.load(folder / "README.md")
    stated = {item.metric_name: item.metric_value for item in card.data.eval_results}
    assert stated == select(metrics, prefix)
    assert f"Held-out rows, at step {step}." in card.text
    training, costs = card.text.split("## Training\n")[1].split("## Cost\n")
    assert f"| steps | {step} |" in training
    assert "| tokens |" not in training
    assert f"| tokens | {result['tokens']:,} |" in costs


def test_cards(run: Path, result: dict[str, Any]) -> None:
    assert_card(run / "model", CLASSES, result)
    assert_card(run / "tasks" / "words" / "model", WORDS, result)


def test_classes(run: Path, result: dict[str, Any]) -> None:
    document = json.loads((run / "classes.json").read_text())
    assert document["step"] == result["model_step"]
    assert list(document["classes"]) == [CLASSES]
    report = document["classes"][CLASSES]
    counts = np.array(report["confusion_matrix"])
    metrics = result["metrics"]
    assert counts.sum() == metrics[f"{CLASSES}/items"]
    accuracy = np.trace(counts) / counts.sum()
    assert accuracy == pytest.approx(metrics[f"{CLASSES}/accuracy"], abs=1e-6)
    f1 = np.mean([item["f1"] for item in report["classes"]])
    assert f1 == pytest.approx(metrics[f"{CLASSES}/f1"], abs=1e-6)


def test_lists(run: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = read_answer(capsys, "runs", "list", str(run.parent))["runs"]
    assert (row["metric"], row["value"]) == (METRIC, result["metrics"][METRIC])
    assert (row["value_step"], row["step"]) == (result["model_step"], result["steps"])


def test_a_registered_version(
    run: Path, result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = ["--registry", str(tmp_path / "registry")]
    for number, folder in enumerate((run, run / "tasks" / "words" / "model"), 1):
        read_answer(capsys, "models", "register", "two", str(folder), *registry)
        version = read_answer(capsys, "models", "show", "two", str(number), *registry)
        assert version["evaluation"] == {"metrics": result["metrics"]}
        assert version["checkpoint"]["model_step"] == result["model_step"]


def test_a_report(run: Path, result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    page = read_answer(capsys, "report", str(run), "--format", "json")["report"]
    document = json.loads(Path(page).read_text())
    step, first, last = result["model_step"], result["initial_metrics"], result["metrics"]
    assert sorted(document["summary"]) == [
        f"two: {name} changed from {first[name]:.3f} to {last[name]:.3f}"
        f" between steps 0 and {step}."
        for name in sorted(last)
        if not name.endswith("/items")
    ]
    (section,) = document["run_sections"]
    assert section["state"].endswith(f"at step {result['steps']}; the model is of step {step}")
    classes = json.loads((run / "classes.json").read_text())["classes"][CLASSES]["classes"]
    (table,) = document["class_sections"]
    assert table["title"] == f"Classes: two, {CLASSES}, step {step}"
    assert [row["F1"] for row in table["rows"]] == [f"{item['f1']:.3f}" for item in classes]
