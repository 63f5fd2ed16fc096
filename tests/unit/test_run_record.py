"""An output folder belongs to one run, which can be resumed there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from distributed.runs import settings
from regauge import config
from regauge.config import build
from regauge.config.output_files import ENVIRONMENT, RESULT, SAVED_RUN
from regauge.system import processes
from regauge.system.errors import DataError, SettingsError
from regauge.system.files import write_json
from regauge.training import run_record
from regauge.training.settings import TrainSettings

DATA = Path("data")


def run(folder: Path, **changes: Any) -> TrainSettings:
    return settings(folder, DATA, "mlm", **changes)


@pytest.fixture
def owned_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    run_record.write_records(folder, run(folder), "f00", "id-1", "w")
    return folder


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 8}, "seed is 7, not 8"),
        ({"task": {"mlm_probability": 0.3}}, "task.mlm_probability is 0.15, not 0.3"),
        ({"model": {"config": {"hidden_size": 64}}}, "model.config.hidden_size is 32, not 64"),
        ({"model": {"dropout": 0.0}}, "model.dropout is 0.1, not 0.0"),
        ({"optimizer": {"learning_rate": 0.1}}, "optimizer.learning_rate is 0.003, not 0.1"),
        ({"batch": {"rows": 16}}, "batch.rows is 8, not 16"),
    ],
)
def test_the_folder_of_another_run_is_refused_with_the_different_key(
    owned_folder: Path, changes: dict[str, Any], difference: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        run_record.check_same_run(owned_folder, run(owned_folder, **changes), "f00")
    assert difference in caught.value.problem
    assert str(owned_folder) in caught.value.problem
    assert "name another output.folder" in caught.value.remedy


def test_the_run_of_an_earlier_format_is_neither_resumed_nor_read(owned_folder: Path) -> None:
    path = owned_folder / SAVED_RUN
    document = json.loads(path.read_text())
    document[config.RUN_IDENTITY]["format"] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"earlier Regauge \(format 1\); name another output"):
        run_record.check_same_run(owned_folder, run(owned_folder), "f00")
    with pytest.raises(DataError, match=r"earlier Regauge \(format 1\); repeat the run"):
        config.read(path)


def test_different_data_make_a_different_run(owned_folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"data.fingerprint is 'f00', not 'ba7'"):
        run_record.check_same_run(owned_folder, run(owned_folder), "ba7")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stop": {"steps": 99}},
        {"strategy": "zero1", "execution": {"processes": 4, "precision": "bf16"}},
        {"batch": {"microbatch_rows": 4}},
        {"data": {"path": "moved", "workers": 3}},
        {"output": {"log_every_steps": 5, "checkpoint": {"keep_last": 1}}},
        {"evaluation": {"every_steps": 3}},
    ],
)
def test_execution_settings_may_change(owned_folder: Path, changes: dict[str, Any]) -> None:
    assert run_record.check_same_run(owned_folder, run(owned_folder, **changes), "f00") == "id-1"


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("draft")
    with pytest.raises(SettingsError, match=r"contains other files \(thesis.txt\) and no run"):
        run_record.check_same_run(tmp_path, run(tmp_path), "f00")


def test_files_of_other_processes_of_a_new_run_are_accepted(
    tmp_path: Path,
) -> None:
    """Process 0 writes its files while the other processes check the folder."""
    for name in ("environment.json", ".run.json.part", "ranks"):
        (tmp_path / name).write_text("{}")
    assert len(run_record.check_same_run(tmp_path, run(tmp_path), "f00")) == 12


def test_a_damaged_record_is_refused(owned_folder: Path) -> None:
    (owned_folder / SAVED_RUN).write_text("{")
    with pytest.raises(DataError, match=r"run.json cannot be read: .*; name another"):
        run_record.check_same_run(owned_folder, run(owned_folder), "f00")


def test_the_record_is_a_valid_run_file(owned_folder: Path) -> None:
    saved = json.loads((owned_folder / SAVED_RUN).read_text())
    facts = saved.pop("run")
    assert (facts["run_id"], facts["data_fingerprint"]) == ("id-1", "f00")
    assert facts["format"] == config.FORMAT
    assert build(TrainSettings, saved) == run(owned_folder)
    environment = json.loads((owned_folder / ENVIRONMENT).read_text())
    assert environment["packages"]["torch"]


def test_environment_variables_are_logged_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outside = {"OMP_PROC_BIND": "true", "DNNL_VERBOSE": "1", "MY_TOKEN": "x"}
    monkeypatch.setattr(processes, "INHERITED_ENVIRONMENT", outside)
    run_record.write_records(tmp_path, run(tmp_path, accelerator="cpu"), "f00", "id-1", "w")
    recorded = json.loads((tmp_path / ENVIRONMENT).read_text())["variables"]
    assert recorded == {"OMP_PROC_BIND": "true", "DNNL_VERBOSE": "1"}
    assert "DNNL_VERBOSE=1, OMP_PROC_BIND=true" in caplog.text
    run_record.write_records(tmp_path, run(tmp_path, accelerator="cpu"), "f00", "id-1", "w")
    assert caplog.text.count("environment variables that affect") == 1, "logged again by attempt 2"
    monkeypatch.setattr(processes, "INHERITED_ENVIRONMENT", {"OMP_PROC_BIND": "false"})
    run_record.write_records(tmp_path, run(tmp_path, accelerator="cpu"), "f00", "id-1", "w")
    assert "OMP_PROC_BIND=false" in caplog.text


@pytest.mark.parametrize(("folder", "is_recorded"), [("", False), ("/data/graphs", True)])
def test_only_a_cache_of_the_user_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    is_recorded: bool,  # noqa: FBT001
) -> None:
    """A command sets the default folder, because it has a temporary folder of its own."""
    outside = {"TORCHINDUCTOR_CACHE_DIR": folder or default_cache_dir()}
    monkeypatch.setattr(processes, "INHERITED_ENVIRONMENT", outside)
    recorded = run_record.describe_environment(())["variables"]
    assert recorded == (outside if is_recorded else {})


@pytest.mark.parametrize(("schedule", "times"), [("linear", 1), ("constant", 0)])
def test_a_changed_length_is_logged_if_it_changes_the_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: str, times: int
) -> None:
    for steps in (10, 20):
        changes = {"optimizer": {"schedule": {"kind": schedule}}}
        stop = {"steps": steps}
        run_record.write_records(tmp_path, run(tmp_path, **changes, stop=stop), "f00", "id-1", "w")
    expected = "stop.steps = 10 in the run before, and stop.steps = 20 now: this changes the linear"
    assert caplog.text.count(expected) == times
    run_record.write_records(
        tmp_path, run(tmp_path, **changes, stop={"steps": None, "epochs": 2.0}), "f00", "id-1", "w"
    )
    assert (
        caplog.text.count("stop.steps = 20 in the run before, and stop.epochs = 2.0 now") == times
    )


def test_decisions_of_the_first_attempt_are_kept(tmp_path: Path) -> None:
    decided = {"precision": "bf16", "threads": 5, "processes": 2}
    run_record.write_records(tmp_path, run(tmp_path, execution=decided), "f00", "id-1", "w")
    left_open = {"precision": "auto", "threads": None}
    for table, expected in (
        ({**left_open, "processes": 2}, ("bf16", 5)),
        ({**left_open, "processes": 4}, ("bf16", None)),
        ({"precision": "fp32", "threads": 1}, ("fp32", 1)),
    ):
        same = run_record.inherit_decisions(run(tmp_path, execution=table), tmp_path)
        assert (same.execution.precision, same.execution.threads) == expected


TARGET = {"metric": "heldout/loss", "at_most": 5.0}
REACHED, NO_BETTER = "reached heldout/loss", "no better heldout/loss in 2 evaluations"
EVALUATED = {"evaluation": {"every_steps": 1}}


@pytest.mark.parametrize(
    ("before", "reason", "after", "is_finished"),
    [
        ({}, "finished", {"steps": 4}, True),
        ({}, "finished", {"steps": 3}, True),
        ({}, "finished", {"steps": 5}, False),
        ({"target": TARGET}, REACHED, {"target": TARGET}, True),
        ({"target": TARGET}, REACHED, {"target": {**TARGET, "at_most": 4.0}}, False),
        ({"target": TARGET}, REACHED, {}, False),
        ({"patience": 2}, NO_BETTER, {"patience": 2}, True),
        ({"patience": 2}, NO_BETTER, {"patience": 1}, True),
        ({"patience": 2}, NO_BETTER, {"patience": 3}, False),
        ({"patience": 2}, NO_BETTER, {}, False),
        ({"patience": 2}, NO_BETTER, {"patience": 2, "min_delta": 1.0}, True),
    ],
)
def test_a_run_is_finished_if_its_settings_would_end_it_again(
    tmp_path: Path, before: Any, reason: str, after: Any, *, is_finished: bool
) -> None:
    run_record.write_records(tmp_path, run(tmp_path, stop=before, **EVALUATED), "f", "id", "w")
    result = {"steps": 4, "stop_reason": reason}
    write_json(tmp_path / RESULT, result)
    current = run(tmp_path, stop=after, **EVALUATED)
    total_steps = current.stop.total_steps(1)
    assert run_record.find_result(tmp_path, current, total_steps) is None, "there is no model"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    answer = run_record.find_result(tmp_path, current, total_steps)
    assert answer == (result if is_finished else None)


def test_a_run_without_the_model_of_a_task_is_not_finished(tmp_path: Path) -> None:
    several = settings(tmp_path, DATA, "several")
    run_record.write_records(tmp_path, several, "f", "id", "w")
    write_json(tmp_path / RESULT, {"steps": 12, "stop_reason": "finished"})
    for folder in ("model", "tasks/words/model", "tasks/topics/model"):
        assert run_record.find_result(tmp_path, several, 12) is None
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").touch()
    assert run_record.find_result(tmp_path, several, 12) is not None


def test_the_environment_of_a_run_has_the_variables_that_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default spin count of Regauge is no choice of the user."""
    set_variables = {"GOMP_SPINCOUNT": "3000", "OMP_NUM_THREADS": "2", "HOME": "/root"}
    monkeypatch.setattr(processes, "INHERITED_ENVIRONMENT", set_variables)
    assert run_record.describe_environment(())["variables"] == {"OMP_NUM_THREADS": "2"}
    set_variables["GOMP_SPINCOUNT"] = "7"
    assert run_record.describe_environment(())["variables"]["GOMP_SPINCOUNT"] == "7"
