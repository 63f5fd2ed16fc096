"""The exposition of every metric, and an HTTP server that no client can hold up."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from regauge.config import build
from regauge.monitoring import exporter, vocabulary
from regauge.monitoring.exporter import (
    EXPORTERS,
    MIN_RENDER_SECONDS,
    Exporter,
    export_metrics,
    find_targets,
    listen,
)
from regauge.monitoring.exposition import MAX_LABEL_CHARACTERS, MAX_SERIES, render_samples
from regauge.monitoring.polled_source import PolledSource
from regauge.monitoring.settings import Monitoring
from regauge.monitoring.vocabulary import Sample
from regauge.system.errors import DataError, PreemptedError, SettingsError
from regauge.system.timing import wait_for

SAMPLED = [metric for metric in vocabulary.METRICS if metric.type != "histogram"]


def example_samples() -> list[Sample]:
    """Return a sample of every metric but the histograms, which serving builds itself."""
    return [Sample(metric, 1, tuple(metric.labels)) for metric in SAMPLED]


@pytest.fixture
def server() -> Iterator[Exporter]:
    running = Exporter(listen("127.0.0.1", 0), lambda: b"regauge_run_attempt 1\n")
    yield running
    running.close()


def fetch(port: int, path: str = "/metrics") -> str:
    """Return the body of an answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        assert answer.headers["Content-Type"] == exporter.CONTENT_TYPE
        return str(answer.read().decode())


def test_every_metric_of_the_vocabulary_has_a_line() -> None:
    text = render_samples(example_samples).decode()
    names = {s.name for family in text_string_to_metric_families(text) for s in family.samples}
    assert names == {metric.name for metric in SAMPLED}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_promtool_accepts_every_metric() -> None:
    text = render_samples(example_samples)
    command = ["promtool", "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_values_that_are_not_finite_are_exported() -> None:
    sample = Sample(vocabulary.TRAIN_LOSS, float("nan"), ("run", "1"))
    assert (
        'regauge_train_loss{run="run",run_id="1"} NaN' in render_samples(lambda: [sample]).decode()
    )


def test_series_and_labels_are_bounded() -> None:
    metric = vocabulary.EVALUATION_SCORE
    samples = [Sample(metric, n, ("run", "1", f"{n}" + "x" * 1000)) for n in range(MAX_SERIES + 10)]
    (family,) = text_string_to_metric_families(render_samples(lambda: samples).decode())
    assert len(family.samples) == MAX_SERIES
    assert max(len(s.labels["metric"]) for s in family.samples) == MAX_LABEL_CHARACTERS


def test_a_sample_with_other_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="regauge_rank_step needs the labels"):
        render_samples(lambda: [Sample(vocabulary.RANK_STEP, 1, ("run",))])


def test_metrics_are_served_and_other_paths_are_not(server: Exporter) -> None:
    assert fetch(server.port) == "regauge_run_attempt 1\n"
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        fetch(server.port, "/secrets")
    caught.value.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01\x02\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 100_000, b"400"),
    ],
)
def test_a_hostile_request_is_refused(
    server: Exporter, request_bytes: bytes, status: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(request_bytes)
        assert client.recv(64).split()[1] == status


def test_silent_clients_do_not_hold_up_prometheus(server: Exporter) -> None:
    address = ("127.0.0.1", server.port)
    clients = [socket.create_connection(address) for _ in range(exporter.MAX_CONNECTIONS)]
    try:
        start = time.monotonic()
        assert fetch(server.port)
        assert time.monotonic() - start < exporter.CONNECTION_SECONDS
    finally:
        for client in clients:
            client.close()


def test_a_silent_client_is_disconnected(server: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "CONNECTION_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert client.recv(64) == b""


def test_metrics_are_rendered_once_a_second() -> None:
    calls: list[int] = []
    running = Exporter(listen("127.0.0.1", 0), lambda: b"%d\n" % (calls.append(1) or len(calls)))
    try:
        texts = {fetch(running.port) for _ in range(3)}
    finally:
        running.close()
    assert len(texts) == len(calls)
    assert len(calls) < 3


def test_an_error_of_a_collector_does_not_end_the_server() -> None:
    failures = iter([ValueError("damaged")])

    def render() -> bytes:
        for failure in failures:
            raise failure
        return b"fine\n"

    running = Exporter(listen("127.0.0.1", 0), render)
    try:
        with pytest.raises(urllib.error.HTTPError, match="500") as caught:
            fetch(running.port)
        caught.value.close()
        assert fetch(running.port) == "fine\n"
    finally:
        running.close()


def test_a_blocked_collector_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "CLOSE_SECONDS", 0.2)
    is_blocked, release = threading.Event(), threading.Event()

    def render() -> bytes:
        is_blocked.set()
        release.wait(30)
        return b""

    running = Exporter(listen("127.0.0.1", 0), render)
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert is_blocked.wait(30)
        start = time.monotonic()
        running.close()
        assert time.monotonic() - start < 10
        release.set()
        running._thread.join()


def test_the_address_is_in_the_folder_during_the_run(tmp_path: Path) -> None:
    settings = build(Monitoring, {"port": 0})
    dead = tmp_path / EXPORTERS / f"{socket.gethostname()}-999999999.json"
    dead.parent.mkdir()
    dead.write_text(json.dumps([{"targets": ["127.0.0.1:1"]}]))
    with export_metrics(settings, tmp_path, example_samples) as running:
        assert running is not None
        address = f"127.0.0.1:{running.port}"
        assert find_targets(tmp_path) == {address: socket.gethostname()}
        assert "regauge_run_attempt" in fetch(running.port)
    assert not find_targets(tmp_path)
    assert not (tmp_path / EXPORTERS).exists()


def test_several_runs_write_their_addresses_to_one_folder(tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    settings = build(Monitoring, {"port": 0, "targets_folder": str(targets)})
    with export_metrics(settings, tmp_path / "run", example_samples) as running:
        assert running is not None
        (path,) = targets.glob("*.json")
        (group,) = json.loads(path.read_text())
        assert group["targets"] == [f"127.0.0.1:{running.port}"]
        assert group["labels"] == {"node": socket.gethostname()}
    assert not list(targets.iterdir())


@pytest.mark.parametrize(
    ("error", "value"),
    [(DataError("a", "b"), 1), (ValueError("a"), 1), (PreemptedError("a", "b"), None)],
    ids=["data", "bug", "stopped"],
)
def test_the_end_of_a_failed_run_is_read(
    error: Exception, value: int | None, tmp_path: Path
) -> None:
    """A reader at intervals sees the failure, because the end waits for it."""
    texts: list[str] = []
    is_over = threading.Event()

    def read(port: int) -> None:
        with suppress(OSError):
            while not is_over.wait(MIN_RENDER_SECONDS / 4):
                texts.append(fetch(port))

    def run_and_fail() -> threading.Thread:
        settings = build(Monitoring, {"port": 0})
        with (
            suppress(type(error)),
            export_metrics(
                settings, tmp_path, example_samples, find_run=lambda: ("a", "1")
            ) as running,
        ):
            assert running is not None
            reader = threading.Thread(target=read, args=[running.port])
            reader.start()
            wait_for(lambda: running._read_seconds > 0, 60)
            raise error
        return reader

    reader = run_and_fail()
    is_over.set()
    reader.join()
    name = 'regauge_run_failed{run="a",run_id="1"} '
    assert f"{name}0.0" in texts[0]
    assert (f"{name}1.0" in texts[-1]) == (value == 1)


def test_nothing_is_served_by_default(tmp_path: Path) -> None:
    with export_metrics(Monitoring(), tmp_path, example_samples) as running:
        assert running is None
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port) as second:
            assert second.getsockname()[1] != port
    assert f"monitoring.port {port} is in use" in caplog.text


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"cannot use 192\.0\.2\.1:9100"):
        listen("192.0.2.1", 9100)


def test_a_host_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="is not an IP address"):
        build(Monitoring, {"host": "example.org"})


def test_a_source_that_blocks_has_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.monitoring.polled_source.CLOSE_SECONDS", 0.1)
    release = threading.Event()
    with PolledSource(lambda: lambda: release.wait(30)) as source:
        assert source.read() is None
    release.set()
    source._thread.join()


def test_an_old_value_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    has_read = threading.Event()
    with PolledSource(lambda: lambda: has_read.set() or 5, interval=60) as source:
        assert has_read.wait(30)
        while source.read() is None:
            assert source._thread.is_alive()
        assert source.read() == 5
        monkeypatch.setattr("regauge.monitoring.polled_source.MAX_AGE_SECONDS", 0.0)
        assert source.read() is None
