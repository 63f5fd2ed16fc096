"""`regauge init` writes example run files and never overwrites a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge import config
from regauge.commands import init
from regauge.system.errors import SettingsError


def test_a_run_file_is_copied_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    answer = init.main("quickstart", target)
    assert answer["path"] == str(target)
    assert target.read_bytes() == (init.find_folder() / "quickstart.toml").read_bytes()
    assert "stage" in config.read(target)


def test_the_default_file_has_the_name_of_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    init.main("quickstart")
    assert (tmp_path / "quickstart.toml").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "mine.toml"
    target.write_text("mine")
    with pytest.raises(SettingsError, match=r"exists; name another file"):
        init.main("quickstart", target)
    assert target.read_text() == "mine"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no folder"):
        init.main("quickstart", tmp_path / "no" / "mine.toml")


def test_a_misspelled_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="did you mean 'quickstart'"):
        init.main("quikstart", tmp_path / "mine.toml")
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    answer = init.main(json=True)
    assert "classify" in {row["name"] for row in answer["recipes"]}
    assert "quickstart" in {row["name"] for row in answer["examples"]}
    assert "llama2-70b" in {row["name"] for row in answer["cluster_examples"]}
    assert all(row["description"] for table in answer.values() for row in table)
    assert '"quickstart"' in capsys.readouterr().out
