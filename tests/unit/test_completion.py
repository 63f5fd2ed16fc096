"""Shell completion knows the keys of run files, the names of `explain` and those of `init`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regauge import cli
from regauge.commands import init
from regauge.commands._recipes.settings import DESCRIPTIONS
from regauge.commands.explain import list_words


def complete(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Return the candidates for the last word, with their descriptions."""
    assert cli.main(["__complete", *words]) == 0
    lines = capsys.readouterr().out.partition("\x1fbegin\n")[2].splitlines()
    return dict(line.partition("\t")[::2] for line in lines)


@pytest.mark.parametrize("verb", ["train", "prepare", "evaluate", "predict", "export", "compile"])
def test_keys_are_completed(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    candidates = complete(capsys, verb, "run.toml", "optimizer.l")
    assert candidates.keys() == {"optimizer.learning_rate=", "optimizer.lr_multipliers="}
    assert candidates["optimizer.learning_rate="].startswith("Peak learning rate")
    assert "stop.epochs=" in complete(capsys, verb, "run.toml", "stop.steps=3", "stop.")
    assert complete(capsys, verb, "run.toml", "task.mlm") == {
        "task.mlm_probability=": "Fraction of real tokens to predict."
    }
    assert not complete(capsys, verb, "run.toml", "zzz")


def test_names_of_explain_are_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(complete(capsys, "explain", "strategies/")) == {
        word for word in list_words() if word.startswith("strategies/")
    }
    assert "optimizer.learning_rate" in complete(capsys, "explain", "optimizer.")


def test_recipes_and_examples_are_completed(capsys: pytest.CaptureFixture[str]) -> None:
    names = {*DESCRIPTIONS, *(path.stem for path in init.find_folder().glob("*.toml"))}
    assert complete(capsys, "init", "").keys() == names
    assert complete(capsys, "init", "quick")["quickstart"]
    assert not complete(capsys, "init", "*")


def test_the_script_of_bash_asks_for_keys(tmp_path: Path) -> None:
    """The installed script is run by bash, as at a press of the tab key."""
    script = cli.build_app().generate_completion(prog_name="regauge", shell="bash")  # noqa: S604 - the name of a shell
    (tmp_path / "completion").write_text(script)
    (tmp_path / "regauge").write_text(f'#!/bin/sh\nexec {sys.executable} -m regauge "$@"\n')
    (tmp_path / "regauge").chmod(0o755)
    words = "regauge train run.toml optimizer.le"
    commands = f"""
source {tmp_path}/completion
COMP_WORDS=({words}); COMP_CWORD=3; COMP_LINE="{words}"; COMP_POINT={len(words)}
$(complete -p regauge | sed 's/.*-F \\([^ ]*\\).*/\\1/') regauge optimizer.le run.toml
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    answer = subprocess.run(
        ["/bin/bash", "-c", commands], capture_output=True, text=True, env=environment, check=False
    )
    assert "optimizer.learning_rate=" in answer.stdout, answer.stderr
