"""Custom metrics of `evaluation.metrics`: their arrays, their values, and functions that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed import datasets
from distributed.jobs import lines
from distributed.runs import TASKS, settings
from regauge.config import parse_choice
from regauge.system import choices
from regauge.system.errors import DataError, RegaugeError, SettingsError
from regauge.system.processes import World
from regauge.training.heldout import load_custom_metrics
from regauge.training.run import attempt

CODE = """
import numpy as np

def error_rate(arrays):
    return (arrays["scores"].argmax(1) != arrays["labels"]).mean()

def mean_nll(arrays):
    weights = arrays["weights"]
    return {"nll": (arrays["nll"] * weights).sum() / weights.sum(), "rows": len(weights)}

def shapes(arrays):
    arrays["vectors"][:] = 0
    return {name: value.shape[0] for name, value in arrays.items()}

def relevant(arrays):
    return {"relevant": arrays["labels"].sum(), "candidates": arrays["present"].sum()}

def undefined(arrays):
    return {"undefined": float("nan"), "ratio": float("inf"), "low": float("-inf")}

def text(arrays):
    return "good"

def wrong(arrays):
    return {"loss": 1.0}

def broken(arrays):
    return 1 / 0
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    return {layout: write(root / layout) for layout, write in datasets.WRITERS.items()}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    """Return the name of a module with metrics, which only this test imports."""
    name = f"metrics_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return name


def evaluate(
    data: dict[str, Path], folder: Path, task: str, *functions: str, rows: int | None = None
) -> dict[str, float]:
    """Return the held-out metrics of the initial weights."""
    choices.allow_imports(functions)
    layout = parse_choice("tasks", TASKS[task]["task"]).row_layout()
    evaluation = {"metrics": functions, "rows": rows}
    attempt(settings(folder, data[layout], task, stop={"steps": 1}, evaluation=evaluation), World())
    first = next(line for line in lines(folder) if "heldout/loss" in line)
    return {
        name.removeprefix("heldout/"): value
        for name, value in first.items()
        if name.startswith("heldout/")
    }


@pytest.mark.parametrize("suffix", ["", ".py"])
def test_a_function_gets_the_scores_and_labels_of_all_rows(
    data: dict[str, Path], tmp_path: Path, module: str, suffix: str
) -> None:
    metrics = evaluate(data, tmp_path / "run", "classify", f"{module}{suffix}:error_rate")
    assert metrics["error_rate"] == pytest.approx(1 - metrics["accuracy"])


@pytest.mark.parametrize("task", ["mlm", "next-sentence", "clm", "sft"])
def test_language_models_give_the_loss_of_each_token(
    data: dict[str, Path], tmp_path: Path, module: str, task: str
) -> None:
    metrics = evaluate(data, tmp_path / "run", task, f"{module}:mean_nll", rows=7)
    expected = metrics["token_loss" if task == "next-sentence" else "loss"]
    assert metrics["nll"] == pytest.approx(expected, rel=1e-5)
    assert metrics["rows"] == 7, "padding rows are left out"
    assert metrics["perplexity"] == pytest.approx(np.exp(expected), rel=1e-5)


def test_several_functions_get_arrays_of_their_own(
    data: dict[str, Path], tmp_path: Path, module: str
) -> None:
    functions = (f"{module}:shapes", f"{module}:undefined")
    metrics = evaluate(data, tmp_path / "run", "contrastive", *functions, rows=7)
    assert metrics["vectors"] == 14
    texts = {name: metrics[f"{name}_text"] for name in ("undefined", "ratio", "low")}
    assert texts == {"undefined": "NaN", "ratio": "Infinity", "low": "-Infinity"}


def test_a_ranker_gives_the_labels_of_all_candidates(
    data: dict[str, Path], tmp_path: Path, module: str
) -> None:
    metrics = evaluate(data, tmp_path / "run", "rank", f"{module}:relevant")
    assert metrics["relevant"] == 10
    assert 20 <= metrics["candidates"] <= 50


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("text", "returned str; return a number, or a dictionary of numbers by name"),
        ("wrong", "returned 'loss', which is already a metric; return it under another name"),
        (
            "broken",
            r"failed: ZeroDivisionError in .*metrics_\d+\.py:\d+: division by zero; correct",
        ),
        ("brokn", r"does not define the function 'brokn'; did you mean 'broken'\?"),
    ],
)
def test_functions_that_fail_are_named(
    data: dict[str, Path], tmp_path: Path, module: str, function: str, problem: str
) -> None:
    with pytest.raises(RegaugeError, match=problem) as caught:
        evaluate(data, tmp_path / "run", "classify", f"{module}:{function}")
    kind = SettingsError if function == "brokn" else DataError
    assert isinstance(caught.value, kind)


def test_a_function_that_the_run_file_does_not_name_is_not_imported(module: str) -> None:
    with pytest.raises(SettingsError, match="the run file of this command does not name it"):
        load_custom_metrics((f"{module}:error_rate",))


@pytest.mark.parametrize("path", ["metrics.py", "a b:c", "folder/metrics.py:f"])
def test_invalid_paths_are_refused(data: dict[str, Path], tmp_path: Path, path: str) -> None:
    with pytest.raises(SettingsError, match=r"is not 'file.py:function'; name a file and"):
        settings(tmp_path / "run", data["fields"], "classify", evaluation={"metrics": (path,)})
