"""Detection of the variables, threads and process groups that a test leaves behind."""

from __future__ import annotations

import threading

import pytest

from leaks import Snapshot


def test_an_unchanged_process_has_no_leak() -> None:
    assert Snapshot().find_leaks() == []


def test_a_changed_variable_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Snapshot()
    monkeypatch.setenv("REGAUGE_TEST_LEAK", "1")
    assert before.find_leaks() == ["environment variable REGAUGE_TEST_LEAK was left changed"]


def test_a_running_thread_is_detected() -> None:
    before = Snapshot()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="stray")
    thread.start()
    try:
        assert before.find_leaks() == ["thread stray was left running"]
    finally:
        stop.set()
        thread.join()
    assert before.find_leaks() == []


def test_an_open_process_group_is_detected() -> None:
    from torch import distributed

    before = Snapshot()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert before.find_leaks() == ["a process group was left open"]
    finally:
        distributed.destroy_process_group()
    assert before.find_leaks() == []
