"""Many kills, resumes at other sizes, a scheduler's retry, a clock that is set back.

Rows 2, 14, 35, 36, 39 and 40 of the fault matrix.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from distributed.test_resume import assert_same
from faults.conftest import FULL, Jobs
from regauge import commands, config
from regauge.accelerators.cpu import Cpu
from regauge.run_folders import checkpoint_files
from regauge.supervision import attempt, supervisor
from regauge.supervision.heartbeat import HeartbeatTable
from regauge.supervision.watchdog import Watchdog
from regauge.system import processes, scratch
from regauge.system.jsonl import read_lines
from regauge.system.scratch import PREFIX, create_scratch_folder
from regauge.training.settings import TrainSettings

KILLS = 20


@FULL
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0])
def test_twenty_kills_in_one_job_are_survived(
    jobs: Jobs, seed: int, figure: Callable[[str, float], None]
) -> None:
    draw = np.random.default_rng(seed)
    steps = sorted(draw.choice(np.arange(1, 60), KILLS, replace=False).tolist())
    faults = [
        {"kind": "kill", "rank": int(draw.integers(2)), "step": step, "attempt": number}
        for number, step in enumerate(steps, start=1)
    ]
    changes = {"stop": {"steps": 60}, "output": {"checkpoint": {"every_steps": 1}}}
    job = jobs.create(*faults, **changes)
    jobs.assert_survives(job)
    assert len(job.triggered_faults) == KILLS
    assert [line["outcome"] for line in job.attempts] == ["process"] * KILLS + ["finished"]
    for line, fault in zip(job.attempts, job.triggered_faults, strict=False):
        figure("seconds to notice a kill", line["ended_at"] - fault["triggered_at"])
    began = {line["attempt"]: line["started_at"] for line in job.attempts}
    for line in job.attempts[:-1]:
        seconds = began[line["attempt"] + 1] - line["ended_at"]
        figure("seconds from an end to the next start", seconds)


@FULL
def test_training_resumes_soon_after_a_kill(
    jobs: Jobs, figure: Callable[[str, float], None]
) -> None:
    job = jobs.create({"kind": "kill", "rank": 1, "step": 10}).start()
    file = job.folder / "metrics.jsonl"
    while not any(line["attempt"] == 2 and "train/loss" in line for line in read_lines(file)):
        assert job.process is not None
        assert job.process.poll() is None
        time.sleep(0.02)
    figure(
        "seconds from a kill to the next step",
        time.time() - job.triggered_faults[0]["triggered_at"],
    )
    job.wait()
    assert job.code == 0


@FULL
def test_a_port_that_is_in_use_costs_one_attempt(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.create()
    expected = jobs.undisturbed_folder(job)
    find_free_port = processes.find_free_port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        ports = iter([int(listener.getsockname()[1])])
        monkeypatch.setattr(
            processes, "find_free_port", lambda: next(ports, None) or find_free_port()
        )
        settings = config.build(TrainSettings, config.read(job.folder.with_suffix(".json")))
        supervisor.supervise(settings, 2)
    assert_same(expected, job.folder)
    assert [failure["kind"] for failure in job.failures] in ([], ["network"])


@FULL
def test_a_hang_in_the_data_loader_is_detected(jobs: Jobs) -> None:
    fault = {"kind": "sleep", "at": "data", "rank": 1, "step": 10, "seconds": 1000}
    job = jobs.assert_survives(jobs.create(fault))
    (failure,) = job.failures
    assert failure["kind"] == "hang"
    assert failure["rank"] == 1
    assert failure["phase"] == "data_wait"


@FULL
def test_without_shared_memory_heartbeats_are_written_to_disk(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scratch, "MIN_FREE_BYTES", 1 << 60)
    with create_scratch_folder() as folder:
        assert not folder.is_relative_to(scratch.SHARED_MEMORY)
    job = jobs.create({"kind": "stop", "rank": 1, "step": 10})
    expected = jobs.undisturbed_folder(job)
    settings = config.build(TrainSettings, config.read(job.folder.with_suffix(".json")))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"fault": job.faults}))
    supervisor.supervise(settings, 2, str(plan))
    assert_same(expected, job.folder)
    assert [failure["kind"] for failure in job.failures] == ["hang"]


@FULL
def test_a_second_attempt_of_the_scheduler_resumes(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler restarts a job that was killed with its supervisor."""
    job = jobs.create({"kind": "sleep", "rank": 0, "step": 9, "count": 15, "seconds": 0.3}).start()
    job.wait_for_step(9)
    assert job.process is not None
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.communicate()
    job.faults = []
    monkeypatch.setenv("AWS_BATCH_JOB_ATTEMPT", "2")
    jobs.assert_survives(job)
    lines = read_lines(job.folder / "metrics.jsonl")
    assert min(line["step"] for line in lines if line["attempt"] == 2) == 7


def test_the_scratch_folder_of_a_killed_supervisor_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path)
    old, other = tmp_path / f"{PREFIX}old", tmp_path / "other"
    for path in (old, other):
        path.mkdir()
    with create_scratch_folder() as folder:
        assert not old.exists()
        assert other.exists()
        with create_scratch_folder():
            assert folder.exists(), "a folder in use was removed"
    assert not folder.exists()


LINGERING = """
import os, threading, time
if "REGAUGE_SUPERVISED" in os.environ and os.environ["RANK"] == "1":
    threading.Thread(target=time.sleep, args=(60,)).start()
"""


@FULL
def test_a_finished_process_that_does_not_exit_is_killed(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LINGERING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(attempt, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(Cpu, "is_fork_safe", False)  # so that each process starts with that thread
    job = jobs.create()
    began = time.monotonic()
    with caplog.at_level("WARNING", "regauge"):
        supervisor.supervise(
            commands.load_settings(TrainSettings, job.folder.with_suffix(".json"), ()), 2
        )
    assert time.monotonic() - began < 60.0
    assert "process 1 finished but did not exit; killing it" in caplog.text
    assert [line["outcome"] for line in job.attempts] == ["finished"]
    assert_same(jobs.undisturbed_folder(job), job.folder)


def test_a_clock_that_is_set_back_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watchdogs use the monotonic clock, and the newest checkpoint is the one of the last step."""
    heartbeats = HeartbeatTable(tmp_path / "heartbeats", 1)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert Watchdog(heartbeats, 60.0, 60.0).find_hang() is None
    assert Watchdog(heartbeats, -1.0, -1.0).find_hang() is not None
    for step, age in ((3, 10.0), (6, 500.0), (9, 9000.0)):
        path = tmp_path / "root" / checkpoint_files.checkpoint_name(step)
        path.mkdir(parents=True)
        os.utime(path, (1e9 - age, 1e9 - age))
    checkpoint_files.retain(tmp_path / "root", 1, 9)
    assert checkpoint_files.list_steps(tmp_path / "root") == [9]


MOUNT, UNMOUNT = (shutil.which(name) or name for name in ("mount", "umount"))


@contextmanager
def mount(path: Path, *options: str) -> Iterator[None]:
    """Mount something over a folder; skips the test without the permission."""
    command = [MOUNT, *options, str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("not proved here: a mount needs root")
    try:
        yield
    finally:
        subprocess.run([UNMOUNT, "-l", str(path)], check=True)


@FULL
def test_storage_that_becomes_read_only_is_logged_and_survived(jobs: Jobs) -> None:
    job = jobs.create({"kind": "sleep", "rank": 0, "step": 8, "count": 12, "seconds": 0.3})
    expected = jobs.undisturbed_folder(job)
    root = job.folder / "checkpoints"
    job.start().wait_for_step(8)
    with mount(root, "--bind", "-o", "bind,ro", str(root)):
        job.wait_for_step(13)
    job.wait()
    assert job.code == 0, job.stderr
    assert "the checkpoint of step 12 was not saved; training continues" in job.stderr_line
    assert_same(expected, job.folder)


@FULL
def test_a_disk_that_is_too_small_for_a_checkpoint_is_refused_before_the_start(jobs: Jobs) -> None:
    job = jobs.create(model={"config": {"hidden_size": 2048, "intermediate_size": 2048}})
    job.folder.mkdir()
    with mount(job.folder, "-t", "tmpfs", "-o", "size=100m", "tmpfs"):
        job.finish(76)
        assert re.search(r"a checkpoint has about .* GB, and .* GB are free", job.stderr_line)
        assert not (job.folder / "checkpoints").exists()
