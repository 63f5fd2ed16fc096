"""A pipeline checks all stages first, runs each stage once and refuses stale stages."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from regauge import cli
from regauge.commands import pipeline
from regauge.config import FORMAT
from regauge.system.errors import DataError, SettingsError
from unit.stage_verbs import join, write

pytestmark = pytest.mark.usefixtures("two_verbs")

RUN_FILE = """\
[output]
separator = "-"

[data]
path = "@first"

[[stage]]
verb = "write"
name = "first"

[[stage]]
verb = "write"
name = "second"
text.value = "there"

[[stage]]
verb = "join"
inputs = ["@first/text.txt", "@second/text.txt"]
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "words.toml"
    path.write_text(RUN_FILE)
    return path


def read_refusal(run_file: Path, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        pipeline.load(run_file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def times_run(folder: str) -> int:
    path = Path(folder) / "runs"
    return len(path.read_text()) if path.exists() else 0


def test_each_stage_gets_its_folder_and_the_earlier_folders(run_file: Path) -> None:
    answer = pipeline.main(run_file)
    assert Path("out/words/3-join/joined.txt").read_text() == "hello-there"
    assert [stage["state"] for stage in answer["stages"]] == ["finished"] * 3
    assert answer["report"] == "out/words/3-join/joined.txt"


def test_the_record_has_settings_and_results(run_file: Path) -> None:
    pipeline.main(run_file)
    record = json.loads(Path("out/words/pipeline.json").read_text())
    assert record["format"] == FORMAT
    join = record["stages"][2]
    assert join["settings"]["inputs"] == [
        "out/words/1-first/text.txt",
        "out/words/2-second/text.txt",
    ]
    assert join["result"]["length"] == 11
    assert join["seconds"] >= 0


def test_a_finished_stage_is_not_run_again(run_file: Path) -> None:
    pipeline.main(run_file)
    second = pipeline.main(run_file)
    assert times_run("out/words/1-first") == 1
    assert second["stages"][0]["result"]["characters"] == 5


def test_until_ends_with_a_stage_and_skips_the_finished_ones(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = pipeline.main(run_file, until="second")
    assert [stage["name"] for stage in answer["stages"]] == ["first", "second"]
    assert not Path("out/words/3-join").exists()
    record = json.loads(Path("out/words/pipeline.json").read_text())
    assert [stage["state"] for stage in record["stages"]] == ["finished", "finished", "pending"]
    plan = pipeline.main(run_file, until="second", dry_run=True)
    assert [stage["state"] for stage in plan["stages"]] == ["finished"] * 2
    assert [row["name"] for row in pipeline.main(run_file, until="first", why=True)["stages"]] == [
        "first"
    ]
    assert len(pipeline.main(run_file, until="join")["stages"]) == 3
    assert times_run("out/words/1-first") == times_run("out/words/2-second") == 1
    capsys.readouterr()
    assert cli.main(["pipeline", str(run_file), "--until", "thrid"]) == 2
    assert "--until: no stage 'thrid'" in capsys.readouterr().err


def test_a_failed_stage_is_run_again_and_earlier_stages_are_kept(run_file: Path) -> None:
    with pytest.raises(DataError, match="stage 'second': the text fails; write another"):
        pipeline.main(run_file, "stage.second.text.value=fail")
    states = [s["state"] for s in json.loads(Path("out/words/pipeline.json").read_text())["stages"]]
    assert states == ["finished", "pending", "pending"]
    pipeline.main(run_file)
    assert times_run("out/words/1-first") == 1
    assert times_run("out/words/2-second") == 2
    assert Path("out/words/3-join/joined.txt").read_text() == "hello-there"


def test_a_finished_stage_with_other_settings_is_refused(run_file: Path) -> None:
    pipeline.main(run_file)
    message = read_refusal(run_file, "stage.second.text.value=you")
    assert message == (
        "stage 'second' is finished, but 'text.value' has changed from 'there' to 'you'; "
        "set another output.folder, or delete out/words/2-second to run it again"
    )
    assert times_run("out/words/2-second") == 1


def test_a_stage_with_a_changed_input_is_refused(run_file: Path) -> None:
    pipeline.main(run_file)
    shutil.rmtree("out/words/1-first")
    record_file = Path("out/words/3-join/done.json")
    record = record_file.read_text()
    record_file.unlink()
    pipeline.main(run_file, "stage.first.text.value=changed")
    record_file.write_text(record)
    message = read_refusal(run_file, "stage.first.text.value=changed")
    assert "stage 'join' is finished, but its input 'first' has changed" in message


def test_two_processes_cannot_use_one_folder(run_file: Path) -> None:
    Path("out/words").mkdir(parents=True)
    with Path("out/words/.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SettingsError, match="another process is using out/words"):
            pipeline.main(run_file)
    assert times_run("out/words/1-first") == 0
    pipeline.main(run_file)
    assert times_run("out/words/1-first") == 1


def test_overrides_apply_to_every_stage_that_has_the_key(run_file: Path) -> None:
    pipeline.main(run_file, "text.value=same", "output.separator=+", "output.folder=out/other")
    assert Path("out/other/3-join/joined.txt").read_text() == "same+same"


def test_an_output_folder_override_never_applies_to_a_stage(run_file: Path) -> None:
    text = RUN_FILE.replace('verb = "join"', 'verb = "join"\noutput.separator = "+"')
    run_file.write_text(text)
    pipeline.main(run_file, "output.folder=out/other")
    assert "+" in Path("out/other/3-join/joined.txt").read_text()


def test_an_override_of_one_stage_applies_to_that_stage(run_file: Path) -> None:
    pipeline.main(run_file, "text.value=same", "stage.second.text.value=other")
    assert Path("out/words/3-join/joined.txt").read_text() == "same-other"


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('verb = "join"', 'verb = "jion"', "did you mean 'join'?"),
        ('verb = "join"', 'verb = "pipeline"', "a stage cannot run 'pipeline'"),
        ("@second/", "@secnod/", "does not name an earlier stage; did you mean 'second'?"),
        ("@second/", "@join/", "'@join/text.txt' does not name an earlier stage"),
        ('name = "second"', 'name = "first"', "two stages are named 'first'"),
        ('name = "second"', 'name = "a/b"', "'a/b' is not a valid stage name"),
        ("text.value", "text.valeu", "unknown key 'text.valeu'; did you mean 'value'?"),
        ("text.value", "inputs", "stage 'second': write has no 'inputs'"),
        ("text.value", "data.path", "sets data.path, which the pipeline sets"),
        ("[data]", "[dta]", "unknown key 'dta'; did you mean 'data'?"),
        ("[[stage]]", "[[stag]]", "unknown key 'stag'; did you mean 'stage'?"),
        ('verb = "join"', 'verb = "join"\noutput.folder = "x"', "sets output.folder"),
    ],
)
def test_an_invalid_stage_is_refused_before_the_first_stage_starts(
    run_file: Path, before: str, after: str, says: str
) -> None:
    run_file.write_text(RUN_FILE.replace(before, after))
    assert says in read_refusal(run_file)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stage.secnod.text.value=x", "no stage 'secnod'; did you mean 'second'?"),
        ("stage.second.verb=join", "stage.second.verb is fixed"),
        ("txt.value=x", "unknown key 'txt'; did you mean 'text'?"),
    ],
)
def test_an_invalid_override_is_refused(run_file: Path, override: str, says: str) -> None:
    assert says in read_refusal(run_file, override)


def test_a_file_without_stages_is_refused(run_file: Path) -> None:
    run_file.write_text('[output]\nfolder = "x"\n')
    assert "'stage' is missing" in read_refusal(run_file)


def test_a_doubled_at_sign_is_a_literal_one(run_file: Path) -> None:
    pipeline.main(run_file, "text.value=@@home")
    assert Path("out/words/1-first/text.txt").read_text() == "@home"


def test_a_dry_run_changes_nothing_and_shows_every_stage(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = pipeline.main(run_file, dry_run=True)
    assert not Path("out").exists()
    plans = [stage["plan"] for stage in answer["stages"]]
    assert plans == [{"characters": 5}, {"characters": 5}, {"depends_on": "first, second"}]
    assert "[3/3] join: join -> out/words/3-join (pending: not run yet)" in capsys.readouterr().out


def test_a_dry_run_reads_the_secrets_of_notifications(run_file: Path) -> None:
    with run_file.open("a") as file:
        file.write('[monitoring.notifications.webhook]\nurl_variable = "NO_SUCH_URL"\n')
    answer = pipeline.main(run_file, dry_run=True)
    assert "the variable NO_SUCH_URL is not set; set NO_SUCH_URL" in answer["error"]
    assert answer["code"] == SettingsError.exit_code


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def plan(run_file: Path, *overrides: str) -> list[tuple[str, str]]:
    """Return the state and the reason of each stage; the dry run writes nothing."""
    before = contents()
    answer = pipeline.main(run_file, *overrides, dry_run=True)
    assert contents() == before
    stale = [stage for stage in answer["stages"] if stage["state"] == "stale"]
    assert ("error" in answer) == bool(stale)
    return [(stage["state"], stage.get("reason", "")) for stage in answer["stages"]]


def test_a_dry_run_of_a_finished_pipeline_shows_its_results(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.main(run_file)
    monkeypatch.setattr(join, "plan", refuse)
    done = json.loads(Path("out/words/3-join/done.json").read_text())
    capsys.readouterr()
    assert plan(run_file) == [("finished", "")] * 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"[3/3] join: join -> out/words/3-join (finished, {done['seconds']:.1f} s)"
    assert len(lines) == 3
    last = pipeline.main(run_file, dry_run=True)["stages"][2]
    assert (last["seconds"], last["result"]) == (done["seconds"], done["result"])
    assert "plan" not in last


def refuse(_: Any) -> dict[str, Any]:
    raise SettingsError("the folder exists", "name another")


def test_a_dry_run_of_a_half_finished_pipeline_plans_the_rest(run_file: Path) -> None:
    with pytest.raises(DataError):
        pipeline.main(run_file, "stage.second.text.value=fail")
    states = [
        ("finished", ""),
        ("pending", "started, but not finished"),
        ("pending", "not run yet"),
    ]
    assert plan(run_file) == states
    stages = pipeline.main(run_file, dry_run=True)["stages"]
    assert stages[1]["plan"] == {"characters": 5}
    assert stages[2]["plan"] == {"depends_on": "second"}


def test_a_dry_run_names_the_change_and_the_refusal(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline.main(run_file)
    change = "'text.value' has changed from 'there' to 'you'"
    override = "stage.second.text.value=you"
    capsys.readouterr()
    states = [("finished", ""), ("stale", change), ("stale", "its input 'second' is stale")]
    assert plan(run_file, override) == states
    lines = capsys.readouterr().out.splitlines()
    assert f"[2/3] second: write -> out/words/2-second (stale: {change})" in lines
    assert lines[-1] == f"error: {read_refusal(run_file, override)}"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_dry_run_has_the_exit_code_of_the_first_refused_stage(
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    codes = iter((64, 2))
    monkeypatch.setattr(
        write, "plan", lambda _: {"error": "the folder exists; name another", "code": next(codes)}
    )
    assert cli.main(["pipeline", str(run_file), "--dry-run", *options]) == 64
    captured = capsys.readouterr()
    assert captured.err == "regauge: the folder exists; name another\n"
    if options:
        answer = json.loads(captured.out)
        assert (answer["error"], answer["code"]) == ("the folder exists; name another", 64)


def test_an_unfinished_stage_names_a_stale_input(run_file: Path) -> None:
    pipeline.main(run_file)
    shutil.rmtree("out/words/3-join")
    override = "stage.second.text.value=you"
    assert plan(run_file, override)[2] == ("pending", "its input 'second' is stale")
    last = pipeline.main(run_file, override, dry_run=True)["stages"][2]
    assert last["plan"] == {"depends_on": "second"}, "the plan would read a stale input"


def test_a_stage_with_a_deleted_input_is_refused(run_file: Path) -> None:
    pipeline.main(run_file)
    shutil.rmtree("out/words/1-first")
    assert "stage 'join' is finished, but its input 'first' is not" in read_refusal(run_file)
    last = ("stale", "its input 'first' is not finished")
    assert plan(run_file) == [("pending", "not run yet"), ("finished", ""), last]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', "{", '{"format": 1}'])
def test_a_damaged_record_is_named(run_file: Path, text: str) -> None:
    pipeline.main(run_file)
    Path("out/words/1-first/done.json").write_text(text)
    assert "out/words/1-first/done.json cannot be read; delete" in read_refusal(run_file)
    first, _, last = plan(run_file)
    assert first[0] == "stale"
    assert last == ("stale", "its input 'first' is stale")


def test_a_folder_with_other_files_or_a_file_is_refused(run_file: Path) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("precious")
    for path in ("mine", "mine/thesis.txt"):
        refusal = read_refusal(run_file, f"output.folder={path}")
        assert f"{path} is not a pipeline's folder" in refusal
    answer = pipeline.main(run_file, "output.folder=mine", dry_run=True)
    assert answer["error"] == read_refusal(run_file, "output.folder=mine")
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_json_is_one_document(
    run_file: Path, capsys: pytest.CaptureFixture[str], *, dry_run: bool
) -> None:
    answer = pipeline.main(run_file, dry_run=dry_run, json=True)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(answer))


def test_the_last_lines_name_the_report_and_the_next_command(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = pipeline.main(run_file)
    lines = capsys.readouterr().out.splitlines()
    report, command = "report: out/words/3-join/joined.txt", "next: read out/words/2-second"
    assert lines == ["length: 11", "folder: out/words", report, command]
    assert answer["next"] == "read out/words/2-second", "the last stage with a command names it"
