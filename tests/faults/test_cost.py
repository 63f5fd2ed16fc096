"""Dollars count every second for which a run held its machines, whatever ended its attempts."""

from __future__ import annotations

import json
import signal
import time

import pytest

from distributed.jobs import lines
from faults.conftest import FULL, Jobs
from regauge.checkpoint.layout import name_of, read_state
from regauge.supervision.cost_meter import ATTEMPTS

DOLLAR_A_SECOND = {"price": {"usd_per_hour": 3600.0}}
LAST_SECONDS = 2.5
"""From the last word of a command, said each second where it is killed, to its end."""


@FULL
def test_dollars_survive_a_kill_and_a_resume_at_another_number(jobs: Jobs) -> None:
    slow = {"kind": "sleep", "rank": 0, "step": 8, "seconds": 0.2, "count": 100, "attempt": 0}
    job = jobs.job(slow, execution=DOLLAR_A_SECOND)
    began = time.monotonic()
    held = job.start().until_held()
    job.until(14)
    assert job.process is not None
    job.process.send_signal(signal.SIGKILL)
    job.wait()
    ended = time.monotonic()
    least, most = ended - held, ended - began
    time.sleep(3.0)
    job.faults = []
    job.options = ("execution.processes=1",)
    began = time.monotonic()
    held = job.start().until_held()
    job.wait()
    ended = time.monotonic()
    least, most = least + ended - held, most + ended - began
    since = time.time() - (job.folder / "result.json").stat().st_mtime
    assert job.code == 0, job.said
    paid = json.loads((job.folder / "result.json").read_text())
    attempts = [json.loads(line) for line in (job.folder / ATTEMPTS).read_text().splitlines()]
    assert [line["processes"] for line in attempts] == [2, 1, 1]
    assert least - 2 * LAST_SECONDS <= attempts[-1]["machine_seconds"] <= most + 1.0
    assert paid["machine_seconds"] <= attempts[-1]["machine_seconds"]
    assert least - since - 2 * LAST_SECONDS <= paid["machine_seconds"], "up to when it was written"
    assert paid["usd"] == pytest.approx(paid["machine_seconds"], abs=1e-3)
    then = attempts[1]
    first_again = min(line["step"] for line in lines(job.folder) if line["attempt"] == 2)
    state = read_state(job.folder / "checkpoints" / name_of(first_again - 1))["ledger"]
    assert state["machine_seconds"] <= then["machine_seconds"], "a save says that the run is there"
    devices, machines = (paid[name] - then[name] for name in ("device_seconds", "machine_seconds"))
    assert devices == pytest.approx(machines, abs=1e-2), "one device from here on"
    assert then["device_seconds"] > then["machine_seconds"] * 1.5
    assert lines(job.folder)[-1]["step"] == 24


@FULL
def test_what_lies_between_two_attempts_is_paid(jobs: Jobs) -> None:
    job = jobs.job({"kind": "kill", "rank": 1, "step": 9, "attempt": 1}, execution=DOLLAR_A_SECOND)
    began = time.monotonic()
    held = job.start().until_held()
    job.wait()
    ended = time.monotonic()
    assert job.code == 0, job.said
    paid = job.attempts[-1]["machine_seconds"]
    assert ended - held - LAST_SECONDS <= paid <= ended - began + 1.0
