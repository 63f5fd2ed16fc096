"""The noise band of a gate, on the held-out rows of real evaluations."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from distributed.runs import BERT
from end_to_end.test_evaluate_folders import EXECUTION, NAMES, train, write_records
from regauge import config
from regauge.cli import main
from regauge.commands import gate
from regauge.system.errors import DifferenceError

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


def check(evaluation: Path, folder: Path, sigmas: float) -> list[dict[str, Any]]:
    """Let the untrained model replace the trained one; return the metrics of the gate."""
    tables = {
        "gate": {
            "evaluation": str(evaluation),
            "new": "untrained",
            "serving": "run",
            "metrics": {"accuracy": {"sigmas": sigmas}},
        },
        "output": {"folder": str(folder)},
    }
    result = gate.run(config.build(gate.GateSettings, tables))
    metrics: list[dict[str, Any]] = result["metrics"]
    return metrics


@pytest.mark.parametrize("rows", [None, ROWS], ids=["all rows", "some rows"])
def test_the_noise_band_follows_from_the_heldout_rows_of_the_evaluation(
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
    error = sqrt((serving * (1 - serving) + new * (1 - new)) / items)
    needed = (serving - new) / error
    [metric] = check(folder, tmp_path / "passed", needed * 1.01)
    assert metric["passed"]
    assert metric["limit"] == pytest.approx(serving - needed * 1.01 * error)
    with pytest.raises(DifferenceError, match=r"accuracy is .*standard errors"):
        check(folder, tmp_path / "refused", needed * 0.99)
