"""The progress of a prediction job."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regauge import config
from regauge.inference.predict.progress import ProgressBar
from regauge.inference.predict.shard import PieceReader
from regauge.inference.predict.shard_queue import ShardId
from regauge.system.log import logger

ROWS = 100


def build_bar(sizes: tuple[int, ...] = (10, 10, 10)) -> ProgressBar:
    pieces = [SimpleNamespace(bytes=size) for size in sizes]
    job: Any = SimpleNamespace(pieces=pieces, piece_numbers=range(len(sizes)))
    meter: Any = SimpleNamespace(read=lambda: SimpleNamespace(usd=None))
    return ProgressBar(job, {}, meter)


def shard(piece: int) -> dict[str, Any]:
    counts = {"rows": ROWS, "quarantined": 0, "tokens": 90, "computed_tokens": 100}
    counts["source_bytes"] = 10
    return {"event": "shard", "piece": piece, "is_last": True, **counts}


def format_counts(bar: ProgressBar) -> str:
    return bar._format_counts(bar._num_rows)


def test_rows_are_counted_once_even_if_progress_is_reported_late() -> None:
    bar = build_bar()
    bar.handle_event({"event": "progress", "rows": 70, "source_bytes": 7})
    assert format_counts(bar).startswith("70 rows")
    bar.handle_event(shard(0))
    assert format_counts(bar).startswith("100 rows")
    bar.handle_event(
        {"event": "progress", "rows": 80, "source_bytes": 8}
    )  # 30 of them belong to the previous shard
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
        bar.handle_event({"event": "progress", "rows": 60, "source_bytes": 6})
        bar.handle_event({"event": "progress", "rows": ROWS, "source_bytes": 10})
        bar.handle_event(shard(0))
    assert caplog.messages[-1].startswith("100 rows")


def test_the_time_left_is_known_inside_of_a_piece() -> None:
    """After 10 s, 25 of 100 bytes of one file are computed, then half of them, then all."""
    bar = build_bar((100,))
    now = bar._started + 10
    assert bar._format_eta(now) == "unknown"
    bar.handle_event({"event": "progress", "rows": 20, "source_bytes": 25})
    assert bar._format_eta(now) == "30 s"
    bar.handle_event({**shard(0), "is_last": False, "source_bytes": 50})
    bar.handle_event({"event": "progress", "rows": 20, "source_bytes": 25})
    assert bar._format_eta(now) == "10 s"
    bar.handle_event({**shard(0), "source_bytes": 20})
    assert bar._format_eta(now) == "0 s"


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "jsonl.gz"])
def test_the_bytes_of_records_are_about_those_of_their_file(tmp_path: Path, suffix: str) -> None:
    path, texts = tmp_path / f"texts.{suffix}", [f"the text with number {n}" for n in range(500)]
    lines = [json.dumps({"text": text}) for text in texts]
    content = "\n".join(["text", *texts] if suffix == "csv" else lines) + "\n"
    data = content.encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    kind = suffix.partition(".")[0]
    source: Any = config.parse_choice("data/sources", {"kind": kind, "files": [str(path)]})
    pieces = source.list_pieces()
    spec: Any = SimpleNamespace(shard_records=100)
    reader = PieceReader(source, pieces, spec)
    total = 0
    for part in range(5):
        items, _ = reader.read_part(ShardId(0, part)) or ([], True)
        total += reader.estimate_bytes(ShardId(0, part), items)
    assert 0.5 < total / pieces[0].bytes < (5 if suffix.endswith("gz") else 1.6)
