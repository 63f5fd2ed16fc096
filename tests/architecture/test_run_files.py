"""Every example run file is valid: names, types and choices."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture.tree import ROOT
from regauge import commands, config
from regauge.commands import pipeline
from regauge.system import choices
from regauge.system.errors import SettingsError

RUN_FILES = sorted((ROOT / "runs").glob("*.toml"))


def validate(path: Path, folder: Path) -> list[str]:
    """Build the settings of each verb that a run file is for; return the verbs.

    A file with stages is for `pipeline`; another one for every verb whose required tables it has.
    """
    tables = config.read(path)
    if "stage" in tables:
        pipeline.load(path, (f"output.folder={folder}",))
        return ["pipeline"]
    names: list[str] = []
    for verb in choices.names("verbs"):
        root = getattr(commands.import_verb(verb), "ROOT", None)
        fields = root.model_fields if root else {}
        required = {name for name, field in fields.items() if field.is_required()}
        if required and required <= tables.keys():
            config.build(root, tables, commands.table_names(), str(path))
            names.append(verb)
    if not names:
        raise SettingsError(f"{path} has all tables of no verb", "add the missing tables")
    return names


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_example_run_file_is_right(path: Path, tmp_path: Path) -> None:
    assert validate(path, tmp_path / "new")


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_run_file_begins_with_its_purpose(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_there_are_example_run_files() -> None:
    assert ROOT / "runs" / "quickstart.toml" in RUN_FILES


@pytest.mark.parametrize("text", ["[outptu]\nfolder = 'x'", "[[stage]]\nverb = 'trian'", ""])
def test_a_wrong_run_file_is_detected(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(SettingsError):
        validate(path, tmp_path / "new")
