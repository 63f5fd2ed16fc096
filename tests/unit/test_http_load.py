"""Load on a server over HTTP: arrivals, percentiles, goodput, statuses, saturation search."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_server import TEXT_EVENTS, run_fake_server
from regauge.evaluation.benchmark import serving_summary, summary
from regauge.evaluation.benchmark.http_load import (
    HttpLoad,
    HttpTarget,
    LoadResult,
    detect_target,
    merge_results,
)
from regauge.evaluation.benchmark.load_generator import draw_arrivals, draw_bursts, search_rate
from regauge.evaluation.benchmark.load_processes import LoadProcesses
from regauge.evaluation.benchmark.serving_settings import SaturationSettings
from regauge.system.errors import ChildError, InconclusiveError, SettingsError

TEXTS = [f"text {index}" for index in range(20)]


def run_closed(target: HttpTarget, *arguments: Any) -> LoadResult:
    async def run() -> LoadResult:
        async with HttpLoad(target, TEXTS) as load:
            return await load.run_closed(*arguments)

    return asyncio.run(run())


def run_open(target: HttpTarget, *arguments: Any) -> LoadResult:
    async def run() -> LoadResult:
        async with HttpLoad(target, TEXTS) as load:
            return await load.run_open(*arguments)

    return asyncio.run(run())


def build_result(latencies: list[float | None], seconds: float = 1.0, **changes: Any) -> LoadResult:
    answered = sum(latency is not None for latency in latencies)
    statuses = {"200": answered, "429": len(latencies) - answered}
    return LoadResult(latencies, statuses, seconds, [], [0.1])._replace(**changes)


def test_every_connection_of_a_closed_loop_sends_a_request() -> None:
    with run_fake_server() as fake:
        result = run_closed(HttpTarget(fake.url, "openai"), 3, 1, 0.0)
    assert result.statuses == {"200": 3}
    assert result.seconds > 0


def test_a_closed_loop_keeps_its_connections_busy() -> None:
    with run_fake_server(seconds=0.05) as fake:
        result = run_closed(HttpTarget(fake.url, "openai"), 4, 2, 0.5)
        assert fake.max_active == 4
        assert result.statuses == {"200": len(fake.requests)}
        assert all(len(request["body"]["input"]) == 2 for request in fake.requests)
    assert 12 <= len(result.latencies_ms) <= 44
    assert all(latency is not None and latency >= 50.0 for latency in result.latencies_ms)


def test_an_open_loop_sends_a_request_at_each_arrival() -> None:
    arrivals = [0.0, 0.1, 0.1, 0.3]
    with run_fake_server(min_active=len(arrivals)) as fake:
        begin = time.monotonic()
        result = run_open(HttpTarget(fake.url, "tei"), arrivals, 3, 0.4)
        assert fake.requests[0]["body"]["inputs"] == TEXTS[:3]
        assert {request["path"] for request in fake.requests} == {"/embed"}
    assert fake.max_active == len(arrivals), "no request waits for an answer"
    times = [moment - begin for moment in sorted(fake.times)]
    assert all(moment >= arrival for moment, arrival in zip(times, arrivals, strict=True))
    assert len(result.latencies_ms) == len(result.send_delays_ms) == result.statuses["200"] == 4
    assert result.seconds >= 0.4


def test_latency_counts_from_the_arrival() -> None:
    """The server computes one request at a time, so each one waits for all before it."""
    with run_fake_server(seconds=0.05, capacity=1) as fake:
        result = run_open(HttpTarget(fake.url, "openai"), [0.0] * 6, 1, 0.1)
    latencies = sorted(latency for latency in result.latencies_ms if latency is not None)
    assert all(latency >= 50.0 * (index + 1) for index, latency in enumerate(latencies))


def test_refusals_and_lost_requests_are_counted_by_status() -> None:
    failures = [(429, {}), (503, {}), (0, {})]
    with run_fake_server(failures=failures) as fake:
        target = HttpTarget(fake.url, "openai")
        result = run_open(target, [0.0, 0.05, 0.1, 0.15], 1, 0.2)
    assert result.statuses == {"429": 1, "503": 1, "connection": 1, "200": 1}
    assert result.latencies_ms.count(None) == 3


TOKENS, USAGE = TEXT_EVENTS[:-2], TEXT_EVENTS[-2]


def test_the_latency_of_a_text_is_that_of_its_first_token() -> None:
    """An event comes each 50 ms: the first text after 100 ms, then three tokens and the count."""
    with run_fake_server(seconds=0.05, texts=(TEXT_EVENTS,)) as fake:
        result = run_open(HttpTarget(fake.url, "completions", max_tokens=9), [0.0], 1, 0.1)
        body = fake.requests[0]["body"]
    assert (body["prompt"], body["max_tokens"], body["stream"]) == (["text 0"], 9, True)
    assert result.statuses == {"200": 1}
    assert result.num_tokens == 4
    [latency] = result.latencies_ms
    assert latency is not None
    total = 1e3 * result.seconds
    assert result.token_ms == [pytest.approx((total - latency) / 3, abs=0.1)]
    assert 100.0 <= latency <= total - 5 * 50.0
    assert serving_summary.summarize_tokens(result)["tokens_per_second"] == 4 / result.seconds


def test_the_space_of_an_event_is_optional() -> None:
    """As in text-generation-inference, and in the definition of server-sent events."""
    with run_fake_server(texts=(TEXT_EVENTS,), event="data:") as fake:
        result = run_closed(HttpTarget(fake.url, "completions"), 1, 1, 0.0)
    assert (result.statuses, result.num_tokens) == ({"200": 1}, 4)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((*TOKENS, '{"error":{"message":"lost"}}'), "stream error"),
        ((*TOKENS, USAGE), "connection"),
    ],
)
def test_a_stream_without_its_end_is_no_answer(events: tuple[str, ...], status: str) -> None:
    with run_fake_server(texts=(events,)) as fake:
        result = run_closed(HttpTarget(fake.url, "completions"), 1, 1, 0.0)
    assert result.statuses == {status: 1}
    assert result.latencies_ms == [None]
    assert result.num_tokens == 0


def test_a_slow_answer_is_a_timeout() -> None:
    with run_fake_server(seconds=30.0) as fake:
        result = run_open(HttpTarget(fake.url, "openai", timeout_seconds=0.2), [0.0], 1, 0.1)
    assert result.statuses == {"timeout": 1}


def test_a_connection_pauses_after_a_refusal() -> None:
    with run_fake_server(failures=[(429, {})] * 1000, retry_after="0.1") as fake:
        result = run_closed(HttpTarget(fake.url, "openai"), 1, 1, 0.45)
    assert 2 <= result.statuses["429"] <= 5


def test_a_server_of_text_is_detected() -> None:
    with run_fake_server(failures=[(404, {})] * 2, texts=(TEXT_EVENTS,)) as fake:
        assert asyncio.run(detect_target(HttpTarget(fake.url, "auto"))).generates_text


@pytest.mark.parametrize(("protocol", "detected"), [("auto", "openai"), ("tei", "tei")])
def test_the_protocol_and_the_model_are_detected(protocol: str, detected: str) -> None:
    with run_fake_server(models=("large", "small")) as fake:
        target = asyncio.run(detect_target(HttpTarget(fake.url, protocol)))
        assert (target.protocol, target.model) == (detected, "large")
        named = asyncio.run(detect_target(HttpTarget(fake.url, protocol, "small")))
        assert named.model == "small"


def test_a_server_without_a_known_route_is_an_error() -> None:
    failures = [(404, {"error": "no route"}), (500, {"error": "broken"})]
    with run_fake_server(failures=failures) as fake, pytest.raises(SettingsError) as error:
        asyncio.run(detect_target(HttpTarget(fake.url, "auto")))
    assert '/v1/embeddings 404 {"error":"no route"}' in str(error.value)
    assert '/embed 500 {"error":"broken"}' in str(error.value)
    assert '/v1/completions 404 {"error":"no route"}' in str(error.value)


def test_a_key_is_sent_and_not_printed() -> None:
    with run_fake_server() as fake:
        target = HttpTarget(fake.url, "openai", api_key="secret")
        run_open(target, [0.0], 1, 0.1)
        assert fake.requests[0]["headers"]["authorization"] == "Bearer secret"
    assert "secret" not in repr(target)


def test_processes_share_a_load(tmp_path: Path) -> None:
    arrivals = np.linspace(0.0, 0.5, 21)
    with run_fake_server(seconds=0.01) as fake:
        target = HttpTarget(fake.url, "openai")
        with LoadProcesses(target, TEXTS, tmp_path, 2) as load:
            open_result = load.run_open(arrivals, 1, 0.5)
            assert len(fake.requests) == 21
            closed_result = load.run_closed(3, 1, 0.3)
            assert fake.max_active >= 3
            single = load.run_closed(1, 1, 0.1)
    assert open_result.statuses == {"200": 21}
    assert len(open_result.processor_shares) == len(closed_result.processor_shares) == 2
    assert len(single.processor_shares) == 1


@pytest.mark.full
def test_the_end_of_a_process_is_an_error(tmp_path: Path) -> None:
    load = LoadProcesses(HttpTarget("http://127.0.0.1:9", "other"), TEXTS, tmp_path)
    with load, pytest.raises(ChildError, match="the load generator ended"):
        load.run_closed(1, 1, 0.1)


@pytest.mark.full
def test_a_process_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    load = LoadProcesses(HttpTarget("http://127.0.0.1:9", "openai"), TEXTS, tmp_path)
    (tmp_path / "texts.json").unlink()
    with pytest.raises(ChildError, match="the load generator ended"), load:
        pass


def test_results_of_processes_are_merged() -> None:
    first = build_result([1.0, None], 2.0, send_delays_ms=[0.1])
    second = build_result([3.0], 1.0, send_delays_ms=[0.2], processor_shares=[0.5])
    merged = merge_results([first, second])
    assert merged.latencies_ms == [1.0, None, 3.0]
    assert merged.statuses == {"200": 2, "429": 1}
    assert merged.seconds == 2.0
    assert merged.send_delays_ms == [0.1, 0.2]
    assert merged.processor_shares == [0.1, 0.5]


def test_bursts_have_the_rate_of_single_arrivals() -> None:
    bursts = draw_bursts(100.0, 10, 100.0, 3)
    moments, counts = np.unique(bursts, return_counts=True)
    assert (counts == 10).all()
    assert len(bursts) == pytest.approx(10_000, rel=0.1)
    assert np.array_equal(moments, draw_arrivals(10.0, 100.0, 3))


def test_figures_of_a_load_are_those_computed_by_hand() -> None:
    latencies: list[float | None] = [float(value) for value in range(1, 199)]
    figures = serving_summary.summarize_load(build_result([*latencies, None, None], 4.0), 8, 100.0)
    assert figures["num_requests"] == 200
    assert figures["requests_per_second"] == 198 / 4
    assert figures["texts_per_second"] == 8 * 198 / 4
    assert (figures["p50_ms"], figures["p90_ms"], figures["p99_ms"]) == (100.0, 180.0, 198.0)
    assert figures["goodput_requests_per_second"] == 100 / 4
    assert figures["goodput_fraction"] == 0.5
    assert figures["dropped_fraction"] == pytest.approx(0.01)
    assert figures["max_ms"] == 198.0


def test_a_lost_request_is_infinitely_late() -> None:
    figures = serving_summary.summarize_load(build_result([1.0] * 97 + [None] * 3), 1, 100.0)
    assert figures["p95_ms"] == 1.0
    assert figures["p99_ms"] is None


def test_a_load_without_requests_has_unknown_figures() -> None:
    figures = serving_summary.summarize_load(build_result([]), 1, 100.0)
    assert figures["p50_ms"] is figures["goodput_fraction"] is figures["dropped_fraction"] is None
    assert not serving_summary.meets_objective(figures, SaturationSettings())


@pytest.mark.parametrize(
    ("changes", "kept_up"),
    [
        ({}, True),
        ({"processor_shares": [0.1, 0.95]}, False),
        ({"send_delays_ms": [1.5] * 200}, True),
        ({"send_delays_ms": [30.0] * 200}, False),
        ({"send_delays_ms": [0.1] * 199 + [30.0]}, True),
    ],
)
def test_a_generator_that_is_too_slow_is_reported(changes: Any, kept_up: bool) -> None:  # noqa: FBT001
    result = build_result([100.0] * 200, **changes)
    assert serving_summary.describe_generator(result)["kept_up"] is kept_up


@pytest.mark.parametrize(
    ("latencies", "is_met"),
    [
        ([50.0] * 200, True),
        ([50.0] * 197 + [150.0] * 3, False),
        ([50.0] * 199 + [150.0], True),
        ([50.0] * 199 + [None], False),
        ([50.0] * 10, True),
        ([50.0] * 9 + [150.0], False),
    ],
)
def test_an_objective_is_met_without_losses(latencies: Any, is_met: bool) -> None:  # noqa: FBT001
    figures = serving_summary.summarize_load(build_result(latencies), 1, 100.0)
    assert serving_summary.meets_objective(figures, SaturationSettings()) is is_met


@pytest.mark.parametrize("start", [1.0, 90.0, 128.0, 3000.0])
def test_the_search_ends_just_below_the_capacity(start: float) -> None:
    rates: list[float] = []

    def meets(rate: float) -> bool:
        rates.append(rate)
        return rate <= 100.0

    rate = search_rate(meets, start, precision=0.05, max_trials=30)
    assert rate is not None
    assert 95.0 <= rate <= 100.0
    assert len(rates) <= 14
    assert len(set(rates)) == len(rates)


def test_the_search_without_success_is_unknown() -> None:
    assert search_rate(lambda _: False, 10.0, precision=0.1, max_trials=5) is None


def test_the_search_ends_after_its_trials() -> None:
    rates: list[float] = []
    rate = search_rate(lambda rate: rates.append(rate) is None, 1.0, precision=0.1, max_trials=4)
    assert rates == [1.0, 2.0, 4.0, 8.0]
    assert rate == 8.0


def build_document(p99: float, texts: float, rate: float | None = 50.0) -> dict[str, Any]:
    closed = {"concurrency": 8, "texts_per_request": 1, "p99_ms": p99, "texts_per_second": texts}
    opened = {"arrivals": "poisson", "load_fraction": 0.5, "rate": 25.0, "p99_ms": p99 / 2}
    saturation = None if rate is None else {"requests_per_second": rate}
    return {"closed_loop": [closed], "open_loop": [opened], "saturation": saturation}


def test_worse_figures_are_regressions() -> None:
    before = build_document(100.0, 200.0)
    rows = serving_summary.find_regressions(build_document(130.0, 150.0, 45.0), before, 0.2)
    worse = {(row["load"], row["figure"]) for row in rows if row["is_regression"]}
    assert len(rows) == 4
    assert worse == {("8 x 1", "p99_ms"), ("8 x 1", "texts_per_second"), ("poisson 50%", "p99_ms")}
    [latency] = [row for row in rows if row["figure"] == "p99_ms" and row["load"] == "8 x 1"]
    assert latency["change"] == pytest.approx(0.3)


def test_better_figures_and_permitted_changes_are_no_regressions() -> None:
    before = build_document(100.0, 200.0)
    for document in (build_document(50.0, 400.0, 90.0), build_document(119.0, 161.0, 41.0)):
        rows = serving_summary.find_regressions(document, before, 0.2)
        assert not any(row["is_regression"] for row in rows)


def test_a_baseline_without_equal_loads_is_inconclusive() -> None:
    before = build_document(100.0, 200.0, None)
    before["closed_loop"][0]["concurrency"] = 9
    before["open_loop"] = []
    with pytest.raises(InconclusiveError, match="does not share a load"):
        serving_summary.find_regressions(build_document(1.0, 1.0, None), before, 0.2)


def test_dollars_follow_from_the_price() -> None:
    assert summary.compute_usd_per_million(3.6, 1000.0) == pytest.approx(1.0)
    assert summary.compute_usd_per_million(None, 1000.0) is None
    assert summary.compute_usd_per_million(1.0, 0.0) is None
