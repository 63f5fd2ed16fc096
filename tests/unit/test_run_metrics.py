"""The metrics of a run from its heartbeats and files, without a run."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regauge.monitoring import vocabulary
from regauge.monitoring.vocabulary import Sample
from regauge.run_folders import checkpoint_files
from regauge.supervision.failures import POLICIES
from regauge.supervision.heartbeat import PHASES, Heartbeat, HeartbeatTable
from regauge.supervision.run_files import MAX_SCORES, RankHealth, RunFiles
from regauge.supervision.run_metrics import LocalRanks, describe_counters
from regauge.supervision.watchdog import Watchdog
from regauge.system import jsonl
from regauge.system.device_counters import DeviceCounters

Values = dict[tuple[str, ...], float]


def by_labels(samples: Iterator[Sample]) -> Values:
    """Return the values by name and labels, without the labels of the run."""
    return {(s.metric.name.removeprefix("regauge_"), *s.labels[2:]): s.value for s in samples}


HEALTHY = RankHealth()
RUN = ("run", "0123456789ab")


def read_ranks(ranks: LocalRanks, health: RankHealth = HEALTHY) -> Values:
    return by_labels(ranks.read_samples(RUN, health))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[HeartbeatTable]:
    table = HeartbeatTable(tmp_path / "heartbeats", 1)
    yield table
    table.close()


def test_a_running_rank(tmp_path: Path, table: HeartbeatTable) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeats")
    heartbeat.record_memory(1 << 30)
    heartbeat.beat("step", 7)
    ranks = LocalRanks(Watchdog(table, 60, 600), [os.getpid()], first_rank=4)
    values = read_ranks(ranks)
    assert values["rank_alive", "4"] == values["rank_progressing", "4"] == 1
    assert values["rank_healthy", "4"] == 1
    assert values["rank_step", "4"] == 7
    assert values["rank_device_memory_bytes", "4"] == 1 << 30
    assert values["rank_resident_memory_bytes", "4"] > 1e6
    assert abs(time.time() - values["rank_step_timestamp_seconds", "4"]) < 60
    assert abs(time.time() - values["rank_beat_timestamp_seconds", "4"]) < 60
    phases = {phase: values["rank_phase", "4", phase] for phase in PHASES}
    assert phases.pop("step") == 1
    assert not any(phases.values())
    assert {value for key, value in by_labels(ranks.read_end_samples(RUN)).items()} == {0}


def test_a_silent_rank_makes_no_progress_before_it_hangs() -> None:
    heartbeat = Heartbeat()
    heartbeat.beat("step", 1)
    heartbeat.beat("data_wait")
    heartbeat.beat("step")
    ranks = LocalRanks(Watchdog(heartbeat, 60, 600), [os.getpid()], 0)
    for silence, is_progressing in ((29, 1), (31, 0)):
        heartbeat._at = time.monotonic() - silence
        values = read_ranks(ranks)
        assert values["rank_progressing", "0"] == is_progressing
        assert values["rank_alive", "0"] == 1
    heartbeat.beat("compile")
    heartbeat._at = time.monotonic() - 31
    assert read_ranks(ranks)["rank_progressing", "0"] == 1


def test_a_stopped_process_is_alive_and_a_killed_one_is_not(
    table: HeartbeatTable, child: subprocess.Popen[bytes]
) -> None:
    ranks = LocalRanks(Watchdog(table, 60, 600), [child.pid], 0)
    names = ("rank_alive", "rank_stopped", "rank_progressing")
    for number, expected in ((signal.SIGSTOP, (1, 1, 0)), (signal.SIGKILL, (0, 0, 0))):
        child.send_signal(number)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        values = read_ranks(ranks)
        assert tuple(values[name, "0"] for name in names) == expected
        assert values["rank_healthy", "0"] == 1


def test_a_straggler_and_a_loss_that_is_not_finite_are_not_healthy() -> None:
    ranks = LocalRanks(Watchdog(Heartbeat(), 60, 600), [os.getpid()], 0)
    late = read_ranks(ranks, RankHealth(straggler=0, delay_seconds=0.5))
    assert (late["rank_healthy", "0"], late["rank_straggler_delay_seconds", "0"]) == (0, 0.5)
    other = read_ranks(ranks, RankHealth(straggler=1, delay_seconds=0.5))
    assert (other["rank_healthy", "0"], other["rank_straggler_delay_seconds", "0"]) == (1, 0)
    assert read_ranks(ranks, RankHealth(is_loss_finite=False))["rank_healthy", "0"] == 0


def append_ledger(folder: Path, attempt: int, step_seconds: float, **fields: Any) -> None:
    document = {"attempt": attempt, "step": 1, "seconds": {"step": step_seconds}, **fields}
    jsonl.append_line(folder / "ledger.jsonl", document)


def append_attempt(folder: Path, **fields: Any) -> None:
    jsonl.append_line(folder / "attempts.jsonl", fields)


def test_the_files_of_a_run(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    assert {key for key in by_labels(files.read_samples(RUN)) if "failures" not in key[0]} == set()
    append_attempt(tmp_path, attempt=1, started_at=time.time() - 10, planned_steps=50)
    append_ledger(tmp_path, 1, 8.0, tokens=900, padding_fraction=0.1, compiled_graphs=3, usd=2.5)
    values = {"train/loss": math.nan, "train/mfu": 0.4, "heldout/loss": 3.0, "heldout/note": "text"}
    jsonl.append_line(tmp_path / "metrics.jsonl", {"attempt": 1, "step": 1, **values})
    summary = {"attempt": 1, "step": 1, "seconds": 8.0, "summary": {"heldout/loss": 9.0}}
    jsonl.append_line(tmp_path / "metrics.jsonl", summary)
    exported = by_labels(files.read_samples(RUN))
    assert exported["run_planned_steps",] == 50
    assert exported["run_attempt",] == 1
    assert exported["run_time_seconds_total", "step"] == 8
    assert 1 < exported["run_time_seconds_total", "idle"] < 60
    assert exported["run_goodput_ratio",] == pytest.approx(0.8, abs=0.1)
    assert exported["train_tokens_total",] == 900
    assert exported["train_computed_tokens_total",] == 1000
    assert exported["train_compiled_graphs_total",] == 3
    assert exported["train_mfu_ratio",] == 0.4
    assert exported["evaluation_score", "heldout/loss"] == 3
    assert ("evaluation_score", "heldout/note") not in exported
    assert files.usd == 2.5
    assert not files.health.is_loss_finite


def test_counters_do_not_fall_when_a_run_resumes(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    append_ledger(tmp_path, 1, 8.0, tokens=900, compiled_graphs=3)
    assert by_labels(files.read_samples(RUN))["train_tokens_total",] == 900
    append_ledger(tmp_path, 2, 6.0, tokens=700, compiled_graphs=2)
    exported = by_labels(files.read_samples(RUN))
    assert exported["train_tokens_total",] == 900
    assert exported["run_time_seconds_total", "step"] == 8
    assert exported["train_compiled_graphs_total",] == 5


def test_the_idle_time_does_not_fall_in_a_new_process(tmp_path: Path) -> None:
    """A new process starts while a phase of 9 minutes is not yet in the ledger."""
    now = time.time()
    append_attempt(tmp_path, attempt=1, started_at=now - 600)
    append_ledger(tmp_path, 1, 20.0)
    os.utime(tmp_path / "ledger.jsonl", (now - 570, now - 570))
    idle = ("run_time_seconds_total", "idle")
    before = by_labels(RunFiles(tmp_path).read_samples(RUN))
    assert before[idle] == pytest.approx(10, abs=1)
    assert before["run_goodput_ratio",] == pytest.approx(20 / 540, abs=0.01)
    append_ledger(tmp_path, 1, 585.0)
    after = by_labels(RunFiles(tmp_path).read_samples(RUN))
    assert after[idle] == pytest.approx(15, abs=2)


def test_skipped_steps_are_counted_over_attempts(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    append_ledger(tmp_path, 1, 1.0)
    assert by_labels(files.read_samples(RUN))["train_skipped_steps_total",] == 0
    for attempt, count in ((1, 2), (1, 3), (2, 1)):
        line = {"attempt": attempt, "step": 1, "train/skipped_steps": count}
        jsonl.append_line(tmp_path / "metrics.jsonl", line)
    assert by_labels(files.read_samples(RUN))["train_skipped_steps_total",] == 4


def test_every_kind_of_failure_starts_at_zero(tmp_path: Path) -> None:
    append_attempt(tmp_path, attempt=1, ended_at=1.0, outcome="hang")
    append_attempt(tmp_path, attempt=2, ended_at=1.0, outcome="finished")
    exported = by_labels(RunFiles(tmp_path).read_samples(RUN))
    kinds = {key[1]: count for key, count in exported.items() if key[0] == "run_failures_total"}
    assert kinds == {**dict.fromkeys(POLICIES, 0), "hang": 1}


def test_the_straggler_of_the_last_ledger_line(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    append_ledger(tmp_path, 1, 1.0, straggler={"rank": 3, "delay_seconds": 0.5})
    list(files.read_samples(RUN))
    assert files.health == RankHealth(3, 0.5)
    append_ledger(tmp_path, 1, 2.0, straggler=None)
    list(files.read_samples(RUN))
    assert files.health == RankHealth()


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"attempt": 1, "step": 1, "seconds": 5}\nnot JSON\n')
    (tmp_path / "metrics.jsonl").write_text('{"attempt": "x"}\n')
    append_ledger(tmp_path, 1, 4.0)
    exported = by_labels(RunFiles(tmp_path).read_samples(RUN))
    assert exported["run_time_seconds_total", "step"] == 4


def test_the_number_of_scores_is_bounded(tmp_path: Path) -> None:
    scores = {f"heldout/{number}": 1.0 for number in range(MAX_SCORES + 50)}
    jsonl.append_line(tmp_path / "metrics.jsonl", {"attempt": 1, "step": 1, **scores})
    exported = by_labels(RunFiles(tmp_path).read_samples(RUN))
    assert sum(key[0] == "evaluation_score" for key in exported) == MAX_SCORES


def test_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / checkpoint_files.CHECKPOINTS
    for step in (5, 10):
        staging = checkpoint_files.staging_folder(root, step)
        staging.mkdir(parents=True)
        (staging / checkpoint_files.STATE).write_text(json.dumps({"step": step}))
        checkpoint_files.commit(
            root,
            step,
            {
                checkpoint_files.STATE: checkpoint_files.describe_file(
                    staging / checkpoint_files.STATE
                )
            },
        )
    exported = by_labels(RunFiles(tmp_path).read_samples(RUN))
    assert exported["run_checkpoint_step",] == 10
    assert abs(time.time() - exported["run_checkpoint_timestamp_seconds",]) < 60
    (root / checkpoint_files.checkpoint_name(10) / checkpoint_files.STATE).unlink()
    assert by_labels(RunFiles(tmp_path).read_samples(RUN))["run_checkpoint_step",] == 5


def test_device_counters_that_are_missing_are_not_exported() -> None:
    devices = [DeviceCounters("0", utilization=0.5, power_watts=300.0), DeviceCounters("1")]
    samples = list(describe_counters(devices))
    assert {(s.metric, s.value, s.labels) for s in samples} == {
        (vocabulary.DEVICE_UTILIZATION, 0.5, ("0",)),
        (vocabulary.DEVICE_POWER, 300.0, ("0",)),
    }
