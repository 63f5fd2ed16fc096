"""The phases of an export: each is logged when it begins, and again while it lasts."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import pytest

from regauge.inference.export.phase_log import log_phase
from regauge.system import timing


@pytest.fixture(autouse=True)
def _capture_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `caplog` record the lines of the project."""
    monkeypatch.setattr(logging.getLogger("regauge"), "propagate", True)
    caplog.set_level(logging.INFO, logger="regauge")


def test_a_phase_is_logged_before_its_work(caplog: pytest.LogCaptureFixture) -> None:
    with log_phase("compile 1 of 2, eager fp32"):
        assert caplog.messages == ["compile 1 of 2, eager fp32"]
    assert caplog.messages == ["compile 1 of 2, eager fp32"]


def test_a_phase_that_lasts_is_logged_with_its_items(caplog: pytest.LogCaptureFixture) -> None:
    with log_phase("verify", 39, "lengths", interval_seconds=0.01) as phase:
        phase.advance()
        phase.advance(2)
        assert timing.wait_for(
            lambda: "verify: 3 of 39 lengths, 0 s" in caplog.messages, 60, poll_seconds=0.01
        )


def test_a_phase_without_items_is_logged_with_its_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with log_phase("write", interval_seconds=0.01):
        assert timing.wait_for(lambda: "write: 0 s" in caplog.messages, 60, poll_seconds=0.01)


def test_the_thread_of_a_phase_ends_with_it() -> None:
    def find_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "phase log"]

    with suppress(ValueError), log_phase("compile", interval_seconds=60):
        assert len(find_threads()) == 1
        raise ValueError("the compiler failed")
    assert not find_threads()
