"""Early stopping ends a run at the same step on all processes and after a resume.

The final model is the best checkpoint. The highest loss counts as the best one in most of these
runs, so that the first evaluation is the best and the run stops after its patience.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from huggingface_hub import ModelCard

from distributed import datasets, jobs
from distributed.runs import STRATEGIES, Runs, cases, settings
from regauge.evaluation.report.page import build_report
from regauge.models.settings import InitFrom
from regauge.models.weights import read_weights
from regauge.registry.lineage import find_figures
from regauge.registry.model_files import ModelFiles
from regauge.run_folders.run_folder import read_run_folder
from regauge.run_folders.run_list import summarize_run
from regauge.system.errors import SettingsError
from regauge.system.hub import read_step
from regauge.training import dry_run, trainer, warm_start
from regauge.training.checkpoint.export_weights import export_checkpoint
from regauge.training.context import RunContext
from regauge.training.model_card import render_card
from regauge.training.state import TrainState

STOPPING: dict[str, Any] = {
    "stop": {"steps": 40, "patience": 2},
    "evaluation": {"every_steps": 2},
    "output": {"checkpoint": {"every_steps": 3, "best_mode": "max", "keep_last": 1}},
}
FIRST_EVALUATION, STOP_STEP = 2, 6


def read_result(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return document


def check_stopped(folder: Path) -> None:
    """Check the result and the final model of a run with the settings STOPPING."""
    result = read_result(folder)
    assert result["steps"] == STOP_STEP
    assert result["stop_reason"] == "no better heldout/loss in 2 evaluations"
    assert result["model_step"] == result["best_step"] == FIRST_EVALUATION
    assert read_step(folder / "model") == FIRST_EVALUATION
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["heldout/loss"] for line in lines if "heldout/loss" in line}
    assert result["metrics"]["heldout/loss"] == losses[FIRST_EVALUATION] > losses[STOP_STEP]


def check_is_best(folder: Path, scratch: Path) -> None:
    """Check that the final model has the weights of the best checkpoint, and of no later one."""
    final = read_weights(folder / "model")
    for step, is_equal in (("best", True), ("latest", False)):
        target = scratch / f"{folder.name}-{step}"
        weights = read_weights(export_checkpoint(folder, step, target))  # type: ignore[arg-type]
        assert weights.keys() == final.keys()
        pairs = [(weights[name], final[name]) for name in final]
        assert all(torch.equal(*pair) for pair in pairs) == is_equal
        assert read_step(target) == (FIRST_EVALUATION if is_equal else STOP_STEP)


FAST = [(2, "fsdp")]
WORLDS = [(size, strategy) for size, names in STRATEGIES.items() for strategy in names if size != 3]


@pytest.mark.parametrize(("size", "strategy"), cases(WORLDS, FAST))
def test_all_processes_stop_together_and_write_the_best_model(
    runs: Runs, tmp_path: Path, size: int, strategy: str
) -> None:
    changes = {**STOPPING, "batch": {"microbatch_rows": 2}}
    folder = runs.train_once(size, "mlm", strategy=strategy, **changes)
    check_stopped(folder)
    check_is_best(folder, tmp_path)


def test_adapters_of_the_best_step_are_the_final_model(runs: Runs, tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ("query",)}
    model = {"lora": lora}
    folder = runs.train_once(1, "mlm", model=model, **STOPPING)
    check_stopped(folder)
    check_is_best(folder, tmp_path)


def test_every_figure_of_the_run_is_of_the_final_model(runs: Runs) -> None:
    """The recall of all classes, weighted by support, is the accuracy."""
    folder = runs.train_once(1, "classify", **STOPPING)
    result = read_result(folder)
    metrics, step = result["metrics"], result["model_step"]
    assert step < result["steps"]
    classes = json.loads((folder / "classes.json").read_text())
    assert classes["step"] == step
    rows = classes["classes"]["heldout"]["classes"]
    correct = sum(row["recall"] * row["support"] for row in rows)
    assert correct / sum(row["support"] for row in rows) == pytest.approx(
        metrics["heldout/accuracy"]
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["summary"].items() >= {**metrics, "model_step": step}.items()
    listed = summarize_run(folder, folder)
    assert listed.metric == "heldout/loss"
    assert (listed.value, listed.value_step) == (metrics["heldout/loss"], step)
    assert (listed.step, listed.steps) == (result["steps"], 40)
    report = build_report((read_run_folder(folder),))
    loss = [line for line in report.summary if "heldout/loss" in line]
    assert [line.rpartition(" between ")[2] for line in loss] == [f"steps 0 and {step}."]
    state, [section] = report.run_sections[0].state, report.class_sections
    assert state.endswith(f"at step {result['steps']}; the model is of step {step}")
    assert section.title.endswith(f", heldout, step {step}")
    assert f"Held-out rows, at step {step}." in (folder / "model/README.md").read_text()


@pytest.mark.parametrize("step", ["best", "latest"])
def test_a_card_has_the_metrics_of_the_exported_step(
    runs: Runs, tmp_path: Path, step: Literal["best", "latest"]
) -> None:
    folder = runs.train_once(1, "classify", **STOPPING)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["heldout/loss"] for line in lines if "heldout/loss" in line}
    exported = export_checkpoint(folder, step, tmp_path / step)
    number = read_step(exported)
    card = ModelCard(render_card(folder, exported, step=number))
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert number == read_result(folder)["model_step" if step == "best" else "steps"]
    assert scores["loss"] == losses[number]
    files = ModelFiles(exported, "model", "", {}, None)
    assert find_figures(files, folder)["evaluation"]["metrics"]["heldout/loss"] == losses[number]


@pytest.mark.parametrize("tokens", [150, 500, 700])
def test_a_resumed_run_stops_at_the_same_step(runs: Runs, tmp_path: Path, tokens: int) -> None:
    data = str(runs.data["packed"])
    limited = {**STOPPING, "stop": {**STOPPING["stop"], "tokens": tokens}}
    code, _ = jobs.train_to_limit(str(tmp_path), data, "mlm", limited)
    assert code == 67
    jobs.train(str(tmp_path), data, "mlm", STOPPING)
    check_stopped(tmp_path)
    whole = runs.train_once(1, "mlm", **STOPPING)
    final, expected = read_weights(tmp_path / "model"), read_weights(whole / "model")
    assert all(torch.equal(final[name], expected[name]) for name in expected)


def test_a_stopped_run_trains_no_further_unless_its_patience_is_raised(
    runs: Runs, tmp_path: Path
) -> None:
    data = str(runs.data["packed"])
    jobs.train(str(tmp_path), data, "mlm", STOPPING)
    jobs.train(str(tmp_path), data, "mlm", STOPPING)
    check_stopped(tmp_path)
    patient = {**STOPPING, "stop": {"steps": 40, "patience": 4}}
    jobs.train(str(tmp_path), data, "mlm", patient)
    assert read_result(tmp_path)["steps"] == 10
    assert read_result(tmp_path)["model_step"] == FIRST_EVALUATION


def script_losses(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """Replace the losses of steps 1, 2, …; the run must evaluate every step."""
    original = trainer.evaluate

    def evaluate(context: RunContext, state: TrainState) -> dict[str, float]:
        metrics = original(context, state)
        return metrics | {"heldout/loss": losses[state.step - 1] if state.step else 9.0}

    monkeypatch.setattr(trainer, "evaluate", evaluate)


@pytest.mark.parametrize(
    ("losses", "stop", "steps", "model_step"),
    [
        # The first evaluation is an improvement although step 0 had a lower loss.
        ([3.0, 3.0, 3.1, 9.0], {"patience": 2}, 3, 1),
        ([3.0, 3.1, 2.9, 3.0, 2.95, 9.0], {"patience": 2}, 5, 3),
        # Small gains are no improvements, but the best checkpoint is the lowest loss.
        ([3.0, 2.95, 2.91, 9.0], {"patience": 2, "min_delta": 0.1}, 3, 3),
        # Small gains add up.
        ([3.0, 2.95, 2.85, 2.84, 2.83, 9.0], {"patience": 2, "min_delta": 0.1}, 5, 5),
        ([3.0, math.nan, math.inf, 1.0], {"patience": 2}, 3, 1),
        ([math.nan, math.nan, 9.0], {"patience": 2}, 2, 2),
        ([3.0, 2.0, 2.5, 2.5], {"patience": 3}, 4, 2),
        ([1.0, 2.0, 2.5, 2.5], {}, 4, 4),
    ],
)
def test_evaluations_without_improvement_are_counted(
    monkeypatch: pytest.MonkeyPatch,
    runs: Runs,
    tmp_path: Path,
    losses: list[float],
    stop: dict[str, Any],
    steps: int,
    model_step: int,
) -> None:
    script_losses(monkeypatch, losses)
    changes = {"stop": {"steps": 4 if len(losses) == 4 else 9, **stop}}
    evaluation = {"evaluation": {"every_steps": 1}}
    jobs.train(str(tmp_path), str(runs.data["packed"]), "mlm", {**changes, **evaluation})
    result = read_result(tmp_path)
    assert (result["steps"], result["model_step"]) == (steps, model_step)


@pytest.mark.parametrize(("choice", "model_step"), [("best", 2), ("last", 6), ("auto", 6)])
def test_the_final_model_is_the_requested_step(runs: Runs, choice: str, model_step: int) -> None:
    output = {**STOPPING["output"], "final_model": choice}
    folder = runs.train_once(1, "mlm", **{**STOPPING, "stop": {"steps": 6}, "output": output})
    result = read_result(folder)
    assert (result["model_step"], result["stop_reason"]) == (model_step, "finished")
    assert read_step(folder / "model") == model_step
    origin = InitFrom(path=str(folder), optimizer="keep")
    assert warm_start.find_checkpoint(origin).name == f"step-{model_step:08d}"


def test_a_damaged_best_checkpoint_is_reported(
    monkeypatch: pytest.MonkeyPatch, runs: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate = trainer.evaluate

    def damage_best(context: RunContext, state: TrainState) -> dict[str, float]:
        for file in (tmp_path / "checkpoints" / "step-00000002").glob("*.safetensors"):
            if state.step == STOP_STEP:
                file.write_bytes(b"0")
        return evaluate(context, state)

    monkeypatch.setattr(trainer, "evaluate", damage_best)
    jobs.train(str(tmp_path), str(runs.data["packed"]), "mlm", STOPPING)
    assert (
        "the best checkpoint, of step 2, cannot be loaded: the final model is of 6" in caplog.text
    )
    assert read_step(tmp_path / "model") == STOP_STEP


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stop": {"patience": 2}}, "needs evaluations; set evaluation.every_steps"),
        ({"stop": {"min_delta": 0.1}}, "no effect without patience; set stop.patience"),
        ({"stop": {"patience": 0}}, "stop.patience"),
        (
            {
                "stop": {"patience": 2},
                "evaluation": {"every_steps": 2},
                "output": {"checkpoint": {"best_metric": "off"}},
            },
            "stop.patience needs a metric; set output.checkpoint.best_metric",
        ),
        (
            {"output": {"final_model": "best", "checkpoint": {"best_metric": "off"}}},
            "output.final_model = best needs a metric",
        ),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        settings(Path("run"), Path("data"), "mlm", **changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [(STOPPING, "stop.patience"), ({"output": {"final_model": "best"}}, "output.final_model")],
)
def test_the_best_model_needs_held_out_rows(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    data = datasets.write_packed(tmp_path / "data", heldout=0)
    with pytest.raises(SettingsError, match=f"{key} needs held-out rows"):
        dry_run.check_run(settings(tmp_path / "run", data, "mlm", **changes))
