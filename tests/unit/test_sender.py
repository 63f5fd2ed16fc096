"""What is sent to a slow or absent place: in order, again after an error, and counted if lost."""

from __future__ import annotations

import threading

import pytest

from regauge.trackers import _sender
from regauge.trackers._sender import Line, Sender


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sender, "FIRST_PAUSE_SECONDS", 0.01)


class Place:
    """Takes lines, but for those times that it fails."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.lines: list[Line] = []
        self.gate = threading.Event()
        self.gate.set()

    def connect(self) -> _sender.Deliver:
        if self.failures:
            raise self.failures.pop(0)
        return self.take

    def take(self, lines: list[Line]) -> None:
        self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.lines += lines


def sender(place: Place) -> Sender:
    return Sender("there", place.connect, lambda error: isinstance(error, ValueError))


def test_lines_arrive_in_their_order_though_the_place_fails_at_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place(ConnectionError("nobody there"), ConnectionError(), TimeoutError())
    own = sender(place)
    for step in range(250):
        own.put(Line(step, {"loss": 1.0}))
    assert own.close(30) == 0
    assert [line.step for line in place.lines] == list(range(250))
    assert caplog.messages == ["there takes nothing yet, the run goes on: nobody there"]


def test_a_refused_line_is_not_tried_again_and_what_follows_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place()
    own = sender(place)
    own.put(Line(1, {"a": 1.0}))
    while not place.lines:
        threading.Event().wait(0.001)
    place.failures.append(ValueError("no such name"))
    own.put(Line(2, {"a": 1.0, "b": 2.0}, {"note": "x"}))
    while place.failures:
        threading.Event().wait(0.001)
    own.put(Line(3, {"a": 1.0}))
    assert own.close(30) == 3
    assert [line.step for line in place.lines] == [1, 3]
    assert caplog.messages == ["3 values did not get to there: no such name"]


def test_a_place_that_refuses_to_be_connected_gets_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place(ValueError("no such experiment"))
    own = sender(place)
    for step in range(5):
        own.put(Line(step, {"loss": 1.0}))
    assert own.close(30) == 5
    assert caplog.messages == ["5 values did not get to there: no such experiment"]


def test_a_place_that_never_answers_is_left_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.gate.clear()
    own = sender(place)
    own.put(Line(1, {"loss": 1.0}))
    assert own.close(0.05) == 1
    assert "1 values did not get to there: it was too slow" in caplog.text
    place.gate.set()


def test_a_place_that_is_gone_is_tried_until_the_end_and_no_longer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place(*(ConnectionError("gone") for _ in range(10_000)))
    own = sender(place)
    own.put(Line(1, {"loss": 1.0}))
    assert own.close(0.1) == 1
    assert caplog.messages[-1] == "1 values did not get to there: gone"
    assert len(place.failures) < 10_000


def test_too_many_lines_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sender, "MOST_WAITING", 3)
    place = Place()
    place.gate.clear()
    own = sender(place)
    own.put(Line(0, {"loss": 1.0}))
    while own._waiting:  # until it is on its way
        threading.Event().wait(0.001)
    for step in range(1, 8):
        own.put(Line(step, {"loss": 1.0}))
    place.gate.set()
    assert own.close(30) == 4
    assert [line.step for line in place.lines] == [0, 1, 2, 3]
