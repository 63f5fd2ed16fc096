"""The cost of a run: machine seconds, device seconds and dollars over attempts of any size."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from regauge.run_folders import cost_meter
from regauge.run_folders.cost_meter import (
    ATTEMPTS,
    Cost,
    CostMeter,
    parse_meter,
    read_last_seen,
    read_paid,
    read_time,
    write_last_seen,
)
from regauge.system import jsonl

HOURLY = 3600.0
"""A dollar a second."""


def cost_of(seconds: float, before: Cost = Cost(), usd: float | None = HOURLY) -> Cost:  # noqa: B008
    return CostMeter(before, 0.0, machines=2, devices=16, usd_per_hour=usd).cost_after(seconds)


def test_every_machine_is_paid_for_and_every_device_counted() -> None:
    assert cost_of(10) == Cost(machine_seconds=20, device_seconds=160, usd=20.0)
    assert cost_of(-5) == Cost(usd=0.0), "a clock that was set back costs nothing"


def test_a_run_continues_at_another_size_and_price() -> None:
    first = cost_of(10)
    then = CostMeter(first, 0.0, machines=1, devices=4, usd_per_hour=HOURLY / 2).cost_after(10)
    assert then == Cost(30, 200, 25.0)


def test_an_unknown_price_is_never_guessed() -> None:
    unknown = cost_of(10, usd=None)
    assert unknown.usd is None
    assert cost_of(10, cost_of(10), usd=None).usd is None
    assert cost_of(10, unknown).usd == 40.0, "a price that is given later holds from the start"


def test_the_meter_reads_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_meter.time, "monotonic", lambda: 107.0)
    assert CostMeter(Cost(), 100.0, 1, 1, HOURLY).read().usd == 7.0


def test_a_higher_cost_in_a_checkpoint_is_taken_over() -> None:
    meter = CostMeter(Cost(5, 5, 5.0), 0.0, 1, 1, HOURLY)
    assert meter.resume_from(Cost(9, 9, 9.0)).cost_after(1) == Cost(10, 10, 10.0)
    assert meter.resume_from(Cost(3, 3, 3.0)).cost_after(1) == Cost(6, 6, 6.0)


def test_a_meter_survives_a_json_round_trip() -> None:
    meter = CostMeter(cost_of(3), 12.5, 2, 16, None)
    assert parse_meter(json.loads(json.dumps(asdict(meter)))) == meter


def write_start(folder: Path, at: float) -> None:
    meter = CostMeter(Cost(), 0.0, machines=1, devices=2, usd_per_hour=HOURLY)
    jsonl.append_line(folder / ATTEMPTS, {"attempt": 1, "started_at": at, **meter.start_fields})


def write_end(folder: Path, began: float, at: float) -> None:
    meter = CostMeter(Cost(), 0.0, machines=1, devices=2, usd_per_hour=HOURLY)
    cost = meter.cost_after(at - began).document
    line = {"started_at": began, "ended_at": at, **meter.start_fields, **cost}
    jsonl.append_line(folder / ATTEMPTS, line)


def test_a_new_run_pays_from_the_start_of_its_command(tmp_path: Path) -> None:
    assert read_paid(tmp_path, started_at=50.0, last_seen_at=None) == (Cost(), 50.0)


@pytest.mark.parametrize(
    ("started_at", "last_seen_at", "since"), [(90.0, None, 130.0), (5000.0, 131.0, 5000.0)]
)
def test_the_time_between_attempts_is_paid_and_between_commands_it_is_not(
    tmp_path: Path, started_at: float, last_seen_at: float | None, since: float
) -> None:
    write_start(tmp_path, 100)
    write_end(tmp_path, 100, 130)
    assert read_paid(tmp_path, started_at, last_seen_at) == (Cost(30, 60, 30.0), since)


@pytest.mark.parametrize(("last_seen_at", "seconds"), [(117.0, 17), (None, 0), (90.0, 0)])
def test_an_attempt_without_an_end_is_paid_until_it_was_last_seen(
    tmp_path: Path, last_seen_at: float | None, seconds: float
) -> None:
    write_start(tmp_path, 100)
    cost, since = read_paid(tmp_path, started_at=5000.0, last_seen_at=last_seen_at)
    assert cost == Cost(seconds, 2 * seconds, float(seconds))
    assert since == 5000.0


def test_a_supervisor_writes_when_the_run_was_last_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_last_seen(tmp_path)
    assert read_last_seen(tmp_path) is None, "nothing is written before the run has begun"
    write_start(tmp_path, 100)
    before = read_time()
    monkeypatch.setattr(cost_meter.time, "time", lambda: before + 3600)
    write_last_seen(tmp_path)
    seen_at = read_last_seen(tmp_path)
    assert seen_at is not None
    assert abs(seen_at - before) < 60, "the clock was set, but an hour has not passed"


def test_seconds_pass_alike_if_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(read_time() - time.time()) < 60
    before = read_time(), time.monotonic()
    monkeypatch.setattr(cost_meter.time, "time", lambda: 0.0)
    after = read_time(), time.monotonic()
    assert after[0] - before[0] == pytest.approx(after[1] - before[1], abs=0.01)
