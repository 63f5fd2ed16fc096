"""Kills without end, resumes at other sizes, a scheduler's retry, a clock that is set back.

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
from regauge import config, processes, verbs
from regauge import scratch as scratches
from regauge.accelerators.cpu import Cpu
from regauge.checkpoint import layout
from regauge.jsonl import whole
from regauge.scratch import PREFIX, scratch
from regauge.supervision import attempt, supervisor
from regauge.supervision.heartbeat import HeartbeatTable
from regauge.supervision.watchdog import Watchdog
from regauge.training.settings import Training

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
    job = jobs.job(*faults, **changes)
    jobs.survives(job)
    assert len(job.struck) == KILLS
    assert [line["end"] for line in job.attempts] == ["process"] * KILLS + ["finished"]
    for one, struck in zip(job.attempts, job.struck, strict=False):
        figure("seconds to notice a kill", one["ended"] - struck["time"])
    began = {line["attempt"]: line["began"] for line in job.attempts}
    for one in job.attempts[:-1]:
        figure("seconds from an end to the next start", began[one["attempt"] + 1] - one["ended"])


@FULL
def test_a_killed_process_is_back_at_work_soon(
    jobs: Jobs, figure: Callable[[str, float], None]
) -> None:
    job = jobs.job({"kind": "kill", "rank": 1, "step": 10}).start()
    file = job.folder / "metrics.jsonl"
    while not any(line["attempt"] == 2 and "train/loss" in line for line in whole(file)):
        assert job.process is not None
        assert job.process.poll() is None
        time.sleep(0.02)
    figure("seconds from a kill to the next step", time.time() - job.struck[0]["time"])
    job.wait()
    assert job.code == 0


@FULL
def test_a_meeting_place_that_is_taken_costs_one_attempt(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.job()
    expected = jobs.whole(job)
    free = processes.free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([int(taken.getsockname()[1])])
        monkeypatch.setattr(processes, "free_port", lambda: next(ports, None) or free())
        settings = config.build(Training, config.read(job.folder.with_suffix(".json")))
        supervisor.supervise(settings, 2)
    assert_same(expected, job.folder)
    assert [failure["kind"] for failure in job.failures] in ([], ["network"])


@FULL
def test_a_loader_that_hangs_is_found(jobs: Jobs) -> None:
    fault = {"kind": "sleep", "at": "data", "rank": 1, "step": 10, "seconds": 1000}
    job = jobs.survives(jobs.job(fault))
    (failure,) = job.failures
    assert failure["kind"] == "hang"
    assert failure["rank"] == 1
    assert failure["phase"] == "data_wait"


@FULL
def test_without_shared_memory_signs_of_life_go_to_the_disk(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scratches, "ROOM_BYTES", 1 << 60)
    with scratch() as place:
        assert not place.is_relative_to(scratches.SHARED)
    job = jobs.job({"kind": "stop", "rank": 1, "step": 10})
    expected = jobs.whole(job)
    settings = config.build(Training, config.read(job.folder.with_suffix(".json")))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"fault": job.faults}))
    supervisor.supervise(settings, 2, str(plan))
    assert_same(expected, job.folder)
    assert [failure["kind"] for failure in job.failures] == ["hang"]


@FULL
def test_a_scheduler_s_second_attempt_goes_on(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was killed with its supervisor is started again by the scheduler."""
    job = jobs.job({"kind": "sleep", "rank": 0, "step": 9, "count": 15, "seconds": 0.3}).start()
    job.until(9)
    assert job.process is not None
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.communicate()
    job.faults = []
    monkeypatch.setenv("AWS_BATCH_JOB_ATTEMPT", "2")
    jobs.survives(job)
    told = whole(job.folder / "metrics.jsonl")
    assert min(line["step"] for line in told if line["attempt"] == 2) == 7


def test_a_killed_supervisor_s_folder_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratches, "SHARED", tmp_path)
    old, other = tmp_path / f"{PREFIX}old", tmp_path / "other"
    for path in (old, other):
        path.mkdir()
    with scratch() as place:
        assert not old.exists()
        assert other.exists()
        with scratch():
            assert place.exists(), "a folder in use was swept"
    assert not place.exists()


LINGERING = """
import os, threading, time
if "REGAUGE_SUPERVISED" in os.environ and os.environ["RANK"] == "1":
    threading.Thread(target=time.sleep, args=(60,)).start()
"""


@FULL
def test_a_process_that_has_done_its_work_and_does_not_end_is_killed(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LINGERING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(attempt, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(Cpu, "forkable", False)  # then each process begins with that thread
    job = jobs.job()
    began = time.monotonic()
    with caplog.at_level("WARNING", "regauge"):
        supervisor.supervise(verbs.load(Training, job.folder.with_suffix(".json"), ()), 2)
    assert time.monotonic() - began < 60.0
    assert "process 1 finished, and then did not end: it is killed" in caplog.text
    assert [line["end"] for line in job.attempts] == ["finished"]
    assert_same(jobs.whole(job), job.folder)


def test_a_clock_that_is_set_back_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watchdogs count by the monotonic clock, and what is newest is told by its step."""
    pulses = HeartbeatTable(tmp_path / "pulse", 1)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert Watchdog(pulses, 60.0, 60.0).overdue() is None
    assert Watchdog(pulses, -1.0, -1.0).overdue() is not None
    for step, age in ((3, 10.0), (6, 500.0), (9, 9000.0)):
        path = tmp_path / "root" / layout.name_of(step)
        path.mkdir(parents=True)
        os.utime(path, (1e9 - age, 1e9 - age))
    layout.retain(tmp_path / "root", 1, 9)
    assert layout.steps(tmp_path / "root") == [9]


MOUNT, UNMOUNT = (shutil.which(name) or name for name in ("mount", "umount"))


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    """Mount something over a folder; a user who may not cannot prove what the test proves."""
    command = [MOUNT, *options, str(path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("not proved here: a mount needs root")
    try:
        yield
    finally:
        subprocess.run([UNMOUNT, "-l", str(path)], check=True)


@FULL
def test_storage_that_turns_read_only_is_said_and_survived(jobs: Jobs) -> None:
    job = jobs.job({"kind": "sleep", "rank": 0, "step": 8, "count": 12, "seconds": 0.3})
    expected = jobs.whole(job)
    root = job.folder / "checkpoints"
    job.start().until(8)
    with mounted(root, "--bind", "-o", "bind,ro", str(root)):
        job.until(13)
    job.wait()
    assert job.code == 0, job.said
    assert "the checkpoint of step 12 was not saved, and training goes on" in job.told
    assert_same(expected, job.folder)


@FULL
def test_a_disk_that_no_checkpoint_fits_on_is_known_before(jobs: Jobs) -> None:
    job = jobs.job(model={"config": {"hidden_size": 2048, "intermediate_size": 2048}})
    job.folder.mkdir()
    with mounted(job.folder, "-t", "tmpfs", "-o", "size=100m", "tmpfs"):
        job.start().wait()
        assert job.code == 76, job.said
        assert re.search(r"a checkpoint has about .* GB, and .* GB are free", job.told)
        assert not (job.folder / "checkpoints").exists()
