"""Delivery to a slow or absent server: in order, with retries, and lost values are counted."""

from __future__ import annotations

import threading

import pytest

from regauge.monitoring.trackers import _service
from regauge.monitoring.trackers._service import MetricsLine, Sender


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "min_pause_seconds", 0.01)


class Server:
    """Accepts lines, after a number of failures."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.lines: list[MetricsLine] = []
        self.gate = threading.Event()
        self.gate.set()

    def connect(self) -> _service.Deliver:
        if self.failures:
            raise self.failures.pop(0)
        return self.take

    def take(self, lines: list[MetricsLine]) -> None:
        self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.lines += lines


def start_sender(server: Server) -> Sender:
    return Sender("there", server.connect, lambda error: isinstance(error, ValueError))


def test_lines_are_delivered_in_order_after_transient_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(ConnectionError("nobody there"), ConnectionError(), TimeoutError())
    sender = start_sender(server)
    for step in range(250):
        sender.put(MetricsLine(step, {"loss": 1.0}))
    assert sender.close(30) == 0
    assert [line.step for line in server.lines] == list(range(250))
    assert caplog.messages == ["there is unreachable, retrying in the background: nobody there"]


def test_a_permanent_error_loses_its_line_and_later_lines_are_delivered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server()
    sender = start_sender(server)
    sender.put(MetricsLine(1, {"a": 1.0}))
    while not server.lines:
        threading.Event().wait(0.001)
    server.failures.append(ValueError("no such name"))
    sender.put(MetricsLine(2, {"a": 1.0, "b": 2.0}, {"note": "x"}))
    while server.failures:
        threading.Event().wait(0.001)
    sender.put(MetricsLine(3, {"a": 1.0}))
    assert sender.close(30) == 3
    assert [line.step for line in server.lines] == [1, 3]
    assert caplog.messages == ["3 values not delivered to there: no such name"]


def test_a_permanent_connection_error_loses_all_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(ValueError("no such experiment"))
    sender = start_sender(server)
    for step in range(5):
        sender.put(MetricsLine(step, {"loss": 1.0}))
    assert sender.close(30) == 5
    assert caplog.messages == ["5 values not delivered to there: no such experiment"]


def test_a_silent_server_is_abandoned_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.gate.clear()
    sender = start_sender(server)
    sender.put(MetricsLine(1, {"loss": 1.0}))
    assert sender.close(0.05) == 1
    assert "1 values not delivered to there: no answer within 0.05 s" in caplog.text
    server.gate.set()


def test_an_absent_server_is_retried_until_the_deadline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(*(ConnectionError("gone") for _ in range(10_000)))
    sender = start_sender(server)
    sender.put(MetricsLine(1, {"loss": 1.0}))
    assert sender.close(0.1) == 1
    assert caplog.messages[-1] == "1 values not delivered to there: gone"
    assert len(server.failures) < 10_000


def test_lines_beyond_the_capacity_of_the_queue_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_service, "MAX_QUEUED_LINES", 3)
    server = Server()
    server.gate.clear()
    sender = start_sender(server)
    sender.put(MetricsLine(0, {"loss": 1.0}))
    while sender._queue:  # until the line is being delivered
        threading.Event().wait(0.001)
    for step in range(1, 8):
        sender.put(MetricsLine(step, {"loss": 1.0}))
    server.gate.set()
    assert sender.close(30) == 4
    assert [line.step for line in server.lines] == [0, 1, 2, 3]
