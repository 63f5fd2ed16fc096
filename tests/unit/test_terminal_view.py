"""The screens of `regauge top`, and its readers of batch inference and of servers."""

from __future__ import annotations

import io
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from rich.console import Console

from loopback import Answer, Request, answer_requests
from regauge.commands._top.predict_reader import PredictReader
from regauge.commands._top.screen import format_label, format_value, render
from regauge.commands._top.server_reader import ServerReader
from regauge.commands._top.snapshot import Snapshot, TableRow, ViewEvent, ViewProgress
from regauge.commands._top.targets import open_reader
from regauge.monitoring import vocabulary
from regauge.system.errors import DataError, SettingsError, TransientError


def build_snapshot(num_ranks: int, problems: tuple[int, ...] = (), events: int = 5) -> Snapshot:
    rows = tuple(
        TableRow(
            {"rank": rank, "state": "stopped" if rank in problems else "alive", "step": 1200},
            is_problem=rank in problems,
        )
        for rank in range(num_ranks)
    )
    values = {f"figure_{index}": 0.5 for index in range(8)}
    return Snapshot(
        name="a run with a name that is rather long for a terminal",
        verb="train",
        state="running",
        read_at=0.0,
        facts=("attempt 1", "1 h 05 min", "host-1"),
        progress=ViewProgress("steps", 1200, 10_000, 3725.0),
        groups=dict.fromkeys(("rates", "cost", "state"), values),
        table="ranks",
        rows=rows,
        events=tuple(ViewEvent(60.0 * index, f"event {index} " * 20) for index in range(events)),
    )


def draw(snapshot: Snapshot, width: int, height: int | None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or 1000)
    console.print(render(snapshot, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("num_ranks", [0, 1, 8, 512])
@pytest.mark.parametrize("num_events", [0, 3, 50])
@pytest.mark.parametrize("size", [(80, 24), (200, 50), (100, 30), (60, 20), (131, 24)])
def test_a_screen_has_exactly_the_size_of_the_terminal(
    size: tuple[int, int], num_ranks: int, num_events: int
) -> None:
    width, height = size
    lines = draw(build_snapshot(num_ranks, events=num_events), width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith("q quit")
    assert "running" in lines[0]
    assert lines[1].startswith("1,200/10,000 steps █")
    assert lines[1].endswith("12.0%  ETA 1:02:05")


def test_ranks_with_a_problem_are_shown_first() -> None:
    lines = draw(build_snapshot(512, problems=(300, 511)), 80, 24)
    assert sum("stopped" in line for line in lines) == 2
    hidden = next(line for line in lines if line.startswith("…"))
    assert "none with a problem" in hidden
    shown = sum("alive" in line or "stopped" in line for line in lines)
    assert int(hidden.split()[1]) == 512 - shown


def test_without_a_height_everything_is_shown() -> None:
    lines = draw(build_snapshot(100, events=60), 80, None)
    assert sum("alive" in line for line in lines) == 100
    assert sum("event" in line for line in lines) == 60
    assert not any("quit" in line for line in lines)


def build_shard(piece: int, part: int, *, is_last: bool, rows: int = 100) -> dict[str, Any]:
    counts = {"quarantined": 1, "skipped": 0, "truncated": 2, "tokens": 500}
    seconds = {"read": 0.1, "compute": 0.2, "write": 0.1}
    shard = {"piece": piece, "part": part, "is_last": is_last, "rows": rows, **counts}
    return {**shard, "computed_tokens": 1000, "bytes": {}, "sha256": {}, "seconds": seconds}


def test_batch_inference(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "0-of-1"
    job.mkdir(parents=True)
    pieces = {"a": [1000, ""], "b": [3000, ""]}
    (tmp_path / "job.json").write_text(json.dumps({"format": 2, "pieces": pieces}))
    lines = [build_shard(0, 0, is_last=False), build_shard(0, 1, is_last=True)]
    ledger = job / "ledger.jsonl"
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"piece": 1, "pa')
    attempt = {"started_at": 100.0, "ended_at": 110.0, "machine_seconds": 10.0, "usd": 0.5}
    (job / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    reader = open_reader(str(tmp_path))
    assert isinstance(reader, PredictReader)
    document = reader.read().document
    assert document["progress"]["done"] == 1
    assert document["records"] == {
        "records": 200, "records_per_second": 20.0, "tokens_per_second": 100.0,
        "padding_ratio": 0.5, "failed_records": 2, "truncated_records": 4, "shards": 2,
    }  # fmt: skip
    assert document["cost"] == {"usd": 0.5, "usd_per_million_records": 2500.0}
    with ledger.open("a") as file:  # the rest of the half-written line, and a repeated shard
        file.write('rt": 0}\n' + json.dumps(build_shard(0, 0, is_last=False, rows=50)) + "\n")
        file.write(json.dumps(build_shard(1, 0, is_last=True)) + "\n")
    (tmp_path / "result.json").write_text("{}")
    document = reader.read().document
    assert document["state"] == "finished"
    assert reader._measure_progress([], 10.0).eta_seconds is None
    shard = {**build_shard(1, 0, is_last=False), "source_bytes": 1000}
    assert reader._measure_progress([shard], 10.0).eta_seconds == 30.0, "4,000 bytes in all"
    assert document["records"]["records"] == 250
    assert document["progress"] == {"unit": "pieces", "done": 2, "total": 2, "eta_seconds": None}


@pytest.mark.parametrize("outcome", ["preempted", "failed"])
def test_a_stopped_batch_inference(tmp_path: Path, outcome: str) -> None:
    job = tmp_path / "jobs" / "0-of-1"
    job.mkdir(parents=True)
    (tmp_path / "job.json").write_text(json.dumps({"format": 2, "pieces": {"a": [1000, ""]}}))
    (job / "ledger.jsonl").write_text(json.dumps(build_shard(0, 0, is_last=False)) + "\n")
    start = {"started_at": 100.0, "usd_per_hour": 3600.0, "usd": None}
    (job / ".seen").write_text("110.000")
    attempts = job / "attempts.jsonl"
    attempts.write_text(json.dumps(start) + "\n")
    document = open_reader(str(tmp_path)).read().document
    assert document["state"] == "unknown"
    assert document["jobs"][0]["usd"] == pytest.approx(10.0)
    with attempts.open("a") as file:
        file.write(json.dumps({**start, "ended_at": 112.0, "outcome": outcome, "usd": 12.0}) + "\n")
    document = open_reader(str(tmp_path)).read().document
    assert document["state"] == outcome
    assert "again to resume" in document["reason"]
    assert document["jobs"][0]["usd"] == 12.0


class Metrics:
    """Metrics of a server under the names of the vocabulary."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = vocabulary.SERVE_REQUESTS.name.removesuffix("_total")
        self.requests = Counter(name, "-", ("route", "status"), registry=self.registry)
        name = vocabulary.SERVE_REQUEST_SECONDS.name
        buckets = (0.01, 0.1, 1.0)
        self.seconds = Histogram(name, "-", ("route",), buckets=buckets, registry=self.registry)

    def answer(self, status: str, seconds: float, count: int) -> None:
        for _ in range(count):
            self.requests.labels("/v1/embeddings", status).inc()
            self.seconds.labels("/v1/embeddings").observe(seconds)


def serve(answers: dict[str, Any]) -> AbstractContextManager[str]:
    """Serve a status and a body, or a function of it, for each path."""

    def respond(request: Request) -> Answer:
        status, body = answers.get(request.path, (404, b""))
        return status, body() if callable(body) else body, {}

    return answer_requests(respond, "server")


def test_a_server() -> None:
    metrics = Metrics()
    models = {"m": {"workers": 2, "waiting_records": 7}, "n": {"workers": 0}}
    health = json.dumps({"status": "ready", "models": models}).encode()
    answers = {
        "/health": (200, health),
        "/metrics": (200, lambda: generate_latest(metrics.registry)),
    }
    with serve(answers) as url:
        reader = ServerReader(url)
        metrics.answer("200", 0.05, 90)
        metrics.answer("503", 0.5, 10)
        document = reader.read().document
        assert document["state"] == "ready"
        requests = document["requests"]
        assert (requests["requests"], requests["failed_requests"]) == (100, 10)
        assert (requests["p50_seconds"], requests["p95_seconds"]) == (0.1, 1.0)
        assert requests["requests_per_second"] is None
        assert [(row["model"], row["workers"]) for row in document["models"]] == [
            ("m", 2), ("n", 0)
        ]  # fmt: skip
        metrics.answer("200", 0.001, 50)
        requests = reader.read().document["requests"]
        assert requests["p95_seconds"] == 0.01  # of the new requests
        assert requests["requests_per_second"] > 0


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({}, DataError),
        ({"/health": (200, b"{}"), "/metrics": (401, b"")}, SettingsError),
        ({"/health": (200, b"{}"), "/metrics": (200, b"no metrics {{{")}, DataError),
    ],
)
def test_other_servers_are_refused(answers: dict[str, Any], error: type[Exception]) -> None:
    with serve(answers) as url, pytest.raises(error):
        ServerReader(url).read()


def test_a_server_that_is_down() -> None:
    with serve({}) as url:
        pass
    with pytest.raises(TransientError, match="does not answer"):
        ServerReader(url).read()


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("none", "no folder none"),
        ("http://", "is not a server address"),
        ("local://x", "is not a job handle"),
        (".", "does not contain a run"),
    ],
)
def test_wrong_targets(
    target: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=problem):
        open_reader(target)


@pytest.mark.parametrize(
    ("key", "value", "label", "text"),
    [
        ("goodput_ratio", 0.769, "goodput", "76.9%"),
        ("budget_usd", 2, "budget", "$2.00"),
        ("usd_per_million_records", 1500.0, "per 1M records", "$1,500.00"),
        ("lost_seconds", 125.0, "lost work", "2 min 05 s"),
        ("peak_memory_bytes", 760_000_000, "peak memory", "0.76 GB"),
        ("tokens_per_second", 16_543.2, "tokens/s", "16.5k"),
        ("requests_per_second", 0.25, "requests/s", "0.250"),
        ("p99_seconds", 0.1, "p99 s", "0.100"),
        ("heldout/bytes_seconds", 3.0, "heldout/bytes_seconds", "3.000"),
        ("exit_code", None, "exit code", "-"),
        ("loss", "NaN", "loss", "NaN"),
    ],
)
def test_the_unit_of_a_key_decides_how_its_value_is_shown(
    key: str, value: float | str | None, label: str, text: str
) -> None:
    assert (format_label(key), format_value(key, value)) == (label, text)
