"""Atomic replacement, hashing and locking of files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from regauge.system import files
from regauge.system.errors import SettingsError, TransientError

OLD, NEW = "old" * 100_000, "new" * 200_000
DIES_BEFORE_THE_RENAME = """
import os, pathlib, signal, sys
from regauge.system.files import replace_atomically
with replace_atomically(pathlib.Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
HOLDS_THE_LOCK = """
import pathlib, sys, time
from regauge.system.files import hold_lock
with hold_lock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path, contents = tmp_path / "a.txt", set()
    path.write_text(OLD)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            contents.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for content in (NEW, OLD):
            files.write_atomic(path, content)
    done.set()
    reader.join()
    assert contents <= {OLD, NEW}
    assert path.read_text() == OLD
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_that_dies_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", DIES_BEFORE_THE_RENAME, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (left,) = (entry for entry in tmp_path.iterdir() if entry != path)
    assert files.is_temporary(left)
    assert left.name.startswith(".a.txt.")
    assert not files.is_temporary(path)


def test_an_error_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    files.write_atomic(path, b"old")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_flushed_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed = tmp_path / "a.txt", []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append(path.exists()))
    files.write_atomic(path, "durable")
    assert flushed == [False]
    files.write_atomic(path, "not durable", durable=False)
    assert flushed == [False]
    files.fsync_paths([path, tmp_path])
    assert flushed == [False, True, True]


def test_a_temporary_file_may_be_in_another_folder(tmp_path: Path) -> None:
    (aside := tmp_path / "aside").mkdir()
    with files.replace_atomically(tmp_path / "a.txt", aside) as temporary:
        assert temporary.parent == aside
        temporary.write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert list(aside.iterdir()) == []


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    files.write_atomic(tmp_path / "a.txt", "text")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_json_is_sorted_and_texts_are_utf_8(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"b": 1, "a": [2, "é"]})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"a": [2, "é"], "b": 1}
    assert text.index('"a"') < text.index('"b"')
    files.write_atomic(tmp_path / "a.txt", "é")
    assert (tmp_path / "a.txt").read_bytes() == "é".encode()


def test_a_file_is_hashed(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "a").write_bytes(data)
    assert files.sha256(tmp_path / "a") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_process_holds_a_lock_until_it_ends(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "folder" else tmp_path / ".lock"
    command = [sys.executable, "-c", HOLDS_THE_LOCK, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(BlockingIOError, match="is locked by another process"),
            files.hold_lock(path),
        ):
            pass
        began = time.monotonic()
        with pytest.raises(BlockingIOError), files.hold_lock(path, wait_seconds=0.3):
            pass
        assert time.monotonic() - began >= 0.3
        threading.Timer(0.2, holder.kill).start()
        with files.hold_lock(path, wait_seconds=60):
            holder.wait()
    with files.hold_lock(path, wait_seconds=None):
        pass


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with pytest.raises(ValueError, match="within"), files.hold_lock(path):
        raise ValueError("within")
    with files.hold_lock(path):
        pass


WRITES_A_FOLDER = """
import pathlib, sys, time
from regauge.system.files import stage_output
with stage_output(pathlib.Path(sys.argv[1])) as output:
    output.mkdir()
    (output / "half").touch()
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start_writer(target: Path, seconds: float) -> subprocess.Popen[str]:
    """Start a process that writes a target for some seconds; return when it has begun."""
    command = [sys.executable, "-c", WRITES_A_FOLDER, str(target), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdout
    assert process.stdout.readline() == "writing\n"
    return process


def test_an_output_is_written_only_if_the_block_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "new" / "artifact"

    def fail() -> None:
        with files.stage_output(target) as output:
            output.mkdir()
            assert not target.exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(target.parent.iterdir())
    target.mkdir()
    with files.stage_output(target) as output:
        output.mkdir()
        (output / "whole").touch()
        assert not list(target.iterdir())
    assert [path.name for path in target.parent.rglob("*")] == ["artifact", "whole"]


def test_an_output_may_be_a_file_or_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "weights.pt")
    with files.stage_output(tmp_path / "link") as output:
        output.write_text("weights", encoding="utf-8")
    assert (tmp_path / "disk" / "weights.pt").read_text(encoding="utf-8") == "weights"
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["weights.pt"]


@pytest.mark.parametrize("name", ["folder", "file"])
def test_an_existing_output_is_left_unchanged(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match="exists; choose another target with --to"),
        files.stage_output(tmp_path / name),
    ):
        pytest.fail("the block ran")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "thesis.txt"]


def test_a_mount_point_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with (
        pytest.raises(SettingsError, match="is a mount point; choose a folder inside of it"),
        files.stage_output(tmp_path / "disk"),
    ):
        pytest.fail("the block ran")


def test_a_second_writer_of_an_output_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    with start_writer(target, 20) as first:
        with (
            pytest.raises(SettingsError, match=r"another process writes .*artifact; wait until"),
            files.stage_output(target),
        ):
            pytest.fail("the block ran")
        first.kill()
    assert list((tmp_path / ".artifact.part").rglob("half"))
    with files.stage_output(target) as output:
        output.mkdir()
        (output / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["artifact", "whole"]


def test_of_many_writers_that_start_at_once_one_succeeds(tmp_path: Path) -> None:
    """The others are refused, or the target exists; the target is never mixed."""
    for attempt in range(20):
        target, results = tmp_path / f"artifact-{attempt}", []
        barrier = threading.Barrier(8)

        def write(number: int, target: Path = target, results: list[str] = results) -> None:
            barrier.wait()  # noqa: B023
            try:
                with files.stage_output(target) as output:
                    output.mkdir()
                    for name in range(3):
                        (output / f"{name}-{number}").touch()
                results.append("written")
            except SettingsError as error:
                results.append(error.problem)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results.count("written") == 1
        assert len(results) == len(threads)
        writers = {path.name.partition("-")[2] for path in target.iterdir()}
        assert len(writers) == 1
        assert len(list(target.iterdir())) == 3
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Libraries raise exceptions of their own kinds if a disk is full."""
    full = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr("regauge.system.files.shutil.disk_usage", lambda _: full)

    def fail() -> None:
        with files.stage_output(tmp_path / "weights.pt") as output:
            output.write_bytes(b"half")
            raise RuntimeError("PytorchStreamWriter failed writing file")

    with pytest.raises(TransientError, match=r"the disk of .*weights.pt is full; free some"):
        fail()
    assert not list(tmp_path.iterdir())
