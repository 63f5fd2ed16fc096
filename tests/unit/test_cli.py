"""The command line: every failure is one line with its documented exit code."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import regauge
from regauge import cli
from regauge.commands import init
from regauge.system import choices, errors, log, processes

CLASSES = {"AsyncClient", "Callback", "Client", "Registry", "TrainingEvent"}
PACKAGES = {"models"}
"""Verbs with the name of a package, which are no functions."""


def test_the_public_names_are_the_verbs_load_and_the_classes_of_callbacks() -> None:
    modules = [choices.module_name("verbs", verb) for verb in choices.names("verbs")]
    stems = {module.rpartition(".")[2] for module in modules} - PACKAGES
    assert set(regauge.__all__) == stems | {"__version__", "load", *CLASSES}
    assert all(callable(getattr(regauge, name)) for name in (*stems, "load"))
    assert dir(regauge) == regauge.__all__


def test_an_unknown_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        regauge.trian  # noqa: B018


def test_help_lists_every_verb_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb in choices.names("verbs"):
        line = next(line for line in lines if line.startswith(f"│ {verb} "))
        assert choices.summary("verbs", verb)[:20] in line


def test_a_verbs_help_explains_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pipeline", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "key.path=value" in printed
    assert "--dry-run" in printed
    assert "--no-dry-run" not in printed


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == regauge.__version__


def test_the_function_of_a_verb_accepts_a_path_as_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_file = Path(__file__).parents[2] / "runs" / "travel.toml"
    monkeypatch.chdir(tmp_path)
    plans = [
        regauge.train(path, "stop.steps=7", dry_run=True) for path in (run_file, str(run_file))
    ]
    assert plans[0] == plans[1]
    assert plans[0]["output"] == "out/travel"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pipelin"], "regauge: no verb named 'pipelin'; did you mean 'pipeline'?"),
        (
            ["pipeline", "a.toml", "--jsn"],
            "'pipeline' has no option '--jsn'; did you mean '--json'?",
        ),
        (
            ["pipeline", "a.toml", "--zz"],
            "'pipeline' has no option '--zz'; known: --dry-run",
        ),
        (
            ["train", "a.toml", "--choas"],
            "'train' has no option '--choas'; known: --dry-run",
        ),
        (["--zzz"], "regauge: no option named '--zzz'; known: "),
        (["--hepl"], "regauge: no option named '--hepl'; did you mean '--help'?"),
        (["pipeline"], "'pipeline' needs the argument RUN-FILE; see 'regauge pipeline --help'"),
        (["export", "--to"], "parameter --to requires an argument; see 'regauge export --help'"),
        (["pipeline", "no.toml"], "regauge: no run file no.toml; name an existing one"),
        (["init", "quikstart"], "no recipe or example 'quikstart'"),
    ],
)
def test_a_usage_error_is_one_line(
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert line in printed.err
    assert printed.err.count("\n") == 1


CODED = [error for error in errors.RegaugeError.__subclasses__() if "exit_code" in vars(error)]


@pytest.mark.parametrize("error", CODED)
def test_every_error_has_its_exit_code(error: type[errors.RegaugeError]) -> None:
    line, code = cli.describe_error(error("it broke\nin two lines", "fix it"))
    assert line == "it broke in two lines; fix it"
    assert code == error.exit_code


@pytest.mark.parametrize(
    "error",
    [
        errors.DataError("a; b", "do that").add_location("there"),
        errors.ChildError(75, "a; do that"),
    ],
)
def test_an_error_can_be_pickled(error: errors.RegaugeError) -> None:
    copied = copy.copy(error)  # copied with __reduce__, as pickle does
    assert (type(copied), str(copied)) == (type(error), str(error))
    assert (copied.problem, copied.remedy) == (error.problem, error.remedy)
    assert copied.exit_code == error.exit_code


def test_the_line_of_a_child_process_is_not_prefixed_twice() -> None:
    error = errors.ChildError(2, f"{errors.ERROR_PREFIX}a is wrong; change it")
    assert cli.describe_error(error) == ("a is wrong; change it", 2)
    assert (error.problem, error.remedy) == ("a is wrong", "change it")


def test_exit_codes_are_the_documented_ones() -> None:
    codes = {error.__name__: error.exit_code for error in CODED}
    assert sorted(codes.values()) == [2, 64, 65, 66, 67, 68, 69, 75, 76, 143]
    assert codes["PreemptedError"] == 143


def test_an_interrupt_explains_how_to_resume() -> None:
    line, code = cli.describe_error(KeyboardInterrupt())
    assert "run the same command again" in line
    assert code == 130


def test_a_full_disk_is_a_transient_error() -> None:
    line, code = cli.describe_error(OSError(errno.ENOSPC, "No space left on device", "out/a"))
    assert line.startswith("no space left on the disk at out/a; free some")
    assert code == 75


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR])
def test_an_unusable_path_is_named(number: int) -> None:
    line, code = cli.describe_error(OSError(number, os.strerror(number), "out/a"))
    assert line.startswith(f"out/a cannot be used: {os.strerror(number)}; name another path")
    assert code == 2
    with pytest.raises(OSError, match="without a path") as caught:
        raise OSError(number, "without a path")
    assert cli.describe_error(caught.value)[1] == 1


def test_an_error_without_a_message_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError
    line, code = cli.describe_error(caught.value)
    assert ": no message; run again with --traceback" in line
    assert code == 1


def test_options_and_verbs_are_not_suggested_for_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--zzz"]) == cli.main(["zzz"]) == 2
    option, verb = capsys.readouterr().err.splitlines()
    assert " train" not in option
    assert "--help" in option
    assert "--help" not in verb
    assert " train" in verb


def test_a_message_with_brackets_is_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "[bold]run.txt"]) == 2
    assert "[bold]run.txt" in capsys.readouterr().err


def test_a_supervised_process_leaves_the_message_to_its_supervisor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "is_supervised", lambda: True)
    assert cli.main(["train", "run.txt", "--json"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def _broken_init(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path:
        raise ValueError("the folder\nis cursed")

    monkeypatch.setattr(init, "find_folder", folder)


@pytest.mark.usefixtures("_broken_init")
def test_an_internal_error_is_one_line_with_its_location(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["init", "quickstart"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("regauge: ValueError in regauge/commands/init.py:")
    assert "the folder is cursed; run again with --traceback" in printed
    assert printed.count("\n") == 1


def test_ctrl_c_ends_a_verb_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def folder() -> Path:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal was not handled")

    monkeypatch.setattr(init, "find_folder", folder)
    assert cli.main(["init", "quickstart"]) == 130
    assert capsys.readouterr().err == (
        "regauge: interrupted; run the same command again to continue\n"
    )


@pytest.mark.usefixtures("_broken_init")
def test_a_traceback_is_shown_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "quickstart", "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_completion_knows_the_verbs() -> None:
    script = cli.build_app().generate_completion(shell="bash")  # noqa: S604 (the name of a shell)
    assert all(verb in script for verb in choices.names("verbs"))


def test_the_module_runs_like_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[stagee]\n")
    command = [sys.executable, "-m", "regauge", "pipeline", "a.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "regauge: a.toml: unknown key 'stagee'; did you mean 'stage'?\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "document"),
    [
        (
            ["train", "none.toml"],
            {
                "error": "no run file none.toml",
                "remedy": "name an existing one, or write a run file with 'regauge init'",
                "code": 2,
            },
        ),
        (
            ["train", "a.toml", "--epochs=3"],
            {
                "error": "'train' has no option '--epochs'",
                "remedy": "write it without dashes: stop.epochs=…",
                "code": 2,
            },
        ),
        (["explain", "99"], {"error": "no exit code 99", "code": 2}),
        (["export"], {"error": "no model to export", "code": 2}),
    ],
)
def test_an_error_is_a_json_document(
    capsys: pytest.CaptureFixture[str], arguments: list[str], document: dict[str, object]
) -> None:
    assert cli.main([*arguments, "--json"]) == document["code"]
    output = capsys.readouterr()
    printed = json.loads(output.out)
    assert {key: printed[key] for key in document} == document
    assert printed.keys() == {"error", "remedy", "code"}
    assert output.err == f"regauge: {printed['error']}; {printed['remedy']}\n"
    assert cli.main(arguments) == document["code"]
    assert not capsys.readouterr().out


def test_an_answer_before_an_error_is_the_only_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_and_fail() -> None:
        log.print_json({"checks": []})
        raise errors.PreflightError("a check failed", "repair it")

    monkeypatch.setattr(cli, "_run_verb", lambda _: answer_and_fail())
    assert cli.main(["doctor", "--json"]) == 76
    assert json.loads(capsys.readouterr().out) == {"checks": []}
