"""What every tracker must do, whichever it is: follow a run, be closed at any time, resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge import choices, config
from regauge.errors import SettingsError
from regauge.trackers import RunFacts, Tracker, started

TRAIN = {
    "train/loss": 3.214,
    "train/learning_rate": 4.8e-4,
    "train/gradient_norm": 0.9,
    "train/tokens_per_second": 12345.0,
    "train/padding_share": 0.08,
    "train/epoch": 0.5,
}
HELDOUT = {"heldout/loss": 2.9, "heldout/recall@10": 0.787}


@pytest.fixture(params=choices.names("trackers"))
def tracker(request: pytest.FixtureRequest) -> Tracker:
    try:
        return config.choose("trackers", request.param)
    except SettingsError as error:
        pytest.skip(f"not proved for '{request.param}': {error}")


def facts(folder: Path, attempt: int = 1, resumed_step: int = 0) -> RunFacts:
    return RunFacts("pairs", "a1b2", folder, attempt, 20, resumed_step, {"seed": 1})


def content(folder: Path) -> dict[str, bytes]:
    """Return every file that a tracker wrote; a database may hold more in as many bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_follows_a_run_and_writes_inside_its_folder_alone(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with started([tracker], facts(folder)) as together:
        together.log(10, TRAIN)
        together.log(10, HELDOUT)
        together.log(20, TRAIN | {"train/mfu": 0.4, "train/usd": 0.02})
        together.finish({"steps": 20, "reason": "finished", **HELDOUT})
    assert [path.name for path in tmp_path.iterdir()] in ([], ["run"])
    out, err = capsys.readouterr()
    assert content(folder) or err
    assert out == "", "standard output is the answer's"


def test_goes_on_in_the_same_place_as_attempt_2(
    tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started([tracker], facts(tmp_path)) as together:
        together.log(10, TRAIN)
        together.log(20, TRAIN)
    before = content(tmp_path)
    first = capsys.readouterr().err
    with started([tracker], facts(tmp_path, attempt=2, resumed_step=10)) as together:
        together.log(20, TRAIN)
        together.finish({"steps": 20})
    after = content(tmp_path)
    kept = all(len(after[name]) >= len(data) for name, data in before.items())
    assert kept, "an attempt was overwritten"
    assert after != before or (first and capsys.readouterr().err)


def test_is_closed_without_a_finish_when_the_run_fails(tracker: Tracker, tmp_path: Path) -> None:
    def fail() -> None:
        with started([tracker], facts(tmp_path)) as together:
            together.log(10, TRAIN)
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
    assert config.choose("trackers", saved).model_dump() == tracker.model_dump()
