"""Hang detection: the time without heartbeats that counts as a hang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from regauge.supervision import heartbeat, watchdog
from regauge.supervision.heartbeat import Heartbeat, HeartbeatTable
from regauge.supervision.watchdog import Watchdog

FLOOR, CEILING = 5.0, 600.0


@dataclass
class Clock:
    """A monotonic clock that only the test advances."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Pair:
    """Two processes and their watchdog."""

    clock: Clock
    watchdog: Watchdog
    processes: list[Heartbeat]

    def beat(self, rank: int, phase: str) -> None:
        self.processes[rank].beat(phase)

    def find_hang_after(self, seconds: float) -> str | None:
        self.clock.now += seconds
        return self.watchdog.find_hang()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Return two processes that have done steps of a tenth of a second."""
    clock = Clock()
    for module in (heartbeat, watchdog):
        monkeypatch.setattr(module, "time", clock)
    path = tmp_path / "heartbeats"
    dog = Watchdog(HeartbeatTable(path, 2), FLOOR, CEILING)
    pair = Pair(clock, dog, [Heartbeat(path, rank) for rank in range(2)])
    for _ in range(3):
        for rank in range(2):
            pair.beat(rank, "step")
        assert pair.find_hang_after(0.1) is None
    return pair


def test_silence_before_the_supervisor_continued_does_not_count(pair: Pair) -> None:
    """As after `scontrol resume`: the processes were stopped, too."""
    pair.clock.now += CEILING
    resumed_at = pair.clock.now
    pair.clock.now += FLOOR - 0.1
    assert pair.watchdog.find_hang(resumed_at=resumed_at) is None
    pair.clock.now += 0.2
    assert pair.watchdog.find_hang(resumed_at=resumed_at) is not None


def test_a_run_without_heartbeats_hangs(pair: Pair) -> None:
    assert pair.find_hang_after(FLOOR - 0.2) is None
    problem = pair.find_hang_after(0.2)
    assert problem is not None
    assert "no heartbeat for" in problem
    assert "in phase 'step' (limit 5.0 s)" in problem


def test_a_process_that_waits_for_a_working_one_does_not_hang(pair: Pair) -> None:
    pair.beat(0, "checkpoint")
    for _ in range(20):
        pair.beat(1, "checkpoint")
        assert pair.find_hang_after(1.0) is None
    assert pair.find_hang_after(FLOOR + 1) is not None, "now both are silent"


def test_a_phase_that_occurs_once_has_the_limit_of_the_settings(pair: Pair) -> None:
    for rank in range(2):
        pair.beat(rank, "compile")
    assert pair.find_hang_after(CEILING - 1) is None
    assert pair.find_hang_after(2.0) is not None


def test_the_limit_of_a_slow_phase_is_learned(pair: Pair) -> None:
    for rank in range(2):
        pair.beat(rank, "evaluate")
    assert pair.find_hang_after(4.0) is None
    for rank in range(2):
        pair.beat(rank, "evaluate")
    assert pair.find_hang_after(39.0) is None
    assert pair.find_hang_after(2.0) is not None


def test_the_limit_of_a_phase_between_two_polls_is_learned(pair: Pair) -> None:
    for phase in ("checkpoint", "step", "checkpoint"):
        for rank in range(2):
            pair.beat(rank, phase)
        pair.clock.now += 0.01
    problem = pair.find_hang_after(FLOOR + 1)
    assert problem is not None
    assert "in phase 'checkpoint' (limit 5.0 s)" in problem


def test_a_finished_process_may_stay_silent(pair: Pair) -> None:
    for rank in range(2):
        pair.beat(rank, "end")
    assert pair.find_hang_after(10 * CEILING) is None
