"""The states of the processes of a run in its output folder, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from regauge.config.output_files import RANKS, SAVED_RUN
from regauge.run_folders.node_status import Beat, read_node_statuses, write_node_status
from regauge.system import timing
from regauge.system.processes import inspect_process


def build_beat(step: int = 3) -> Beat:
    # The file rounds the time to milliseconds, so that a beat of 2 s ago may be a little younger.
    return Beat(1, step, "step", time.monotonic() - 2.001, (), 0.0, 0)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


def test_running_stopped_and_killed(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    write_node_status(tmp_path, 4, [child], [build_beat()], attempt=1)
    assert not (tmp_path / RANKS).exists()  # the run may still be refused
    (tmp_path / SAVED_RUN).touch()

    def read() -> tuple[int, str, int | None]:
        write_node_status(tmp_path, 4, [child], [build_beat()], attempt=1)
        process = read_node_statuses(tmp_path)[0].processes[0]
        assert (process.step, process.phase) == (3, "step")
        assert 2.0 <= time.time() - process.beat_at < 10.0
        return process.rank, process.state, process.exit_code

    assert timing.wait_for(lambda: read() == (4, "running", None), 10, poll_seconds=0.01)
    assert timing.wait_for(
        lambda: inspect_process(child.pid).resident_bytes > 4096, 10, poll_seconds=0.01
    )
    os.kill(child.pid, signal.SIGSTOP)
    assert timing.wait_for(lambda: read()[1] == "stopped", 10, poll_seconds=0.01)
    child.kill()
    child.wait()
    assert read() == (4, "ended", -signal.SIGKILL)
    assert list((tmp_path / RANKS).iterdir()) == [tmp_path / RANKS / "status-4.json"]


def test_only_the_newest_attempt_counts(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    (tmp_path / RANKS).mkdir()
    for attempt, first_rank in ((1, 0), (1, 8), (2, 0), (2, 4)):
        write_node_status(tmp_path, first_rank, [child], [build_beat()], attempt=attempt)
    nodes = read_node_statuses(tmp_path)
    assert [(node.attempt, node.first_rank) for node in nodes] == [(2, 0), (2, 4)]
    (tmp_path / RANKS / "status-0.json").write_text('{"attempt": 3, "first_r')
    assert [node.first_rank for node in read_node_statuses(tmp_path)] == [4]
    document = json.loads((tmp_path / RANKS / "status-4.json").read_text())
    document["processes"][0]["state"] = "other"
    (tmp_path / RANKS / "status-4.json").write_text(json.dumps(document))
    nodes = read_node_statuses(tmp_path)
    assert [(node.attempt, node.first_rank) for node in nodes] == [(1, 8)]


def test_a_folder_that_cannot_be_written_is_ignored(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    write_node_status(tmp_path / "missing", 0, [child], [build_beat()], attempt=1)
    assert read_node_statuses(tmp_path / "missing") == ()
