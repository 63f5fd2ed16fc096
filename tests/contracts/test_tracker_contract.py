"""The contract of every tracker: record a run, close at any time, resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge import config
from regauge.monitoring.trackers import RunInfo, Tracker, start_trackers
from regauge.system import choices
from regauge.system.errors import SettingsError

TRAIN = {
    "train/loss": 3.214,
    "train/learning_rate": 4.8e-4,
    "train/grad_norm": 0.9,
    "train/tokens_per_second": 12345.0,
    "train/padding_fraction": 0.08,
    "train/epoch": 0.5,
}
HELDOUT = {"heldout/loss": 2.9, "heldout/recall@10": 0.787}


@pytest.fixture(params=choices.names("trackers"))
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        tracker: Tracker = config.parse_choice("trackers", request.param)
        has_service = "wait_seconds" in type(tracker).model_fields
        return tracker.model_copy(update={"wait_seconds": 120.0}) if has_service else tracker
    except SettingsError as error:
        pytest.skip(f"not proved for '{request.param}': {error}")


def run_info(folder: Path, attempt: int = 1, resumed_step: int = 0) -> RunInfo:
    return RunInfo("pairs", "a1b2", folder, attempt, 20, resumed_step, {"seed": 1})


def content(folder: Path) -> dict[str, bytes]:
    """Return every file that a tracker wrote; a database may hold more in as many bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_tracker_writes_only_in_the_folder_of_its_run(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with start_trackers([tracker], run_info(folder)) as group:
        group.log(10, TRAIN)
        group.log(10, HELDOUT)
        group.log(20, TRAIN | {"train/mfu": 0.4, "train/usd": 0.02})
        group.finish({"steps": 20, "stop_reason": "finished", **HELDOUT})
    assert [path.name for path in tmp_path.iterdir()] in ([], ["run"])
    out, err = capsys.readouterr()
    assert content(folder) or err
    assert out == "", "standard output must contain only the answer"


def test_attempt_2_continues_the_same_records(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_trackers([tracker], run_info(tmp_path)) as group:
        group.log(10, TRAIN)
        group.log(20, TRAIN)
    before = content(tmp_path)
    first = capsys.readouterr().err
    with start_trackers([tracker], run_info(tmp_path, attempt=2, resumed_step=10)) as group:
        group.log(20, TRAIN)
        group.finish({"steps": 20})
    after = content(tmp_path)
    kept = all(len(after[name]) >= len(data) for name, data in before.items())
    assert kept, "an attempt was overwritten"
    assert after != before or (first and capsys.readouterr().err)


def test_a_failed_run_closes_its_tracker_without_finish(tracker: Tracker, tmp_path: Path) -> None:
    def fail() -> None:
        with start_trackers([tracker], run_info(tmp_path)) as group:
            group.log(10, TRAIN)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    before = content(tmp_path)
    tracker.log(11, TRAIN)
    assert content(tmp_path) == before, "it wrote after it was closed"
    tracker.close()


def test_settings_survive_the_run_file(tracker: Tracker) -> None:
    saved = tracker.model_dump(mode="json")
    assert saved["kind"] in choices.names("trackers")
    assert config.parse_choice("trackers", saved).model_dump() == tracker.model_dump()
