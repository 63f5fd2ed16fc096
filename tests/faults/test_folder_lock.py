"""Two runs for one folder, and an attempt that outlives its supervisor: row 38 of the matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.conftest import FULL, Jobs
from regauge.run_folders import folder_lock
from regauge.run_folders.folder_lock import FolderLock
from regauge.system.errors import PreemptedError, SettingsError
from regauge.system.files import LOCK


@FULL
def test_a_second_run_is_refused(jobs: Jobs) -> None:
    job = jobs.create({"kind": "sleep", "rank": 0, "step": 8, "count": 8, "seconds": 0.5}).start()
    job.wait_for_step(8)
    second = jobs.create()
    second.folder = job.folder
    second.finish(2)
    assert "is being written by process" in second.stderr
    job.wait()
    assert job.code == 0
    assert (job.folder / "result.json").exists()


def test_an_attempt_with_an_old_token_publishes_nothing(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run") as lock:
        old_token = lock.issue_token()
        folder_lock.check_token(tmp_path / "run", old_token)
        new_token = lock.issue_token()
        folder_lock.check_token(tmp_path / "run", new_token)
        with pytest.raises(PreemptedError, match="another attempt writes"):
            folder_lock.check_token(tmp_path / "run", old_token)
    assert not (tmp_path / "run").exists()


def test_a_lock_is_released_at_the_end_of_its_block(tmp_path: Path) -> None:
    second = FolderLock(tmp_path)
    with FolderLock(tmp_path), pytest.raises(SettingsError, match="is being written by process"):
        second.__enter__()
    with FolderLock(tmp_path):
        pass


@pytest.mark.parametrize("target", ["outside", "nothing"])
def test_a_lock_behind_a_link_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text("of another user")
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / target)
    with pytest.raises(SettingsError, match="is a link, not a file; remove it"):
        FolderLock(tmp_path / "run").__enter__()
    assert (tmp_path / "outside").read_text() == "of another user"
    assert not (tmp_path / "nothing").exists()


def test_the_owner_of_a_lock_may_be_unreadable(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        (tmp_path / LOCK).write_bytes(b"\xff" * 10_000)
        with pytest.raises(SettingsError, match="is being written by") as caught:
            FolderLock(tmp_path).__enter__()
    assert len(str(caught.value)) < 1_000
