"""The task of a trained model, by the run or a folder in it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from regauge.inference.export.trained_task import find_task_with_dataset, find_trained_task
from saved_runs import build_saved_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with the tasks `pairs` and `words`; only `pairs` has its dataset."""
    (tmp_path / "data").mkdir()
    tasks = [
        {"name": name, "task": {"kind": kind}, "data": {"path": str(tmp_path / folder)}}
        for name, kind, folder in (("pairs", "contrastive", "data"), ("words", "mlm", "missing"))
    ]
    tables = {"model": {"architecture": "bert"}, "stop": {"steps": 1}, "output": {"folder": "run"}}
    document = build_saved_run(task=tasks, data={"path": "unused"}, **tables)
    (tmp_path / "run" / "tasks" / "words" / "model").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps(document))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("", "contrastive"), ("model", "contrastive"), ("tasks/words/model", "mlm")],
)
def test_a_folder_of_a_run_has_the_task_of_its_model(run: Path, folder: str, kind: str) -> None:
    trained = find_trained_task(run / folder)
    assert trained is not None
    assert (trained.run, trained.task.kind) == (run, kind)


def test_a_folder_outside_of_a_run_has_no_task(tmp_path: Path) -> None:
    assert find_trained_task(tmp_path) is None


def test_a_task_without_its_dataset_is_unknown(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = find_task_with_dataset(run)
    assert trained is not None
    assert trained.dataset.name == "data"
    caplog.set_level(logging.WARNING, "regauge")
    assert find_task_with_dataset(run / "tasks" / "words") is None
    assert "missing" in caplog.text
