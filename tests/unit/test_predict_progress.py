"""The progress of a prediction job."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from regauge.inference.predict.progress import ProgressBar
from regauge.system.log import logger

ROWS = 100


def build_bar() -> ProgressBar:
    pieces = [SimpleNamespace(bytes=10)] * 3
    job: Any = SimpleNamespace(pieces=pieces, piece_numbers=[0, 1, 2])
    meter: Any = SimpleNamespace(read=lambda: SimpleNamespace(usd=None))
    return ProgressBar(job, {}, meter)


def shard(piece: int) -> dict[str, Any]:
    counts = {"rows": ROWS, "quarantined": 0, "tokens": 90, "computed_tokens": 100}
    return {"event": "shard", "piece": piece, "is_last": True, **counts}


def format_counts(bar: ProgressBar) -> str:
    return bar._format_counts(bar._num_rows)


def test_rows_are_counted_once_even_if_progress_is_reported_late() -> None:
    bar = build_bar()
    bar.handle_event({"event": "progress", "rows": 70})
    assert format_counts(bar).startswith("70 rows")
    bar.handle_event(shard(0))
    assert format_counts(bar).startswith("100 rows")
    bar.handle_event({"event": "progress", "rows": 80})  # 30 of them belong to the previous shard
    assert format_counts(bar).startswith("150 rows")
    bar.handle_event(shard(1))
    assert format_counts(bar).startswith("200 rows, ")
    assert "90% useful tokens" in format_counts(bar)


def test_rows_of_a_lost_worker_are_not_in_the_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger.name), build_bar() as bar:
        bar.handle_event({"event": "ready", "worker": 0, "seconds": 0.1})
        # The worker is lost after 60 rows; another worker repeats them.
        bar.handle_event({"event": "progress", "rows": 60})
        bar.handle_event({"event": "progress", "rows": ROWS})
        bar.handle_event(shard(0))
    assert caplog.messages[-1].startswith("100 rows")
