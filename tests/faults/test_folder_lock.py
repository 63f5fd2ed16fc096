"""Two runs for one folder, and an attempt that outlives its own: row 38 of the fault matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.conftest import FULL, Jobs
from regauge.errors import PreemptedError, SettingsError
from regauge.supervision import folder_lock
from regauge.supervision.folder_lock import Owner


@FULL
def test_a_second_run_refuses(jobs: Jobs) -> None:
    job = jobs.job({"kind": "sleep", "rank": 0, "step": 8, "count": 8, "seconds": 0.5}).start()
    job.until(8)
    again = jobs.job()
    again.folder = job.folder
    again.start().wait()
    assert again.code == 2
    assert "is being written by process" in again.said
    job.wait()
    assert job.code == 0
    assert (job.folder / "result.json").exists()


def test_an_attempt_whose_place_is_taken_publishes_nothing(tmp_path: Path) -> None:
    with Owner(tmp_path / "run") as own:
        old = own.admit()
        folder_lock.check(tmp_path / "run", old)
        new = own.admit()
        folder_lock.check(tmp_path / "run", new)
        with pytest.raises(PreemptedError, match="another attempt writes"):
            folder_lock.check(tmp_path / "run", old)
    assert not (tmp_path / "run").exists()


def test_a_lock_is_free_when_its_process_is_gone(tmp_path: Path) -> None:
    second = Owner(tmp_path)
    with Owner(tmp_path), pytest.raises(SettingsError, match="is being written by process"):
        second.__enter__()
    with Owner(tmp_path):
        pass
