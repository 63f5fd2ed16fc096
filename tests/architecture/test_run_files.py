"""Every example run file can be run as it is: names, types and choices are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture.tree import ROOT
from regauge import choices, config, verbs
from regauge.errors import SettingsError
from regauge.verbs import pipeline

RUN_FILES = sorted((ROOT / "runs").glob("*.toml"))


def validated(path: Path, folder: Path) -> list[str]:
    """Return the verbs that a run file is for, each with its settings built.

    A file with stages is for `pipeline`; another one for every verb whose required tables it has.
    """
    tables = config.read(path)
    if "stage" in tables:
        pipeline.load(path, (f"output.folder={folder}",))
        return ["pipeline"]
    found = []
    for verb in choices.names("verbs"):
        root = getattr(verbs.import_verb(verb), "ROOT", None)
        fields = root.model_fields if root else {}
        required = {name for name, field in fields.items() if field.is_required()}
        if required and required <= tables.keys():
            config.build(root, tables, verbs.table_names(), str(path))
            found.append(verb)
    if not found:
        raise SettingsError(f"{path} has all tables of no verb", "add the missing tables")
    return found


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_golden_run_file_is_right(path: Path, tmp_path: Path) -> None:
    assert validated(path, tmp_path / "new")


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)
def test_a_golden_run_file_says_what_it_is_for(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_there_are_golden_run_files() -> None:
    assert ROOT / "runs" / "quickstart.toml" in RUN_FILES


@pytest.mark.parametrize("text", ["[outptu]\nfolder = 'x'", "[[stage]]\nverb = 'trian'", ""])
def test_a_wrong_run_file_is_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(SettingsError):
        validated(path, tmp_path / "new")
