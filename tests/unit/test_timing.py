"""Minimum durations, doubling of sizes, repeated measurements and waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from regauge.system import timing


def test_the_shortest_duration_of_all_tries_is_returned() -> None:
    durations = iter([3.0, 1.0, 2.0, 0.5])
    assert timing.measure_min_seconds(lambda: next(durations), 0.0) == 1.0
    assert next(durations) == 0.5, "it was measured more often than required"


def test_sizes_double_until_the_work_takes_long_enough() -> None:
    sizes = []

    def work(size: int) -> timing.TimedWork:
        sizes.append(size)
        return lambda: size**3 * 1e-6

    size, seconds = timing.find_timed_size(work, 10, 1000, 0.05)
    assert (size, seconds()) == (40, 0.064)
    assert sizes == [10, 20, 40]
    assert timing.find_timed_size(work, 10, 35, 0.05)[0] == 20, "no size is larger than the largest"


def test_one_slow_try_does_not_end_the_doubling() -> None:
    def work(size: int) -> timing.TimedWork:
        durations = iter([9.0, 9.0] + [size * 1e-3] * 8)
        return lambda: next(durations)

    assert timing.find_timed_size(work, 1, 8, 4e-3)[0] == 4


class Clock:
    """A clock that only sleeping moves; `sleep` and a measurement take time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def measure(self, *rates: float, seconds: float = 0.0) -> Callable[[], float]:
        """Return a measurement that gives these rates, one after the other."""
        results = iter(rates)

        def measurement() -> float:
            self.now += seconds
            return next(results)

        return measurement


def test_a_plausible_rate_is_not_measured_again() -> None:
    clock = Clock()
    measure = clock.measure(5.0)
    assert timing.repeat_below(measure, 5.0, clock=clock, sleep=clock.sleep) == (5.0, 1)
    assert not clock.pauses


def test_an_implausible_rate_is_measured_again_after_a_pause_until_one_is_plausible() -> None:
    clock = Clock()
    measure = clock.measure(1.0, 2.0, 9.0)
    assert timing.repeat_below(measure, 5.0, clock=clock, sleep=clock.sleep) == (9.0, 3)
    assert clock.pauses == [timing.REPEAT_PAUSE_SECONDS] * 2


def test_repetitions_are_limited_and_the_highest_rate_is_returned() -> None:
    clock = Clock()
    measure = clock.measure(1.0, 3.0, 2.0, 1.0, 1.0)
    assert timing.repeat_below(measure, 5.0, clock=clock, sleep=clock.sleep) == (3.0, 5)


def test_no_repetition_begins_when_the_time_is_over() -> None:
    """A measurement on a busy machine takes long, too."""
    clock = Clock()
    measure = clock.measure(1.0, 2.0, 3.0, seconds=1.5)
    assert timing.repeat_below(measure, 5.0, clock=clock, sleep=clock.sleep) == (3.0, 3)
    assert clock.now - 100.0 <= 2 * 1.5 + timing.REPEAT_SECONDS


def test_waiting_returns_the_first_true_result() -> None:
    results, polls = iter([None, "", "found"]), []
    result = timing.wait_for(
        lambda: next(results), 60, poll_seconds=0.01, on_poll=lambda: polls.append(1)
    )
    assert result == "found"
    assert len(polls) == 2


def test_waiting_returns_the_last_result_after_the_timeout() -> None:
    looks: list[float] = []
    began = time.monotonic()

    def look() -> bool:
        looks.append(time.monotonic() - began)
        return False

    assert timing.wait_for(look, 0.2, poll_seconds=0.15) is False
    assert looks[-1] >= 0.2, "it is called once more at the end"
    assert timing.wait_for(look, 0.0, poll_seconds=60.0) is False
    assert timing.wait_for(lambda: "there", 0.0, poll_seconds=60.0) == "there"


def test_an_error_of_a_poll_ends_the_wait() -> None:
    def fail() -> None:
        raise KeyError("signal")

    with pytest.raises(KeyError, match="signal"):
        timing.wait_for(lambda: False, poll_seconds=0.01, on_poll=fail)
