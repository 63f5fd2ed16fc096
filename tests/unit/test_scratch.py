"""Temporary folders of commands do not outlive them for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from regauge.system import scratch, timing
from regauge.system.files import hold_lock

COMMAND = """
import multiprocessing, os, sys, tempfile, time
from regauge.system import scratch, stop_signals
stop_signals.LIMIT_SECONDS = 0.1
stop_signals.start_command()
with scratch.use_command_folder(), scratch.create_scratch_folder() as run:
    lock = multiprocessing.get_context("spawn").Lock()
    leftover = tempfile.mkdtemp(prefix="of a library ")
    print(tempfile.gettempdir(), run, lock._semlock.name, sep="\\n", flush=True)
    input()
"""


class RunningCommand:
    """A command that holds folders and a semaphore until it reads a line."""

    def __init__(self, temporary: Path) -> None:
        temporary.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        output = self._process.stdout
        assert output is not None
        lines = [output.readline().strip() for _ in range(3)]
        semaphore = scratch.SHARED_MEMORY / f"sem.{lines[2].removeprefix('/')}"
        self.paths = [Path(lines[0]), Path(lines[1]), semaphore]
        assert self.paths[0].parent == temporary

    def exists(self) -> list[bool]:
        return [path.exists() for path in self.paths]

    def end(self, number: int = 0) -> int:
        """End it by a line, or by a signal to all of its processes; return its exit code."""
        if number:
            os.killpg(self._process.pid, number)
            self._process.wait(60)
        self._process.communicate("" if number else "\n")
        return self._process.returncode


def run_next_command(temporary: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "regauge", "explain", "75"],
        env={**os.environ, "TMPDIR": str(temporary)},
        check=True,
        capture_output=True,
    )


@pytest.mark.parametrize(("number", "code"), [(0, 0), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_removes_its_own_folders(tmp_path: Path, number: int, code: int) -> None:
    command = RunningCommand(tmp_path)
    assert command.exists() == [True, True, True]
    assert command.end(number) == code
    assert timing.wait_for(lambda: not any(command.exists()), 10, poll_seconds=0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_the_next_command_removes_the_folders_of_a_killed_one(tmp_path: Path) -> None:
    living, killed = RunningCommand(tmp_path), RunningCommand(tmp_path)
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    assert killed.exists()[:2] == [True, True]
    run_next_command(tmp_path)
    assert killed.exists() == [False, False, False]
    assert living.exists() == [True, True, True]
    assert living.end() == 0
    assert living.exists() == [False, False, False]


def test_links_and_files_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").touch()
    link, file = tmp_path / f"{scratch.PREFIX}link", tmp_path / f"{scratch.PREFIX}file"
    link.symlink_to(target)
    file.touch()
    with scratch.create_scratch_folder():
        assert link.is_symlink()
        assert file.exists()
    assert (target / "file").exists()


def test_a_folder_of_another_user_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)
    folder = tmp_path / f"{scratch.PREFIX}other"
    folder.mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with scratch.create_scratch_folder():
        assert folder.exists()


def test_a_new_folder_that_another_command_is_removing_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)
    locked, free = (tmp_path / f"{scratch.PREFIX}{name}" for name in ("locked", "free"))
    gone = tmp_path / f"{scratch.PREFIX}gone"
    new_folders = iter([locked, gone, free])
    for folder in (locked, free):
        folder.mkdir()
    monkeypatch.setattr(scratch, "_remove_abandoned", lambda *_: None)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: next(new_folders))
    with hold_lock(locked), scratch.create_scratch_folder() as folder:
        assert folder == free
    assert locked.exists()
