"""Load generator: percentiles, Poisson arrivals, closed and open loop with a fake clock."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regauge.evaluation.benchmark.load_generator import (
    MAX_DURATION_FACTOR,
    MIN_REQUESTS,
    Clock,
    draw_arrivals,
    percentile,
    run_closed_loop,
    run_open_loop,
)


class FakeClock(Clock):
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, until: float) -> None:
        self.time = max(self.time, until)


class Server:
    """A server with a constant latency, and an additional stall at one of its requests."""

    def __init__(self, clock: FakeClock, seconds: float, stall: float = 0.0, at: int = -1) -> None:
        self.clock, self.seconds, self.stall, self.at = clock, seconds, stall, at
        self.count = 0

    def __call__(self) -> None:
        self.clock.time += self.seconds + (self.stall if self.count == self.at else 0.0)
        self.count += 1


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (90, 90), (95, 95), (99, 99)])
def test_a_percentile_is_the_nearest_rank(percent: int, value: int) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, percent) == value


def test_a_percentile_of_few_values_is_one_of_them() -> None:
    assert percentile([5.0, 1.0, 3.0], 50) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.0
    assert percentile([float(value) for value in range(1, 12)], 90) == 10.0


@pytest.mark.parametrize(("percent", "enough"), [(50, 2), (90, 10), (95, 20), (99, 100)])
def test_a_percentile_above_all_values_is_unknown(percent: int, enough: int) -> None:
    assert percentile([1.0] * (enough - 1), percent) is None
    assert percentile([1.0] * enough, percent) == 1.0


def test_a_closed_loop_sends_a_request_when_the_previous_one_is_completed() -> None:
    clock = FakeClock()
    result = run_closed_loop(Server(clock, 0.25, stall=1.0, at=2), 2.0, clock)
    assert result.milliseconds == [250.0, 250.0, 1250.0, 250.0]
    assert result.seconds == 2.0


def test_a_closed_loop_has_a_minimum_number_of_requests() -> None:
    clock = FakeClock()
    assert len(run_closed_loop(Server(clock, 60.0), 1.0, clock).milliseconds) == MIN_REQUESTS


def test_arrivals_are_a_poisson_process_of_their_key() -> None:
    arrivals = draw_arrivals(50.0, 200.0, 7, 1)
    assert np.array_equal(arrivals, draw_arrivals(50.0, 200.0, 7, 1))
    assert not np.array_equal(arrivals[:10], draw_arrivals(50.0, 200.0, 8, 1)[:10])
    assert (np.diff(arrivals) > 0).all()
    assert arrivals[0] > 0
    assert arrivals[-1] < 200.0
    gaps = np.diff(arrivals)
    count = len(arrivals)  # 10,000 expected, with a deviation of 100
    assert abs(count - 10_000) < 400
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "exponential gaps"


def test_arrivals_can_be_empty() -> None:
    assert len(draw_arrivals(1e-6, 1.0, 0)) == 0


def test_arrivals_scale_with_the_rate() -> None:
    slow, fast = draw_arrivals(10.0, 40.0, 3), draw_arrivals(20.0, 20.0, 3)
    assert slow == pytest.approx(2 * fast)


def test_a_request_to_an_idle_server_does_not_wait() -> None:
    clock = FakeClock()
    latencies = run_open_loop(Server(clock, 0.01), [1.0, 2.0, 3.0], 4.0, clock)
    assert latencies == pytest.approx([10.0, 10.0, 10.0])


def test_latency_counts_from_the_arrival_during_a_stall() -> None:
    """A stall of one second delays every request that arrives meanwhile.

    Counted from the start of its computation, only one request of a hundred would be slow.
    """
    clock = FakeClock()
    arrivals = [0.05 * number for number in range(100)]
    latencies = run_open_loop(Server(clock, 0.001, stall=1.0, at=20), arrivals, 5.0, clock)
    assert latencies[:20] == pytest.approx([1.0] * 20)
    assert latencies[20] == pytest.approx(1001.0)
    queue_start = arrivals[20] + 1.001
    for number in range(21, 40):
        before = number - 20
        assert latencies[number] == pytest.approx(
            1e3 * (queue_start + 0.001 * before - arrivals[number])
        )
    late = sum(latency > 2.0 for latency in latencies)
    assert late == 21, "the stalled request, and all that arrived until the queue was empty"
    p90 = percentile(latencies, 90)
    assert p90 is not None
    assert p90 > 400.0
    second_clock = FakeClock()
    closed = run_closed_loop(
        Server(second_clock, 0.001, stall=1.0, at=20), 1.08, second_clock
    ).milliseconds
    assert sum(latency > 2.0 for latency in closed) == 1, "a closed loop sees one slow request"


def test_a_request_that_is_never_started_has_infinite_latency() -> None:
    clock = FakeClock()
    arrivals = [0.1 * number for number in range(10)]  # ten per second; the server answers two
    latencies = run_open_loop(Server(clock, 0.5), arrivals, 1.0, clock)
    started = [latency for latency in latencies if math.isfinite(latency)]
    assert len(latencies) == 10
    assert len(started) == 2 * MAX_DURATION_FACTOR + 1
    assert started == sorted(started), "the queue grows"
    assert latencies[len(started) :] == [math.inf] * (10 - len(started))


def test_a_clock_waits_until_a_time() -> None:
    clock = Clock()
    until = clock.now() + 0.003
    clock.wait(until)
    assert clock.now() >= until
    clock.wait(until - 1.0)
