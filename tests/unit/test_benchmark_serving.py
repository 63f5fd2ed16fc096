"""Benchmark of a server: its document, tables, report, baseline, and a server that it starts."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest

import regauge
from fake_server import TEXT_EVENTS, run_fake_server
from regauge.commands import benchmark
from regauge.config import build
from regauge.evaluation.benchmark import served_target, serving
from regauge.evaluation.benchmark.served_target import is_healthy, run_server, subtract_phases
from regauge.evaluation.benchmark.serving import read_trace
from regauge.evaluation.benchmark.serving_settings import ServingBenchmarkSettings, TraceSettings
from regauge.evaluation.report.benchmarks import build_section, read_benchmark
from regauge.evaluation.report.page import build_report
from regauge.evaluation.report.render import render_html, render_markdown
from regauge.run_folders.run_folder import read_run_folder
from regauge.system.errors import (
    ChildError,
    DataError,
    DifferenceError,
    NoProgressError,
    RegaugeError,
    SettingsError,
)
from regauge.system.json_files import write_sealed
from regauge.system.processes import find_free_port

FAKE = Path(__file__).parents[1] / "fake_server.py"
SHORT: dict[str, Any] = {
    "closed_loop": {
        "concurrency": [1, 4],
        "texts_per_request": [2],
        "duration_seconds": 1.0,  # enough requests for a median on a busy machine
        "warmup_seconds": 0.05,
    },
    "open_loop": {"load_fractions": [0.5], "burst_size": 2, "duration_seconds": 0.2},
    "saturation": {
        "slo_ms": 10_000.0,  # a busy machine meets it, too
        "trial_seconds": 0.15,
        "max_trial_seconds": 0.15,
        "max_trials": 2,
    },
    "trace": {"count": 50},
}


def run_benchmark(url: str, folder: Path, **settings: Any) -> Any:
    tables = {**SHORT, **settings}
    return regauge.benchmark(url, serve=True, output__folder=str(folder), **tables)


def fake_command(port: int) -> list[str]:
    return [sys.executable, str(FAKE), str(port)]


@pytest.fixture(scope="module")
def result_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a server benchmark that takes 5 ms for a request."""
    folder = tmp_path_factory.mktemp("serving") / "bench"
    with run_fake_server(seconds=0.005) as fake:
        run_benchmark(fake.url, folder, execution={"price": {"usd_per_hour": 3.6}})
    return folder


def read(folder: Path) -> dict[str, Any]:
    return read_benchmark(folder / "benchmark.json")


def test_each_load_of_a_server_is_measured(result_folder: Path) -> None:
    document = read(result_folder)
    assert document["kind"] == "serving"
    assert document["server"]["protocol"] == "openai"
    assert [row["concurrency"] for row in document["closed_loop"]] == [1, 4]
    assert all(row["statuses"].keys() == {"200"} for row in document["closed_loop"])
    assert all(row["p50_ms"] >= 5.0 for row in document["closed_loop"])
    last = document["closed_loop"][1]
    assert last["phase_seconds"]["compute"] == pytest.approx(0.002 * last["num_requests"])
    assert [row["arrivals"] for row in document["open_loop"]] == ["poisson", "burst"]


def test_the_saturation_rate_has_a_price(result_folder: Path) -> None:
    document = read(result_folder)
    saturation = document["saturation"]
    rate = saturation["requests_per_second"]
    assert rate == max(trial["rate"] for trial in saturation["trials"] if trial["meets_objective"])
    assert saturation["usd_per_million_texts"] == pytest.approx(1e3 / rate)
    assert document["open_loop"][0]["rate"] == pytest.approx(0.5 * rate)


def test_the_tables_and_the_chart_are_files(result_folder: Path) -> None:
    with (result_folder / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["load"] for row in rows[:4]] == ["closed_loop"] * 2 + ["open_loop"] * 2
    assert rows[1]["concurrency"] == "4"
    svg = (result_folder / "benchmark.svg").read_text()
    assert "<svg" in svg
    assert "texts/s" in svg


def test_a_report_has_the_loads_and_charts(result_folder: Path) -> None:
    report = build_report((read_run_folder(result_folder),))
    for text in (render_html(report), render_markdown(report)):
        assert "Closed loop: each connection has one request at a time" in text
        assert "The server meets p99" in text
    [section] = report.benchmarks
    titles = [chart.title for chart in section.charts]
    assert titles[-1] == "Milliseconds of the server per text"


def benchmark_text(folder: Path, *events: str) -> dict[str, Any]:
    """Return the document of a server of text that always answers with some events."""
    with run_fake_server(failures=[(404, {})] * 2, texts=(events,)) as fake:
        run_benchmark(fake.url, folder, execution={"price": {"usd_per_hour": 3.6}})
        bodies = [request["body"] for request in fake.requests]
    assert all(len(body["prompt"]) == 1 for body in bodies if "prompt" in body)
    return read(folder)


def test_generated_text_has_the_figures_of_its_tokens(tmp_path: Path) -> None:
    document = benchmark_text(tmp_path, *TEXT_EVENTS)
    assert document["server"]["protocol"] == "completions"
    for row in [*document["closed_loop"], *document["open_loop"]]:
        assert row["tokens_per_second"] == pytest.approx(4 * row["requests_per_second"])
    saturation = document["saturation"]
    fastest = max(trial["tokens_per_second"] for trial in saturation["trials"])
    assert saturation["usd_per_million_tokens"] == pytest.approx(1e3 / fastest)
    section = build_section(document)
    assert section is not None
    assert "per million tokens" in section.summary[0]
    assert any("time to the first token" in sentence for sentence in section.sentences)


def test_a_load_without_a_complete_text_has_no_tokens(tmp_path: Path) -> None:
    document = benchmark_text(tmp_path, *TEXT_EVENTS[:2], '{"error": {"message": "lost"}}')
    row = document["closed_loop"][0]
    assert row["statuses"].keys() == {"stream error"}
    assert (row["tokens_per_second"], row["token_ms"]["p50_ms"]) == (0.0, None)
    section = build_section(document)
    assert section is not None
    assert section.tables[0].rows[0]["tokens/s"] == "0"


def test_refusals_are_part_of_the_result(tmp_path: Path) -> None:
    loops = {"open_loop": {"load_fractions": []}, "saturation": {"max_trials": 0}}
    with run_fake_server(seconds=0.01, capacity=1, max_queue=0, retry_after="0.01") as fake:
        run_benchmark(fake.url, tmp_path, server={"url": fake.url, "protocol": "tei"}, **loops)
    document = read(tmp_path)
    crowded = document["closed_loop"][1]
    assert document["server"]["protocol"] == "tei"
    assert document["saturation"] is None
    assert crowded["statuses"]["429"] > 0
    assert crowded["dropped_fraction"] > 0
    section = build_section(document)
    assert section is not None
    assert "429: " in section.tables[0].rows[1]["statuses"]


@pytest.mark.full
def test_a_regression_is_an_error_after_the_result_is_written(
    result_folder: Path, tmp_path: Path
) -> None:
    loops = {"open_loop": {"load_fractions": []}, "saturation": {"max_trials": 0}}
    baseline = read(result_folder)
    for row in baseline["closed_loop"]:
        row.update(texts_per_second=1e6, p99_ms=0.01)  # no machine is that fast
    write_sealed(tmp_path / "baseline.json", baseline)
    with run_fake_server(seconds=0.1) as fake:
        gate = {"baseline": str(tmp_path / "baseline.json")}
        with pytest.raises(DifferenceError, match="figures are worse than the baseline"):
            run_benchmark(fake.url, tmp_path, regression=gate, **loops)
        rows = read(tmp_path)["regression"]["rows"]
        assert {row["load"] for row in rows if row["is_regression"]} == {"1 x 2", "4 x 2"}
        tables = {**SHORT, **loops, "server": {"url": fake.url}, "regression": gate}
        settings = build(ServingBenchmarkSettings, {**tables, "output": {"folder": str(tmp_path)}})
        with pytest.raises(DifferenceError):
            benchmark.run(settings)
    section = build_section(read(tmp_path))
    assert section is not None
    assert section.summary[-1].startswith("2 of 2 figures are worse than the baseline")
    assert [table.title for table in section.tables][-1] == "Regressions"


def test_a_damaged_baseline_is_an_error_before_the_measurement(tmp_path: Path) -> None:
    with run_fake_server() as fake:
        gate = {"baseline": str(tmp_path / "missing.json")}
        with pytest.raises(DataError, match=r"missing\.json is missing"):
            run_benchmark(fake.url, tmp_path / "bench", regression=gate)
        assert not fake.requests


def test_an_artifact_is_served_for_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        served_target, "build_serve_command", lambda _, port, __: fake_command(port)
    )
    loops = {"open_loop": {"load_fractions": []}, "saturation": {"max_trials": 0}}
    run_benchmark(str(tmp_path / "artifact"), tmp_path / "bench", **loops)
    server = read(tmp_path / "bench")["server"]
    assert server["artifact"] == str(tmp_path / "artifact")
    assert 0.05 < server["start_seconds"] < 30.0
    assert server["processor_seconds"] > 0.05


def test_the_command_of_a_server_has_its_address() -> None:
    command = served_target.build_serve_command("out/a", 81, ("serve.workers=2",))
    assert command[1:5] == ["-m", "regauge", "serve", "out/a"]
    assert command[5:] == ["serve.host=127.0.0.1", "serve.port=81", "serve.workers=2"]


def test_a_server_is_stopped_at_the_end(tmp_path: Path) -> None:
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    with run_server(fake_command(port), url, tmp_path / "log", 30.0) as running:
        assert is_healthy(url)
        assert running.read_processor_seconds() > 0
    assert not is_healthy(url)


@pytest.mark.parametrize(
    ("code", "seconds", "kind", "message"),
    [
        ("raise SystemExit(3)", 30.0, ChildError, "ended with exit code 3"),
        ("import time; time.sleep(60)", 0.5, NoProgressError, r"not ready after 0\.5 s"),
    ],
)
def test_a_server_that_is_never_ready_is_an_error(
    tmp_path: Path, code: str, seconds: float, kind: type[RegaugeError], message: str
) -> None:
    url = f"http://127.0.0.1:{find_free_port()}"
    command = [sys.executable, "-c", code]
    with pytest.raises(kind, match=message), run_server(command, url, tmp_path / "log", seconds):
        pass


def test_a_dry_run_sends_nothing(tmp_path: Path) -> None:
    with run_fake_server() as fake:
        plan = regauge.benchmark(
            fake.url, serve=True, dry_run=True, output__folder=str(tmp_path / "bench"), **SHORT
        )
        assert not fake.requests
    assert plan.document["server"] == fake.url
    assert plan.document["connections_x_texts"] == ["1 x 2", "4 x 2"]
    assert not (tmp_path / "bench").exists()


def test_a_run_file_names_the_server(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[output]\nfolder = "out"\n[server]\nurl = "https://host:1"\n')
    settings = benchmark.load_server(file, ("saturation.slo_ms=20.0",))
    assert settings.server.url == "https://host:1"
    assert settings.saturation.slo_ms == 20.0


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({}, "no server to benchmark"),
        ({"url": "host:1"}, "is not an address"),
        ({"url": "http://a", "artifact": "b"}, "url and artifact exclude"),
        ({"url": "http://a", "api_key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
    ],
)
def test_a_wrong_server_is_an_error(server: dict[str, str], message: str, tmp_path: Path) -> None:
    tables = {"output": {"folder": str(tmp_path / "bench")}, "server": server}
    with pytest.raises(SettingsError, match=message):
        serving.plan(build(ServingBenchmarkSettings, tables))


def test_two_flags_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="exclude each other"):
        regauge.benchmark("http://127.0.0.1:1", serve=True, training=True)


def test_a_folder_of_another_benchmark_is_an_error(tmp_path: Path) -> None:
    write_sealed(tmp_path / "benchmark.json", {"kind": "inference"})
    with pytest.raises(SettingsError, match="is not a server benchmark"):
        run_benchmark("http://127.0.0.1:1", tmp_path)


def test_texts_are_distinct_sentences_by_default() -> None:
    trace = read_trace(TraceSettings(count=2000))
    assert len(set(trace.texts)) == 2000
    assert min(map(len, trace.texts)) >= 20
    assert max(map(len, trace.texts)) <= 400
    assert trace.describe()["count"] == 2000


def test_texts_are_those_of_a_source(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "one"}\n{"id": 1}\n')
    settings = build(TraceSettings, {"source": {"kind": "jsonl", "files": [str(file)]}})
    assert read_trace(settings).texts == ("one", "two")
    file.write_text('{"id": 1}\n')
    with pytest.raises(DataError, match=r"trace\.source does not contain text"):
        read_trace(settings)


def test_phases_are_differences_of_counters() -> None:
    assert subtract_phases({"a": 3.0, "b": 1.0}, {"a": 2.0}) == {"a": 1.0, "b": 1.0}
