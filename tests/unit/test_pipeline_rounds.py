"""A pipeline that repeats: rounds on growing data, reuse by hash, the gate and the promotion."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from regauge import cli
from regauge.commands import pipeline
from regauge.commands._stages import repetition, save_outcome
from regauge.data import input_hashes
from regauge.registry.pipelines.rounds import ClockReading, read_clocks
from regauge.registry.registry import Registry
from regauge.system.errors import (
    DataError,
    DifferenceError,
    InconclusiveError,
    SettingsError,
    StopSignalError,
)
from regauge.system.files import sha256
from unit.stage_verbs import score

pytestmark = pytest.mark.usefixtures("repeated_verbs")

RUN_FILE = """\
[output]
folder = "out"

[repeat]
increments = ["train"]

[registry]
path = "registry"
model = "search"

[[stage]]
verb = "fit"
name = "train"
source = { kind = "jsonl", files = ["data/*.jsonl"] }
model = { architecture = "mean", init_from.path = "@serving" }

[[stage]]
verb = "score"
models = { new = "@train", serving = "@serving" }

[[stage]]
verb = "gate"
gate = { evaluation = "@score", metrics.accuracy = { max_loss = 0.05, min_value = 0.1 } }

[[stage]]
verb = "promote"
promote = { artifact = "@train", gate = "@gate", evaluation = "@score" }
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    path = tmp_path / "daily.toml"
    path.write_text(RUN_FILE)
    add_data("1", 0.5)
    return path


def add_data(name: str, *values: float) -> None:
    text = "".join(json.dumps({"value": str(value)}) + "\n" for value in values)
    Path(f"data/{name}.jsonl").write_text(text)


def find_serving() -> int | None:
    if not Path("registry").exists():
        return None
    return Registry("registry").list_stages("search").get("production")


def read_rounds() -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = json.loads(Path("out/rounds.json").read_text())["rounds"]
    return rounds


def read_model(answer: dict[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = answer["stages"][0]["result"]
    return model


def test_a_report_covers_the_earlier_stages_of_its_round(run_file: Path) -> None:
    run_file.write_text(RUN_FILE + '\n[[stage]]\nverb = "report"\nreport.format = "json"\n')
    planned = pipeline.main(run_file, dry_run=True)["stages"][-1]
    assert planned["plan"] == {"depends_on": "gate, promote, score, train"}
    for number in (1, 2):
        answer = pipeline.main(run_file)
        folders = [stage["folder"] for stage in answer["stages"]]
        assert answer["stages"][-1]["settings"]["report"]["runs"] == folders[:-1]
        content = Path(folders[-1], "report.json").read_text()
        assert answer["report"] == f"{folders[-1]}/report.json"
        assert folders[1] in content, "only the evaluation leaves something to report"
        add_data(f"later-{number}", 0.6)


def explain(run_file: Path, *overrides: str) -> dict[str, str]:
    answer = pipeline.main(run_file, *overrides, why=True)
    return {row["name"]: f"{row['state']}: {row['why']}" for row in answer["stages"]}


def test_the_first_round_has_no_serving_model(run_file: Path) -> None:
    answer = pipeline.main(run_file)
    assert answer["round"] == 1
    assert read_model(answer) == {
        "value": 0.5,
        "records": 1,
        "start": None,
        "architecture": "mean",
    }
    assert find_serving() == 1
    assert [round_["state"] for round_ in read_rounds()] == ["finished"]


def test_a_command_hashes_a_new_file_once(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def record_hash(path: Path) -> str:
        paths.append(str(path))
        return sha256(path)

    monkeypatch.setattr(input_hashes.files, "sha256", record_hash)
    pipeline.main(run_file)
    assert len([path for path in paths if path.endswith("data/1.jsonl")]) == 1


def test_the_next_round_starts_from_the_serving_model_and_reads_only_new_files(
    run_file: Path,
) -> None:
    pipeline.main(run_file)
    add_data("2", 0.6, 0.8)
    answer = pipeline.main(run_file)
    version = Registry("registry").resolve("search", 1)
    model = read_model(answer)
    assert (model["records"], model["start"]) == (2, version.folder)
    assert model["architecture"] is None
    assert list(read_rounds()[1]["files"]["train"]) == ["data/2.jsonl"]
    assert answer["stages"][2]["result"]["serving_version"] == "1"
    assert find_serving() == 2


def test_without_new_data_nothing_runs(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = pipeline.main(run_file)
    before = Path("out/rounds.json").read_bytes()
    capsys.readouterr()
    assert cli.main(["pipeline", str(run_file)]) == 0
    line = "nothing to do: round 1 is finished, and no data is new\n"
    assert capsys.readouterr().out == line
    assert Path("out/rounds.json").read_bytes() == before
    assert Path(first["stages"][0]["folder"], "runs").read_text() == "x"


def test_jobs_that_run_one_stage_each_complete_a_round(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = []
    for name in ("train", "score", "gate"):
        answer = pipeline.main(run_file, until=name)
        add_data(f"after-{name}", 0.9)
        states.append(read_rounds()[0]["state"])
        assert [stage["name"] for stage in answer["stages"]][-1] == name
    assert states == ["running"] * 3
    assert find_serving() is None
    pipeline.main(run_file, until="promote")
    assert [round_["state"] for round_ in read_rounds()] == ["finished"]
    assert list(read_rounds()[0]["files"]["train"]) == ["data/1.jsonl"], "its files are fixed"
    pipeline.main(run_file, until="train")
    assert [round_["state"] for round_ in read_rounds()] == ["finished", "running"]
    pipeline.main(run_file)
    before = Path("out/rounds.json").read_bytes()
    capsys.readouterr()
    assert "unchanged" in pipeline.main(run_file, until="train")
    line = "nothing to do: round 2 has finished stage 'train'\n"
    assert capsys.readouterr().out == line
    assert Path("out/rounds.json").read_bytes() == before, "the round stays finished"


def test_a_part_of_a_pipeline_cannot_be_watched(run_file: Path) -> None:
    with pytest.raises(SettingsError, match="--watch runs all stages of a round; remove --until"):
        pipeline.main(run_file, until="train", watch=1.0)


def test_a_worse_model_is_refused_and_the_old_one_keeps_serving(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.main(run_file)
    add_data("2", 0.4)
    assert cli.main(["pipeline", str(run_file)]) == DifferenceError.exit_code
    line = capsys.readouterr().err.splitlines()[-1]
    assert "stage 'gate': the gate refuses the new model, version 1 keeps serving" in line
    assert "accuracy is 0.4, below 0.45 (serving model: 0.5), band: 0.05" in line
    assert find_serving() == 1
    records = [json.loads(path.read_text()) for path in Path("out/3-gate").glob("*/gate.json")]
    assert [row["metrics"][0]["new"] for row in records if not row["passed"]] == [0.4]
    assert [round_["state"] for round_ in read_rounds()] == ["finished", "refused"]


def test_the_files_of_a_refused_model_are_read_again_with_new_ones(run_file: Path) -> None:
    pipeline.main(run_file)
    add_data("2", 0.4)
    with pytest.raises(DifferenceError):
        pipeline.main(run_file)
    add_data("3", 1.0)
    answer = pipeline.main(run_file)
    assert answer["round"] == 3
    assert read_model(answer)["records"] == 2
    assert find_serving() == 2


def test_a_refused_round_is_not_trained_again(run_file: Path) -> None:
    pipeline.main(run_file)
    add_data("2", 0.4)
    for _ in range(2):
        with pytest.raises(DifferenceError):
            pipeline.main(run_file)
    folders = list(Path("out/1-train").iterdir())
    assert [(folder / "runs").read_text() for folder in folders] == ["x", "x"]
    wider = "gate.metrics.accuracy={max_loss=0.2}"
    assert pipeline.main(run_file, wider)["round"] == 2
    assert find_serving() == 2


def test_a_change_of_one_stage_keeps_the_stages_before(run_file: Path) -> None:
    pipeline.main(run_file)
    reasons = explain(run_file, "gate.metrics.accuracy.max_loss=0.1")
    assert reasons["train"] == "finished: nothing has changed since round 1"
    change = "'gate.metrics.accuracy.max_loss' has changed from 0.05 to 0.1"
    assert change in reasons["gate"]
    pipeline.main(run_file, "gate.metrics.accuracy.max_loss=0.1")
    (folder,) = Path("out/1-train").iterdir()
    assert (folder / "runs").read_text() == "x"


def test_why_names_new_files_inputs_and_versions(run_file: Path) -> None:
    assert explain(run_file)["train"] == "pending: not run yet"
    assert not Path("out").exists()
    pipeline.main(run_file)
    assert set(explain(run_file).values()) == {"finished: nothing has changed since round 1"}
    add_data("2", 0.6)
    reasons = explain(run_file)
    assert "data source: data/2.jsonl new" in reasons["train"]
    assert "input 'train' has changed from" in reasons["score"]
    assert "the serving version has changed from none to 1" in reasons["score"]


def test_why_names_another_version_of_the_code(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.main(run_file)
    monkeypatch.setattr("regauge.commands._stages.repeating.__version__", "9.9")
    assert "code regauge has changed from" in explain(run_file)["train"]


def test_a_copied_file_with_the_same_content_is_not_new(run_file: Path) -> None:
    pipeline.main(run_file)
    text = Path("data/1.jsonl").read_text()
    Path("data/1.jsonl").unlink()
    Path("data/1.jsonl").write_text(text)
    assert "unchanged" in pipeline.main(run_file)


def test_a_file_that_has_grown_is_new(run_file: Path) -> None:
    pipeline.main(run_file)
    add_data("1", 0.5, 0.9)
    assert read_model(pipeline.main(run_file))["records"] == 2


def test_a_stage_that_failed_continues_with_the_same_files(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> dict[str, Any]:
        raise DataError("the disk broke", "try again")

    with monkeypatch.context() as patch:
        patch.setattr(score, "run", fail)
        with pytest.raises(DataError):
            pipeline.main(run_file)
    assert read_rounds()[0]["state"] == "running"
    add_data("2", 0.6)
    answer = pipeline.main(run_file)
    assert (answer["round"], read_model(answer)["records"]) == (1, 1)
    assert pipeline.main(run_file)["round"] == 2


def test_another_promotion_during_a_round_is_compared_again(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.main(run_file)
    add_data("2", 0.52)

    def promote_another(settings: Any) -> dict[str, Any]:
        answer = original(settings)
        Path("other").mkdir()
        Path("other/config.json").write_text('{"value": 0.9}')
        Path("other/model.safetensors").write_bytes(b"other")
        registry = Registry("registry")
        number = registry.register("search", "other").number
        registry.promote("search", number, "production", why="by hand")
        return answer

    original = score.run
    with monkeypatch.context() as patch:
        patch.setattr(score, "run", promote_another)
        with pytest.raises(InconclusiveError, match="version 2 serves"):
            pipeline.main(run_file)
    with pytest.raises(DifferenceError, match=r"below 0\.85"):
        pipeline.main(run_file)
    assert find_serving() == 2


def test_a_promotion_that_was_killed_is_completed(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.main(run_file)
    add_data("2", 0.6)
    with monkeypatch.context() as patch:
        patch.setattr("regauge.commands._stages.save_outcome", kill_at_promotion)
        with pytest.raises(KeyboardInterrupt):
            pipeline.main(run_file)
    assert find_serving() == 2
    answer = pipeline.main(run_file)
    assert find_serving() == 2
    assert answer["stages"][2]["result"]["serving_version"] == "1", "the gate is not repeated"


def kill_at_promotion(stage: Any, outcome: dict[str, Any]) -> None:
    if stage.verb == "promote":
        raise KeyboardInterrupt
    save_outcome(stage, outcome)


def test_a_rollback_by_hand_is_kept(run_file: Path) -> None:
    pipeline.main(run_file)
    add_data("2", 0.6)
    pipeline.main(run_file)
    Registry("registry").roll_back("search", why="it is slow")
    assert "unchanged" in pipeline.main(run_file)
    assert find_serving() == 1


def test_the_minimum_refuses_a_first_model(run_file: Path) -> None:
    add_data("1", 0.01)
    with pytest.raises(DifferenceError, match=r"no model is promoted: accuracy is 0\.01"):
        pipeline.main(run_file)
    assert find_serving() is None


def test_a_metric_that_does_not_exist_is_refused(run_file: Path) -> None:
    override = "gate.metrics={acuracy={max_loss=0.1}}"
    with pytest.raises(SettingsError, match="no metric 'acuracy'; did you mean 'accuracy'"):
        pipeline.main(run_file, override)
    assert find_serving() is None


def test_a_damaged_model_is_refused(run_file: Path) -> None:
    pipeline.main(run_file)
    version = Registry("registry").resolve("search", 1)
    Path(version.folder, "model.safetensors").write_bytes(b"damaged")
    add_data("2", 0.6)
    answer = pipeline.main(run_file)
    assert answer["round"] == 2
    with pytest.raises(DataError, match="corrupted"):
        Registry("registry").promote("search", 1, why="back")
    assert find_serving() == 2


def test_a_pattern_without_files_is_refused(run_file: Path) -> None:
    shutil.rmtree("data")
    with pytest.raises(DataError, match="no file matches"):
        pipeline.main(run_file)
    assert not Path("out/rounds.json").exists()


def test_a_damaged_record_is_named(run_file: Path) -> None:
    pipeline.main(run_file)
    Path("out/rounds.json").write_text("{")
    with pytest.raises(DataError, match=r"out/rounds\.json"):
        pipeline.main(run_file)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('increments = ["train"]', 'increments = ["trian"]', "names an unknown stage 'trian'"),
        ('increments = ["train"]', 'increments = ["score"]', "does not set source.files"),
        ("max_loss = 0.05, min_value = 0.1", "", "has no limit"),
        ('"@train", serving', '"@tran", serving', "did you mean 'train'"),
    ],
)
def test_an_invalid_repetition_is_refused(
    run_file: Path, before: str, after: str, says: str
) -> None:
    assert before in RUN_FILE
    run_file.write_text(RUN_FILE.replace(before, after))
    with pytest.raises(SettingsError, match=says):
        pipeline.main(run_file)
    assert not Path("out").exists()


def test_a_folder_of_another_kind_of_pipeline_is_refused(run_file: Path) -> None:
    pipeline.main(run_file)
    run_file.write_text(RUN_FILE.replace('[repeat]\nincrements = ["train"]\n', ""))
    with pytest.raises(SettingsError):
        pipeline.main(run_file)
    assert find_serving() == 1


def test_a_second_pipeline_refuses_or_waits(run_file: Path) -> None:
    Path("out").mkdir()
    with Path("out/.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SettingsError, match="wait for it with --wait"):
            pipeline.main(run_file)
        releases = threading.Timer(0.3, fcntl.flock, (other, fcntl.LOCK_UN))
        releases.start()
        assert pipeline.main(run_file, wait=True)["round"] == 1
        releases.join()
    assert find_serving() == 1


def test_watch_needs_a_pipeline_that_repeats(run_file: Path) -> None:
    with pytest.raises(SettingsError, match="--watch 0 is not an interval"):
        pipeline.main(run_file, watch=0)


def test_watch_runs_a_round_for_each_arrival_and_survives_a_refusal(
    run_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrivals = iter([(), (0.4,), (), (0.9,), ()])
    serving: list[int | None] = []

    def pause(seconds: float) -> None:
        assert seconds == 60
        serving.append(find_serving())
        values = next(arrivals, None)
        if values is None:
            raise StopSignalError(signal.SIGTERM)
        if values:
            add_data(str(len(serving) + 1), *values)

    with pytest.raises(StopSignalError):
        pipeline.watch_data(run_file, (), 60, pause)
    assert serving == [1, 1, 1, 1, 2, 2]
    states = [entry["state"] for entry in read_rounds()]
    assert states == ["finished", "refused", "finished"]
    refusals = [line for line in caplog.messages if "the gate refuses" in line]
    assert len(refusals) == 1, "a refused round is not repeated without new data"


def test_a_late_round_is_reported_while_it_runs(
    run_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline.main(run_file, "repeat.deadline_hours=1")
    assert "deadline" not in caplog.text
    rounds = json.loads(Path("out/rounds.json").read_text())
    for stage in rounds["rounds"][0]["stages"]:
        stage["seconds"] = 3000.0 if stage["name"] in {"train", "gate"} else 0.0
    Path("out/rounds.json").write_text(json.dumps(rounds))
    add_data("2", 0.6)
    pipeline.main(run_file, "repeat.deadline_hours=1")
    (line,) = (line for line in caplog.messages if "deadline" in line)
    assert line == (
        "round 2 is projected to take 1 h 40 min, more than its deadline of 1 h 00 min, "
        "in stage 'train'"
    )


def test_clocks_that_jump_change_nothing(run_file: Path) -> None:
    dates = iter([4e9, 1e9, 5e9, 0.0] * 10)

    def read_jumping_date() -> ClockReading:
        return read_clocks().model_copy(update={"date": next(dates)})

    with pytest.MonkeyPatch.context() as patch:
        for module in (repetition, pipeline):
            patch.setattr(module, "read_clocks", read_jumping_date)
        assert pipeline.main(run_file, "repeat.deadline_hours=1")["round"] == 1
        add_data("2", 0.6)
        assert pipeline.main(run_file, "repeat.deadline_hours=1")["round"] == 2
    assert [entry["state"] for entry in read_rounds()] == ["finished", "finished"]
    assert find_serving() == 2
