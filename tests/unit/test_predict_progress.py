"""How far a job says that it is."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from regauge.log import logger
from regauge.prediction.progress import Pace

ROWS = 100


def pace() -> Pace:
    pieces = [SimpleNamespace(bytes=10)] * 3
    job: Any = SimpleNamespace(pieces=pieces, share=[0, 1, 2])
    meter: Any = SimpleNamespace(read=lambda: SimpleNamespace(usd=None))
    return Pace(job, {}, meter)


def shard(piece: int) -> dict[str, Any]:
    counts = {"rows": ROWS, "tokens": 90, "slots": 100}
    return {"event": "shard", "piece": piece, "last": True, **counts}


def told(made: Pace) -> str:
    return made._line(made._rows)


def test_records_are_counted_once_however_late_it_is_said_that_they_are_answered() -> None:
    made = pace()
    made.hear({"event": "sign", "rows": 70})
    assert told(made).startswith("70 rows")
    made.hear(shard(0))
    assert told(made).startswith("100 rows")
    made.hear({"event": "sign", "rows": 80})  # 30 of them are of the shard before
    assert told(made).startswith("150 rows")
    made.hear(shard(1))
    assert told(made).startswith("200 rows, ")
    assert "90% useful tokens" in told(made)


def test_what_a_lost_worker_had_answered_is_not_in_the_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger.name), pace() as made:
        made.hear({"event": "ready", "worker": 0, "seconds": 0.1})
        made.hear({"event": "sign", "rows": 60})  # and it is lost: another answers them again
        made.hear({"event": "sign", "rows": ROWS})
        made.hear(shard(0))
    assert caplog.messages[-1].startswith("100 rows")
