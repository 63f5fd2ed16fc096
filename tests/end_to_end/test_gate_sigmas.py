"""The bounds of a gate, on the held-out rows of evaluations, and the directions of metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest, norm

from distributed.runs import BERT
from end_to_end.test_evaluate_folders import EXECUTION, NAMES, train, write_records
from regauge import config
from regauge.cli import main
from regauge.commands import gate
from regauge.run_folders.evaluation_table import build_table
from regauge.system.errors import (
    DifferenceError,
    RegaugeError,
    SettingsError,
    UndecidedError,
)

ROWS = 12
"""Rows of the limited evaluation; the run has more held-out rows."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a classifier that is better than an untrained one."""
    folder = tmp_path_factory.mktemp("classifier")
    write_records(folder / "train.jsonl", 160, 0)
    return train(
        folder,
        {"kind": "jsonl", "files": (str(folder / "train.jsonl"),)},
        {"layout": "fields", "fields": {"text": 16}, "labels": {"label": NAMES}},
        task={"kind": "classify"},
        model=BERT,
        stop={"steps": 40},
    )


def evaluate(run: Path, folder: Path, *options: str) -> dict[str, Any]:
    """Evaluate a run and its untrained model; return the document of the evaluation."""
    arguments = ["evaluate", str(run), "--to", str(folder), *EXECUTION, *options]
    assert main([*arguments, "evaluate.untrained=true", "--json"]) == 0
    document: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return document


def check(
    evaluation: Path,
    folder: Path,
    bands: dict[str, Any],
    names: tuple[str, str] = ("new", "serving"),
) -> list[dict[str, Any]]:
    """Let one model of an evaluation replace the other; return the metrics of the gate."""
    new, serving = names
    models = {"evaluation": str(evaluation), "new": new, "serving": serving}
    tables = {"gate": {**models, "metrics": bands}, "output": {"folder": str(folder)}}
    result = gate.run(config.build(gate.GateSettings, tables))
    metrics: list[dict[str, Any]] = result["metrics"]
    return metrics


def write_evaluation(folder: Path, num_rows: int, **metrics: tuple[float, float]) -> Path:
    """Write an evaluation of the models `new` and `serving`; return its folder."""
    folder.mkdir()
    rows = [
        {"name": name, **{metric: values[index] for metric, values in metrics.items()}}
        for index, name in enumerate(("new", "serving"))
    ]
    document = {
        "rows": rows,
        "identity": {"data_fingerprint": "0" * 64, "heldout_rows": num_rows},
        "settings": {"models": {"new": "a", "serving": "b"}},
    }
    config.save(folder / "evaluation.json", document)
    return folder


@pytest.mark.parametrize(
    ("names", "band", "is_refused"),
    [
        (("new", "servng"), {"max_loss": 0.1}, True),
        (("serving", "old"), {"max_loss": 0.1}, True),
        (("new", "servng"), {"min_value": 0.1}, False),
        (("new", "serving"), {"max_loss": 0.1}, False),
    ],
)
def test_a_model_to_compare_with_must_be_evaluated(
    tmp_path: Path, names: tuple[str, str], band: dict[str, Any], *, is_refused: bool
) -> None:
    """Without a registry, a wrong name is not the first model of a pipeline."""
    folder = write_evaluation(tmp_path / "evaluation", 500, accuracy=(0.8, 0.8))
    if not is_refused:
        assert check(folder, tmp_path / "gate", {"accuracy": band}, names)[0]["passed"]
        return
    with pytest.raises(SettingsError, match=f"no model '{names[1]}' to compare with; "):
        check(folder, tmp_path / "gate", {"accuracy": band}, names)
    assert not (tmp_path / "gate").exists()


def bound_gain(better: float, worse: float, num_rows: int, sigmas: float) -> tuple[float, float]:
    """Combine the Wilson bounds of scipy as Newcombe does (1998, method 10)."""
    level = 2 * norm.cdf(sigmas) - 1
    intervals = [
        binomtest(round(value * num_rows), num_rows).proportion_ci(level, "wilson")
        for value in (better, worse)
    ]
    (low, high), (other_low, other_high) = ((item.low, item.high) for item in intervals)
    gain = better - worse
    lower = gain - math.hypot(better - low, other_high - worse)
    return lower, gain + math.hypot(high - better, worse - other_low)


@pytest.mark.parametrize("rows", [None, ROWS], ids=["all rows", "some rows"])
def test_the_bounds_follow_from_the_heldout_rows_of_the_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int | None
) -> None:
    folder = tmp_path / "evaluation"
    options = [] if rows is None else [f"evaluation.rows={rows}"]
    document = evaluate(run, folder, *options)
    capsys.readouterr()
    models = {row["name"]: row for row in document["rows"]}
    serving, new = (models[name]["accuracy"] for name in ("run", "untrained"))
    items = models["run"]["items"]
    assert document["identity"]["heldout_rows"] == items
    assert items == rows if rows else items > ROWS
    assert new < serving, "the trained model is not better"
    lower, upper = bound_gain(new, serving, int(items), 1.0)
    assert upper < 0
    names = ("untrained", "run")
    band = {"sigmas": 1.0, "max_loss": -lower * 1.001}
    [metric] = check(folder, tmp_path / "passed", {"accuracy": band}, names)
    assert metric["passed"]
    assert metric["limit"] == pytest.approx(serving + lower * 1.001)
    for limit, error in ((-lower * 0.999, UndecidedError), (-upper * 0.999, DifferenceError)):
        band = {"sigmas": 1.0, "max_loss": limit}
        with pytest.raises(error, match=r"accuracy is .*standard errors") as caught:
            check(folder, tmp_path / "refused", {"accuracy": band}, names)
        assert caught.value.exit_code == error.exit_code
        record = json.loads((tmp_path / "refused" / "gate.json").read_text())
        assert not record["passed"]


@pytest.mark.parametrize(
    ("new", "num_rows", "exit_code"),
    [(0.85, 20, 70), (0.85, 100, 70), (0.85, 300, 68), (1.0, 20, 70), (1.0, 200, 0), (0.0, 20, 68)],
)
@pytest.mark.parametrize("direction", ["min", "max"])
def test_fewer_rows_never_permit_a_larger_loss(
    tmp_path: Path, new: float, num_rows: int, exit_code: int, direction: str
) -> None:
    values = (new, 1.0) if direction == "max" else (1 - new, 0.0)
    folder = write_evaluation(tmp_path / "evaluation", num_rows, rate=values)
    band = {"sigmas": 2, "max_loss": 0.02 if num_rows != 100 else 0.1, "direction": direction}
    if exit_code == 0:
        assert check(folder, tmp_path / "gate", {"rate": band})[0]["passed"]
        return
    with pytest.raises(RegaugeError) as caught:
        check(folder, tmp_path / "gate", {"rate": band})
    assert caught.value.exit_code == exit_code


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "band", [{"max_loss": 9.0}, {"max_relative_loss": 9.0}, {"sigmas": 2}, {"min_value": 0.0}]
)
@pytest.mark.parametrize("serving", ["serving", "none"])
def test_a_number_that_is_not_finite_passes_no_gate(
    tmp_path: Path, value: float, band: dict[str, Any], serving: str
) -> None:
    """Neither against another model, nor as the first one."""
    folder = write_evaluation(tmp_path / "evaluation", 500, ratio=(value, 0.5))
    if serving == "none":
        document = json.loads((folder / "evaluation.json").read_text())
        config.save(folder / "evaluation.json", document | {"rows": document["rows"][:1]})
    band = {**band, "direction": "max"}
    with pytest.raises(DifferenceError, match=f"ratio is {value}, not a finite number"):
        check(folder, tmp_path / "gate", {"ratio": band})
    record = json.loads((tmp_path / "gate" / "gate.json").read_text(), parse_constant=pytest.fail)
    assert not record["passed"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("band", [{"max_loss": 0.1}, {"max_relative_loss": 0.1}, {"sigmas": 2}])
@pytest.mark.parametrize("direction", ["min", "max"])
def test_a_serving_model_without_a_number_is_replaced(
    tmp_path: Path, value: float, band: dict[str, Any], direction: str
) -> None:
    """Otherwise no model would ever pass; fixed limits count as for a first model."""
    folder = write_evaluation(tmp_path / "evaluation", 500, ratio=(0.5, value))
    band = {**band, "direction": direction}
    [metric] = check(folder, tmp_path / "gate", {"ratio": band})
    assert metric["passed"]
    assert metric["band"] == "a serving value that is not finite"
    json.loads((tmp_path / "gate" / "gate.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(DifferenceError, match=r"ratio is 0.5, below 0.6"):
        check(folder, tmp_path / "fixed", {"ratio": {**band, "min_value": 0.6}})


@pytest.mark.parametrize("metric", ["brier", "rmse", "mae", "wer", "cross_entropy", "my_loss"])
def test_a_metric_that_no_task_declares_needs_a_direction(tmp_path: Path, metric: str) -> None:
    worse = write_evaluation(tmp_path / "worse", 500, **{metric: (0.515, 0.033)})
    better = write_evaluation(tmp_path / "better", 500, **{metric: (0.033, 0.515)})
    band: dict[str, Any] = {"max_relative_loss": 0.1}
    for folder in (worse, better):
        with pytest.raises(SettingsError, match=f"set gate.metrics.'{metric}'.direction"):
            check(folder, tmp_path / "gate", {metric: band})
    band["direction"] = "min"
    assert check(better, tmp_path / "gate", {metric: band})[0]["passed"]
    with pytest.raises(DifferenceError, match=f"{metric} is 0.515, above 0.0363"):
        check(worse, tmp_path / "gate", {metric: band})
    assert check(worse, tmp_path / "gate", {metric: {"max_value": 0.6}})[0]["passed"]


def test_declared_directions_of_an_evaluation_rank_its_rows(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "evaluation", 500, perplexity=(9.0, 8.0), brier=(0.1, 0.2))
    document = json.loads((folder / "evaluation.json").read_text())
    assert build_table(document).best_rows() == [("perplexity", "serving", 8.0)]
    document["directions"] = {"brier": "min"}
    assert ("brier", "new", 0.1) in build_table(document).best_rows()


def test_only_fixed_limits_are_checked_if_no_model_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_evaluation(tmp_path / "evaluation", 500, accuracy=(0.9, 0.9))
    message = "no model serves yet; only fixed limits were checked"
    check(folder, tmp_path / "gate", {"accuracy": {"max_loss": 0.1}})
    assert message not in caplog.text
    bands = {"accuracy": {"max_loss": 0.1, "min_value": 0.5}}
    document = json.loads((folder / "evaluation.json").read_text())
    config.save(folder / "evaluation.json", document | {"rows": document["rows"][:1]})
    check(folder, tmp_path / "gate", bands)
    assert message in caplog.text
