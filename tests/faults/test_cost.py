"""The cost counts every second for which a run held its machines, after any kind of exit."""

from __future__ import annotations

import json
import signal
import time

import pytest

from distributed.jobs import lines
from faults.conftest import FULL, Jobs
from regauge.config.output_files import ATTEMPTS
from regauge.run_folders.checkpoint_files import checkpoint_name, read_state

DOLLAR_A_SECOND = {"price": {"usd_per_hour": 3600.0}}
LAST_SECONDS = 2.5
"""Maximum time from the last record of a killed command, written every second, to its end."""


@FULL
def test_cost_includes_attempts_before_a_kill_and_a_change_of_world_size(jobs: Jobs) -> None:
    slow = {"kind": "sleep", "rank": 0, "step": 8, "seconds": 0.2, "count": 100, "attempt": 0}
    job = jobs.create(slow, execution=DOLLAR_A_SECOND)
    began = time.monotonic()
    held = job.start().wait_for_lock()
    job.wait_for_step(14)
    assert job.process is not None
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    ended = time.monotonic()
    minimum, maximum = ended - held, ended - began
    time.sleep(3.0)
    job.faults = []
    job.options = ("execution.processes=1",)
    began = time.monotonic()
    held = job.start().wait_for_lock()
    job.wait()
    ended = time.monotonic()
    minimum, maximum = minimum + ended - held, maximum + ended - began
    since = time.time() - (job.folder / "result.json").stat().st_mtime
    assert job.code == 0, job.stderr
    paid = json.loads((job.folder / "result.json").read_text())
    attempts = [json.loads(line) for line in (job.folder / ATTEMPTS).read_text().splitlines()]
    assert [line["processes"] for line in attempts] == [2, 1, 1]
    assert minimum - 2 * LAST_SECONDS <= attempts[-1]["machine_seconds"] <= maximum + 1.0
    assert paid["machine_seconds"] <= attempts[-1]["machine_seconds"]
    assert minimum - since - 2 * LAST_SECONDS <= paid["machine_seconds"], (
        "up to when it was written"
    )
    assert paid["usd"] == pytest.approx(paid["machine_seconds"], abs=1e-3)
    second = attempts[1]
    first_resumed = min(line["step"] for line in lines(job.folder) if line["attempt"] == 2)
    state = read_state(job.folder / "checkpoints" / checkpoint_name(first_resumed - 1))["ledger"]
    assert state["machine_seconds"] <= second["machine_seconds"], (
        "a save records that the run is alive"
    )
    devices, machines = (
        paid[name] - second[name] for name in ("device_seconds", "machine_seconds")
    )
    assert devices == pytest.approx(machines, abs=1e-2), "one device from here on"
    assert second["device_seconds"] > second["machine_seconds"] * 1.5
    assert lines(job.folder)[-1]["step"] == 24


@FULL
def test_the_time_between_two_attempts_is_charged(jobs: Jobs) -> None:
    job = jobs.create(
        {"kind": "kill", "rank": 1, "step": 9, "attempt": 1}, execution=DOLLAR_A_SECOND
    )
    began = time.monotonic()
    held = job.start().wait_for_lock()
    job.wait()
    ended = time.monotonic()
    assert job.code == 0, job.stderr
    paid = job.attempts[-1]["machine_seconds"]
    assert ended - held - LAST_SECONDS <= paid <= ended - began + 1.0
