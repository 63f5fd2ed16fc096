"""The fixture that finds what a test leaves behind does find it."""

from __future__ import annotations

import threading

import pytest

from leaks import Before


def test_nothing_is_no_leak() -> None:
    assert Before().leaks() == []


def test_a_changed_variable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Before()
    monkeypatch.setenv("REGAUGE_TEST_LEAK", "1")
    assert before.leaks() == ["environment variable REGAUGE_TEST_LEAK was left changed"]


def test_a_running_thread_is_found() -> None:
    before = Before()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="stray")
    thread.start()
    try:
        assert before.leaks() == ["thread stray was left running"]
    finally:
        stop.set()
        thread.join()
    assert before.leaks() == []


def test_an_open_process_group_is_found() -> None:
    from torch import distributed

    before = Before()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert before.leaks() == ["a process group was left open"]
    finally:
        distributed.destroy_process_group()
    assert before.leaks() == []
