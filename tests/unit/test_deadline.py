"""The projected end of a round, and its reports before and after the deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from regauge.registry.pipelines.deadline import DeadlineTracker
from regauge.registry.pipelines.rounds import ClockReading, Round, RoundStage

HOUR = 3600.0


@dataclass
class ManualClock:
    """Clocks that a test sets."""

    uptime: float = 1000.0
    date: float = 1e9
    boot: str = "a"

    def read(self) -> ClockReading:
        return ClockReading(date=self.date, uptime=self.uptime, boot=self.boot)


def build_round(number: int, *, began: ClockReading, **seconds: float) -> Round:
    stages = [
        RoundStage(name=name, folder="", sha256="", seconds=value, is_reused=False)
        for name, value in seconds.items()
    ]
    return Round(
        number=number,
        state="running",
        began=began,
        files={},
        base=None,
        serving=None,
        stages=stages,
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def tracker(clock: ManualClock, events: list[str]) -> Iterator[DeadlineTracker]:
    now, num_threads = clock.read(), threading.active_count()
    earlier = [
        build_round(1, began=now, train=2 * HOUR, predict=1 * HOUR),
        build_round(2, began=now, train=4 * HOUR, predict=1 * HOUR),
        build_round(3, began=now, train=3 * HOUR, predict=1 * HOUR),
    ]
    current = build_round(4, began=now)
    yield DeadlineTracker(5.0, current, ("train", "predict"), earlier, clock.read, events.append)
    assert threading.active_count() == num_threads


def test_the_projection_is_the_elapsed_time_and_the_medians(
    tracker: DeadlineTracker, clock: ManualClock
) -> None:
    assert tracker.project_seconds("train") == 4 * HOUR
    clock.uptime += 2 * HOUR
    assert tracker.project_seconds("train", 2 * HOUR) == 4 * HOUR
    clock.uptime += 2 * HOUR
    assert tracker.project_seconds("train", 4 * HOUR) == 5 * HOUR
    assert tracker.project_seconds("predict") == 5 * HOUR


def test_a_round_is_reported_once_before_it_is_late_and_once_after(
    tracker: DeadlineTracker, clock: ManualClock, events: list[str]
) -> None:
    reported_after: list[float] = []
    for hours in (0, 4, 4.5, 4.9, 5.1, 6):
        clock.uptime = 1000.0 + hours * HOUR
        tracker.check("train", hours * HOUR)
        reported_after += [hours] * (len(events) - len(reported_after))
    assert reported_after == [4.5, 5.1]
    late = "round 4 is projected to take 5 h 30 min, more than its deadline of 5 h 00 min"
    assert events == [
        f"{late}, in stage 'train'",
        "round 4 missed its deadline of 5 h 00 min: 5 h 06 min have passed in stage 'train'",
    ]


def test_a_running_stage_is_checked_repeatedly(
    tracker: DeadlineTracker, clock: ManualClock, events: list[str]
) -> None:
    reported = threading.Event()
    tracker.notify = lambda event: (events.append(event), reported.set())
    with tracker.watch("train", check_seconds=0.01):
        assert not events
        clock.uptime += 4.5 * HOUR
        assert reported.wait(10)
    assert ["projected" in event for event in events] == [True]


def test_a_jump_of_the_date_does_not_change_the_elapsed_time(clock: ManualClock) -> None:
    start = clock.read()
    clock.uptime += 60
    clock.date += 1e8
    assert start.compute_elapsed(clock.read()) == 60
    clock.date -= 3e8
    assert start.compute_elapsed(clock.read()) == 60


def test_after_a_restart_of_the_machine_the_date_counts(clock: ManualClock) -> None:
    start = clock.read()
    clock.boot, clock.uptime, clock.date = "b", 5.0, clock.date + 600
    assert start.compute_elapsed(clock.read()) == 600
    clock.date -= 3600
    assert start.compute_elapsed(clock.read()) == 0
