"""The name of a run in events, metrics, views and reports, from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge.config.run_names import hash_folder, name_run


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("out/model", "model"),
        ("out/3-train", "3-train"),
        ("out/3-train/678b130b2983", "3-train/678b130b2983"),
        ("out/678b130b2983", "678b130b2983"),
        ("out/3-train/final", "final"),
    ],
)
def test_a_round_is_named_by_its_stage(folder: str, name: str, tmp_path: Path) -> None:
    assert name_run(tmp_path / folder) == name


def test_folders_with_one_name_have_other_ids(tmp_path: Path) -> None:
    assert hash_folder(tmp_path / "a" / "model") != hash_folder(tmp_path / "b" / "model")
    assert hash_folder(tmp_path / "a" / "model") == hash_folder(tmp_path / "a" / "." / "model")
