"""When a silence counts as a hang."""

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
    """A monotonic clock that stands still until it is told."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Two:
    """Two processes and their watchdog."""

    clock: Clock
    dog: Watchdog
    processes: list[Heartbeat]

    def do(self, rank: int, phase: str) -> None:
        self.processes[rank].beat(phase)

    def after(self, seconds: float) -> str | None:
        self.clock.now += seconds
        return self.dog.overdue()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    """They have each done steps of a tenth of a second."""
    clock = Clock()
    for module in (heartbeat, watchdog):
        monkeypatch.setattr(module, "time", clock)
    place = tmp_path / "pulse"
    dog = Watchdog(HeartbeatTable(place, 2), FLOOR, CEILING)
    found = Two(clock, dog, [Heartbeat(place, rank) for rank in range(2)])
    for _ in range(3):
        for rank in range(2):
            found.do(rank, "step")
        assert found.after(0.1) is None
    return found


def test_a_run_without_a_sign_hangs(two: Two) -> None:
    assert two.after(FLOOR - 0.2) is None
    why = two.after(0.2)
    assert why is not None
    assert "in 'step' (limit 5.0 s)" in why


def test_a_process_that_waits_for_one_that_works_does_not_hang(two: Two) -> None:
    two.do(0, "checkpoint")
    for _ in range(20):
        two.do(1, "checkpoint")
        assert two.after(1.0) is None
    assert two.after(FLOOR + 1) is not None, "now both of them are silent"


def test_what_comes_once_may_take_as_long_as_the_settings_say(two: Two) -> None:
    for rank in range(2):
        two.do(rank, "compile")
    assert two.after(CEILING - 1) is None
    assert two.after(2.0) is not None


def test_a_slow_phase_is_learned(two: Two) -> None:
    for rank in range(2):
        two.do(rank, "evaluate")
    assert two.after(4.0) is None
    for rank in range(2):
        two.do(rank, "evaluate")
    assert two.after(39.0) is None
    assert two.after(2.0) is not None


def test_a_phase_that_is_over_between_two_looks_is_learned(two: Two) -> None:
    for phase in ("checkpoint", "step", "checkpoint"):
        for rank in range(2):
            two.do(rank, phase)
        two.clock.now += 0.01
    why = two.after(FLOOR + 1)
    assert why is not None
    assert "in 'checkpoint' (limit 5.0 s)" in why


def test_a_finished_process_is_silent_for_good(two: Two) -> None:
    for rank in range(2):
        two.do(rank, "end")
    assert two.after(10 * CEILING) is None
