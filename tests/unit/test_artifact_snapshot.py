"""The copy of an artifact that a version of a served model reads."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from regauge.inference.export.artifact import Artifact
from regauge.serving.artifact_snapshot import create_snapshot, remove_snapshot
from unit.small_artifacts import write_artifact


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    manifest: Any = None
    return Artifact(write_artifact(tmp_path / "model"), manifest)


def test_a_copy_has_all_files_and_names_its_source(artifact: Artifact, tmp_path: Path) -> None:
    copy = create_snapshot(artifact)
    assert copy.folder.parent == tmp_path / "temporary"
    assert copy.origin == copy.source == artifact.folder == artifact.origin
    assert copy.content_sha256 == artifact.content_sha256
    assert (copy.folder / "payload" / "program.bin").read_bytes() == b"program"
    (artifact.folder / "payload" / "program.bin").write_bytes(b"other")
    assert (copy.folder / "payload" / "program.bin").read_bytes() == b"program"
    remove_snapshot(copy)
    assert not copy.folder.exists()
    remove_snapshot(artifact)
    assert artifact.folder.exists()


def test_an_artifact_is_served_without_a_copy_if_the_disk_is_full(
    artifact: Artifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def copy(_: str, target: str) -> None:
        Path(target).write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copytree = shutil.copytree

    def copy_folder(source: Path, target: Path, *_: Any, **__: Any) -> Path:
        return copytree(source, target, copy_function=copy, dirs_exist_ok=True)

    monkeypatch.setattr(shutil, "copytree", copy_folder)
    assert create_snapshot(artifact) is artifact
    assert list((tmp_path / "temporary").iterdir()) == []
    [message] = caplog.messages
    assert message == (
        f"{artifact.folder} is served without a copy of its files"
        " ([Errno 28] No space left on device); do not overwrite them"
    )
