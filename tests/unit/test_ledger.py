"""The ledger of time and money: nested accounts, resumes, and append-only files."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from regauge.accelerators import ChipPeak
from regauge.run_folders.cost_meter import Cost, CostMeter
from regauge.system import jsonl
from regauge.system.processes import World
from regauge.training.ledger import ACCOUNTS, Ledger
from regauge.training.metrics import MetricsWindow, MfuMeter

FREE = CostMeter(Cost(), 0.0, 1, 1, None)


class Clock:
    """A clock that a test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_time_is_booked_to_the_innermost_account_only(clock: Clock) -> None:
    ledger = Ledger(FREE)
    clock.now += 5  # in no account
    with ledger.phase("step"):
        clock.now += 1
        with ledger.phase("checkpoint"):
            clock.now += 2
        clock.now += 4
        assert ledger.seconds["step"] == 5
    clock.now += 7
    booked = {name: value for name, value in ledger.seconds.items() if value}
    assert booked == {"step": 5, "checkpoint": 2}
    assert ledger.total_seconds == 7
    assert set(ledger.seconds) == set(ACCOUNTS)


def test_tokens_per_second_count_training_time_only(clock: Clock) -> None:
    ledger = Ledger(FREE)
    interval = MetricsWindow(torch.device("cpu"), World(), ledger)
    chip = ChipPeak("some", {"fp32": 1000.0})
    device: Any = SimpleNamespace(chip_peak=lambda _: chip)
    context: Any = SimpleNamespace(steps_per_epoch=10, mfu=MfuMeter(device, "fp32", 2.0, 1))
    guard = SimpleNamespace(num_skipped=0)
    state: Any = SimpleNamespace(
        step=1, guard=guard, lr_schedule=SimpleNamespace(rate_at=lambda _: 0.1)
    )
    with ledger.phase("step"):
        for _ in range(2):
            clock.now += 1
            with ledger.phase("data_wait"):
                clock.now += 1
            interval.count([{"segments": np.ones((2, 50))}])
            interval.add(torch.ones(2), torch.zeros(()))
            line = interval.flush(context, state)
            assert (line["train/tokens_per_second"], line["train/mfu"]) == (50, 0.1)
            with ledger.phase("evaluate"):
                clock.now += 30


@pytest.mark.parametrize(
    ("account", "booked"),
    [("step", {"step": 4, "compile": 6}), ("compile", {"compile": 10}), (None, {})],
)
def test_device_compile_time_is_moved_to_the_compile_account(
    clock: Clock, account: str | None, booked: dict[str, float]
) -> None:
    """A rehearsed step is in the compile account already."""
    compiled = iter((0.0, 6.0))
    ledger = Ledger(FREE, compile_seconds=lambda: next(compiled))
    with ledger.phase(account) if account else nullcontext(), ledger.compilation():
        clock.now += 10
    assert {name: value for name, value in ledger.seconds.items() if value} == booked


def test_an_account_is_closed_after_an_error(clock: Clock) -> None:
    ledger = Ledger(FREE)

    def fail() -> None:
        with ledger.phase("evaluate"):
            clock.now += 3
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    clock.now += 10
    assert ledger.total_seconds == 3


def test_a_resumed_run_continues_and_books_lost_time(clock: Clock) -> None:
    first = Ledger(FREE)
    with first.phase("step"):
        clock.now += 10
        first.tokens, first.computed_tokens = 60, 80
        state = json.loads(json.dumps(first.state()))
        clock.now += 4
        last = {"seconds": first.seconds}
    second = Ledger(FREE)
    with second.phase("init"):
        clock.now += 1
        second.restore(state, last)
    assert second.seconds["step"] == 10
    assert second.seconds["lost"] == 4
    assert second.total_seconds == 15
    assert (second.tokens, second.padding_fraction) == (60, 0.25)


def test_no_time_is_lost_without_a_line_after_the_checkpoint(clock: Clock) -> None:
    clock.now += 1
    for last in (None, {"seconds": {"step": 6.0}}):
        ledger = Ledger(FREE)
        ledger.restore({"seconds": {"step": 8.0}, "tokens": 0, "computed_tokens": 0}, last)
        assert ledger.seconds["lost"] == 0
        assert ledger.padding_fraction == 0


@pytest.mark.parametrize("torn", ["", '{"a": 1', '{"a": 1}\n{"b'])
def test_a_line_after_a_truncated_line_is_complete(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(torn)
    jsonl.append_line(path, {"step": 3})
    jsonl.append_line(path, {"step": 4, "path": path})
    texts = path.read_text().splitlines()
    assert texts[-2:] == ['{"step": 3}', json.dumps({"step": 4, "path": str(path)})]
    assert path.read_text().startswith(torn)
    assert jsonl.read_last_line(path) == {"step": 4, "path": str(path)}


def test_the_last_complete_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert jsonl.read_last_line(path) is None
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert jsonl.read_last_line(path) == {"step": 2}


def test_a_non_finite_number_is_null_with_its_text(tmp_path: Path) -> None:
    jsonl.append_line(tmp_path / "a.jsonl", {"loss": float("nan"), "step": 1})
    assert (tmp_path / "a.jsonl").read_text() == '{"loss": null, "step": 1, "loss_text": "NaN"}\n'
