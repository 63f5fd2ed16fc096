"""Requests to something that answers: percentiles, arrivals, and who waited for whom."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regauge.benchmarking.load_generator import (
    FEWEST,
    PATIENCE,
    Clock,
    arrivals,
    closed,
    opened,
    percentile,
)


class Hands(Clock):
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, moment: float) -> None:
        self.time = max(self.time, moment)


class Server:
    """Answers in some seconds, and stands still for some more at one of its requests."""

    def __init__(self, clock: Hands, seconds: float, stall: float = 0.0, at: int = -1) -> None:
        self.clock, self.seconds, self.stall, self.at = clock, seconds, stall, at
        self.count = 0

    def __call__(self) -> None:
        self.clock.time += self.seconds + (self.stall if self.count == self.at else 0.0)
        self.count += 1


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (90, 90), (95, 95), (99, 99)])
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    percent: int, value: int
) -> None:
    values = [float(each) for each in range(100, 0, -1)]
    assert percentile(values, percent) == value


def test_a_percentile_of_few_is_one_of_them() -> None:
    assert percentile([5.0, 1.0, 3.0], 50) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert percentile([float(each) for each in range(1, 12)], 90) == 10.0


@pytest.mark.parametrize(("percent", "enough"), [(50, 2), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_that_no_request_lies_beyond_is_unknown(percent: int, enough: int) -> None:
    assert percentile([1.0] * (enough - 1), percent) is None
    assert percentile([1.0] * enough, percent) == 1.0


def test_a_closed_loop_begins_a_request_when_the_one_before_is_answered() -> None:
    clock = Hands()
    found = closed(Server(clock, 0.25, stall=1.0, at=2), 2.0, clock)
    assert found.milliseconds == [250.0, 250.0, 1250.0, 250.0]
    assert found.seconds == 2.0


def test_a_closed_loop_has_a_few_requests_however_long_they_take() -> None:
    clock = Hands()
    assert len(closed(Server(clock, 60.0), 1.0, clock).milliseconds) == FEWEST


def test_arrivals_are_a_poisson_process_of_their_key() -> None:
    moments = arrivals(50.0, 200.0, 7, 1)
    assert np.array_equal(moments, arrivals(50.0, 200.0, 7, 1))
    assert not np.array_equal(moments[:10], arrivals(50.0, 200.0, 8, 1)[:10])
    assert (np.diff(moments) > 0).all()
    assert moments[0] > 0
    assert moments[-1] < 200.0
    gaps = np.diff(moments)
    count = len(moments)  # 10,000 expected, with a deviation of 100
    assert abs(count - 10_000) < 400
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "exponential gaps"


def test_arrivals_may_be_none() -> None:
    assert len(arrivals(1e-6, 1.0, 0)) == 0


def test_another_rate_has_the_same_arrivals_on_another_scale() -> None:
    slow, fast = arrivals(10.0, 40.0, 3), arrivals(20.0, 20.0, 3)
    assert slow == pytest.approx(2 * fast)


def test_a_request_that_comes_to_nobody_waits_for_nobody() -> None:
    clock = Hands()
    found = opened(Server(clock, 0.01), [1.0, 2.0, 3.0], 4.0, clock)
    assert found == pytest.approx([10.0, 10.0, 10.0])


def test_those_that_come_while_one_stalls_have_waited_since_they_came() -> None:
    """A server stands still for a second: everyone who comes meanwhile is late by what is left.

    Counted from when each could be begun, one request of a hundred would be slow.
    """
    clock = Hands()
    moments = [0.05 * number for number in range(100)]
    found = opened(Server(clock, 0.001, stall=1.0, at=20), moments, 5.0, clock)
    assert found[:20] == pytest.approx([1.0] * 20)
    assert found[20] == pytest.approx(1001.0)
    until = moments[20] + 1.001
    for number in range(21, 40):
        before = number - 20
        assert found[number] == pytest.approx(1e3 * (until + 0.001 * before - moments[number]))
    late = sum(each > 2.0 for each in found)
    assert late == 21, "the one that stalled, and all that came until the queue was empty"
    p90 = percentile(found, 90)
    assert p90 is not None
    assert p90 > 400.0
    again = Hands()
    alone = closed(Server(again, 0.001, stall=1.0, at=20), 1.08, again).milliseconds
    assert sum(each > 2.0 for each in alone) == 1, "what a closed loop sees of the same"


def test_what_is_never_begun_took_for_ever() -> None:
    clock = Hands()
    moments = [0.1 * number for number in range(10)]  # ten a second, and it answers two
    found = opened(Server(clock, 0.5), moments, 1.0, clock)
    begun = [each for each in found if math.isfinite(each)]
    assert len(found) == 10
    assert len(begun) == 2 * PATIENCE + 1
    assert begun == sorted(begun), "a queue that grows"
    assert found[len(begun) :] == [math.inf] * (10 - len(begun))


def test_a_clock_waits_until_a_moment_and_no_less() -> None:
    clock = Clock()
    moment = clock.now() + 0.003
    clock.wait(moment)
    assert clock.now() >= moment
    clock.wait(moment - 1.0)
