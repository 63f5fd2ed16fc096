"""What a run has cost: seconds of machines and devices, over attempts of any size, in dollars."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from regauge import jsonl
from regauge.supervision import cost_meter as metering
from regauge.supervision.cost_meter import (
    ATTEMPTS,
    Meter,
    Reading,
    last_seen,
    metered,
    paid,
    say_seen,
)

HOURLY = 3600.0
"""A dollar a second."""


def held(seconds: float, before: Reading = Reading(), usd: float | None = HOURLY) -> Reading:  # noqa: B008
    return Meter(before, 0.0, machines=2, devices=16, usd_per_hour=usd).after(seconds)


def test_every_machine_is_paid_for_and_every_device_counted() -> None:
    assert held(10) == Reading(machine_seconds=20, device_seconds=160, usd=20.0)
    assert held(-5) == Reading(usd=0.0), "a clock that was set back costs nothing"


def test_a_run_goes_on_with_another_number_and_another_price() -> None:
    first = held(10)
    then = Meter(first, 0.0, machines=1, devices=4, usd_per_hour=HOURLY / 2).after(10)
    assert then == Reading(30, 200, 25.0)


def test_a_price_that_is_unknown_is_never_guessed() -> None:
    unknown = held(10, usd=None)
    assert unknown.usd is None
    assert held(10, held(10), usd=None).usd is None
    assert held(10, unknown).usd == 40.0, "a price that is given later holds from the start"


def test_the_meter_reads_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering.time, "monotonic", lambda: 107.0)
    assert Meter(Reading(), 100.0, 1, 1, HOURLY).read().usd == 7.0


def test_a_checkpoint_that_knows_more_is_believed() -> None:
    here = Meter(Reading(5, 5, 5.0), 0.0, 1, 1, HOURLY)
    assert here.at_least(Reading(9, 9, 9.0)).after(1) == Reading(10, 10, 10.0)
    assert here.at_least(Reading(3, 3, 3.0)).after(1) == Reading(6, 6, 6.0)


def test_a_meter_is_told_as_it_is() -> None:
    here = Meter(held(3), 12.5, 2, 16, None)
    assert metered(json.loads(json.dumps(asdict(here)))) == here


def begun(folder: Path, at: float, before: Reading = Reading()) -> Meter:  # noqa: B008
    found = Meter(before, 0.0, machines=1, devices=2, usd_per_hour=HOURLY)
    jsonl.append(folder / ATTEMPTS, {"attempt": 1, "began": at, **found.line})
    return found


def ended(folder: Path, began: float, at: float) -> None:
    found = Meter(Reading(), 0.0, machines=1, devices=2, usd_per_hour=HOURLY)
    told = {"began": began, "ended": at, **found.line, **found.after(at - began).document}
    jsonl.append(folder / ATTEMPTS, told)


def test_a_run_that_is_new_pays_from_its_command_on(tmp_path: Path) -> None:
    assert paid(tmp_path, taken=50.0, seen=None) == (Reading(), 50.0)


def test_the_time_between_two_attempts_of_a_command_is_paid(tmp_path: Path) -> None:
    begun(tmp_path, 100)
    ended(tmp_path, 100, 130)
    assert paid(tmp_path, taken=90.0, seen=None) == (Reading(30, 60, 30.0), 130.0)


def test_the_time_between_two_commands_is_not(tmp_path: Path) -> None:
    begun(tmp_path, 100)
    ended(tmp_path, 100, 130)
    assert paid(tmp_path, taken=5000.0, seen=131.0) == (Reading(30, 60, 30.0), 5000.0)


@pytest.mark.parametrize(("seen", "seconds"), [(117.0, 17), (None, 0), (90.0, 0)])
def test_an_attempt_without_an_end_is_paid_until_it_was_last_seen(
    tmp_path: Path, seen: float | None, seconds: float
) -> None:
    begun(tmp_path, 100)
    found, since = paid(tmp_path, taken=5000.0, seen=seen)
    assert found == Reading(seconds, 2 * seconds, float(seconds))
    assert since == 5000.0


def test_a_supervisor_says_when_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_seen(tmp_path)
    assert last_seen(tmp_path) is None, "nothing is written before the run has begun"
    begun(tmp_path, 100)
    monkeypatch.setattr(metering.time, "time", lambda: 1234.5)
    say_seen(tmp_path)
    assert last_seen(tmp_path) == 1234.5
