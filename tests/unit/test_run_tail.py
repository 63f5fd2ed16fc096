"""The present state of runs, from the ends of their files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from regauge.config.output_files import ATTEMPTS, LAST_SEEN, SAVED_RUN
from regauge.run_folders.node_status import Beat, write_node_status
from regauge.run_folders.run_tail import FRESH_SECONDS, read_run_tail
from regauge.system.files import LOCK, hold_lock
from regauge.system.timing import wait_for

NOW = 1_800_000_000.0
START = {"attempt": 1, "started_at": NOW - 3600, "processes": 2, "usd_per_hour": 4.0, "usd": 0.0}


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def build_end(outcome: str) -> dict[str, Any]:
    return {**START, "ended_at": NOW - 600, "outcome": outcome, "usd": 3.0}


@pytest.mark.parametrize(
    ("outcome", "state"),
    [("finished", "finished"), ("preempted", "preempted"), ("hang", "failed"), ("code", "failed")],
)
def test_a_recorded_end(tmp_path: Path, outcome: str, state: str) -> None:
    write_lines(tmp_path / ATTEMPTS, START, build_end(outcome))
    assert read_run_tail(tmp_path).find_state(NOW) == state
    assert read_run_tail(tmp_path).compute_usd(NOW) == 3.0


@pytest.mark.parametrize(("age", "state"), [(1.0, "running"), (FRESH_SECONDS + 1, "unknown")])
def test_a_run_on_another_machine(tmp_path: Path, age: float, state: str) -> None:
    write_lines(tmp_path / ATTEMPTS, START)
    (tmp_path / LAST_SEEN).write_text(f"{NOW - age:.3f}")
    tail = read_run_tail(tmp_path)
    assert tail.find_state(NOW) == state
    usd = tail.compute_usd(NOW)
    assert usd is not None
    assert usd == pytest.approx(4.0 * (3600 - age) / 3600)


def test_a_locked_folder_is_running(tmp_path: Path) -> None:
    write_lines(tmp_path / ATTEMPTS, START, build_end("process"))
    with hold_lock(tmp_path / LOCK):
        assert read_run_tail(tmp_path).is_locked
        assert read_run_tail(tmp_path).find_state(NOW) == "running"  # the next attempt starts
    assert read_run_tail(tmp_path).find_state(NOW) == "failed"


@pytest.mark.parametrize("holds_lock", [True, False], ids=["command", "rank"])
def test_a_run_whose_process_is_stopped(tmp_path: Path, *, holds_lock: bool) -> None:
    """The command holds the lock; its rank is in the status file."""
    write_lines(tmp_path / ATTEMPTS, START)
    (tmp_path / SAVED_RUN).touch()
    beat = Beat(1, 3, "step", time.monotonic(), (), 0.0, 0)
    with (
        subprocess.Popen(["/bin/sleep", "60"]) as process,
        ExitStack() as stack,
        hold_lock(tmp_path / LOCK),
    ):
        stack.callback(process.kill)

        def find_state() -> str:
            if not holds_lock:
                write_node_status(tmp_path, 0, [process], [beat], attempt=1)
            return read_run_tail(tmp_path).find_state(NOW)

        owner = process.pid if holds_lock else os.getpid()
        (tmp_path / LOCK).write_text(f"process {owner} of {socket.gethostname()}\n")
        for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGCONT, "running")):
            process.send_signal(number)
            assert wait_for(lambda state=state: find_state() == state, 10)


def test_reading_takes_no_lock_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / ATTEMPTS, START)
    (tmp_path / LOCK).touch()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    locked: list[object] = []
    monkeypatch.setattr("fcntl.flock", lambda *arguments: locked.append(arguments))
    read_run_tail(tmp_path).find_state(NOW)
    assert not locked
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_unsupervised_run_runs_while_it_logs(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", {"attempt": 1, "step": 3, "seconds": 1.0})
    assert read_run_tail(tmp_path).find_state(time.time()) == "running"
    assert read_run_tail(tmp_path).find_state(time.time() + 2 * FRESH_SECONDS) == "unknown"


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    lines = [{"attempt": 1, "step": step, "seconds": step / 2, "train/loss": 1.0, "train/epoch":
              step / 100} for step in range(1, 2000)]  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", *lines)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"attempt": 1, "step": 2000, "sec')
    (tmp_path / "run.json").write_text(json.dumps({"stop": {"epochs": 30}}))
    tail = read_run_tail(tmp_path)
    assert tail.step == 1999
    assert 100 < len(tail.metrics) < 300  # of 1999
    assert tail.compute_total_steps() == 3000


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"run": 1}'])
@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "ledger.jsonl", ATTEMPTS, LAST_SEEN, LOCK, "done.json"]
)
def test_damaged_files_leave_their_part_empty(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    tail = read_run_tail(tmp_path)
    assert (tail.step, tail.settings, tail.launches, tail.lock_owner) == (None, {}, (), "")
    assert tail.find_state(NOW) == ("finished" if name == "done.json" else "unknown")


def test_the_main_metric_is_the_target(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "metrics.jsonl",
        {"attempt": 1, "step": 1, "heldout/loss": 2.0, "heldout/recall@10": 0.5},
        {"attempt": 1, "step": 2, "train/loss": 3.0},
    )
    assert read_run_tail(tmp_path).find_main_metric() == "heldout/loss"
    target = {"stop": {"target": {"metric": "heldout/recall@10"}}}
    (tmp_path / "run.json").write_text(json.dumps(target))
    tail = read_run_tail(tmp_path)
    assert tail.find_main_metric() == "heldout/recall@10"
    assert tail.find_value("heldout/recall@10") == 0.5
