"""Clients of a server: order, protocols, repetitions, errors and the number in flight."""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

import regauge
from fake_server import build_vector, run_fake_server
from regauge.serving.client.http_session import parse_retry_after, read_message
from regauge.serving.client.in_flight import (
    INITIAL_IN_FLIGHT,
    MAX_BACKOFF_SECONDS,
    InFlight,
    compute_wait,
)
from regauge.system.errors import DataError, RegaugeError, SettingsError, TransientError
from regauge.system.processes import find_free_port

TEXTS = [f"text {'x' * (index % 13)} {index}" for index in range(50)]


def count_paths(requests: list[dict[str, Any]], path: str) -> int:
    return sum(request["path"] == path for request in requests)


@pytest.mark.parametrize("uses_base64", [True, False])
def test_vectors_have_the_order_of_the_texts(uses_base64: bool) -> None:  # noqa: FBT001
    with run_fake_server(seconds=0.002, uses_base64=uses_base64) as fake:
        with regauge.Client(fake.url, texts_per_request=3) as client:
            vectors = client.encode(TEXTS)
            single = client.encode(TEXTS[0])
            empty = client.encode([])
        assert vectors.dtype == np.float32
        assert np.array_equal(vectors, np.stack([build_vector(text) for text in TEXTS]))
        assert np.array_equal(single, build_vector(TEXTS[0]))
        assert empty.shape == (0, 0)
        assert count_paths(fake.requests, "/v1/embeddings") == 17 + 1
        assert {len(request["body"]["input"]) for request in fake.requests} == {3, 2, 1}
        assert all(request["body"]["encoding_format"] == "base64" for request in fake.requests)


def test_scores_have_the_order_of_the_texts() -> None:
    with run_fake_server() as fake, regauge.Client(fake.url, texts_per_request=4) as client:
        scores = client.rerank("query", TEXTS)
        assert scores.tolist() == [len(text) for text in TEXTS]
        assert client.rerank("query", []).shape == (0,)
        assert all(request["body"]["query"] == "query" for request in fake.requests)


def test_classes_have_the_order_of_the_texts() -> None:
    with run_fake_server() as fake, regauge.Client(fake.url) as client:
        classes = client.predict(["a", "abcd"])
    assert classes[0] == [{"label": "short", "score": 1.0}, {"label": "long", "score": 0.0}]
    assert [row["label"] for row in classes[1]] == ["long", "short"]


def test_the_asynchronous_client_computes_the_same() -> None:
    async def encode(url: str) -> np.ndarray:
        async with regauge.AsyncClient(url) as client:
            return await client.encode(TEXTS)

    with run_fake_server() as fake:
        vectors = asyncio.run(encode(fake.url))
    assert np.array_equal(vectors, np.stack([build_vector(text) for text in TEXTS]))


def test_headers_have_the_key_the_priority_and_the_time_left() -> None:
    options: dict[str, Any] = {"api_key": "secret", "priority": "bulk", "timeout_seconds": 9.0}
    with run_fake_server() as fake, regauge.Client(fake.url, **options) as client:
        client.encode("text")
        headers = fake.requests[-1]["headers"]
    assert headers["authorization"] == "Bearer secret"
    assert headers["regauge-priority"] == "bulk"
    assert 8000 < int(headers["regauge-timeout-ms"]) <= 9000


@pytest.mark.parametrize("status", [0, 429, 502, 503])
def test_a_failure_that_may_pass_is_repeated(status: int) -> None:
    failures = [(status, {"error": "later"})] * 2
    with run_fake_server(failures=failures) as fake:
        with regauge.Client(fake.url, model="m", in_flight=1) as client:
            vectors = client.encode(TEXTS[:2])
        assert np.array_equal(vectors, np.stack([build_vector(text) for text in TEXTS[:2]]))
        assert count_paths(fake.requests, "/v1/embeddings") == 3


def test_the_time_of_retry_after_is_respected() -> None:
    with run_fake_server(failures=[(429, {})], retry_after="0.4") as fake:
        with regauge.Client(fake.url, model="m", in_flight=1) as client:
            client.encode("text")
        first, second = fake.times
    assert second - first >= 0.4


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (401, {"error": {"message": "no key"}}, SettingsError, "no key; set api_key"),
        (404, {"detail": "no such model"}, SettingsError, "no such model; correct the url"),
        (413, {"error": "batch too large"}, DataError, "batch too large; lower texts_per_request"),
        (422, {"detail": [{"msg": "not text"}]}, DataError, "not text"),
        (424, {"error": "inference failed"}, TransientError, "inference failed; see the log"),
        (500, "broken", TransientError, "broken"),
    ],
)
def test_an_error_has_its_kind_and_the_message_of_the_server(
    status: int, body: Any, kind: type[RegaugeError], message: str
) -> None:
    with run_fake_server(failures=[(status, body)]) as fake:
        client = regauge.Client(fake.url, model="m", in_flight=1)
        with client, pytest.raises(kind) as error:
            client.encode("text")
        assert message in str(error.value)
        assert f"answers {status}" in str(error.value)
        assert len(fake.requests) == 1, "it is not repeated"


def test_an_overload_is_an_error_at_the_end_of_the_timeout() -> None:
    with run_fake_server(failures=[(429, {"error": "full"})] * 1000) as fake:
        client = regauge.Client(fake.url, model="m", in_flight=1, timeout_seconds=0.5)
        with client, pytest.raises(TransientError, match="429: full; lower in_flight"):
            client.encode("text")
        assert 2 <= len(fake.requests) < 100


def test_a_slow_answer_is_an_error_and_cancels_the_other_requests() -> None:
    with run_fake_server(seconds=30.0) as fake:
        client = regauge.Client(fake.url, model="m", in_flight=4, timeout_seconds=0.3)
        start = time.monotonic()
        with client, pytest.raises(TransientError, match=r"did not answer within 0\.3 s"):
            client.encode(TEXTS)
        assert time.monotonic() - start < 5.0
        assert len(fake.requests) == 4


def test_an_unreachable_server_is_an_error_at_once() -> None:
    start = time.monotonic()
    url = f"http://127.0.0.1:{find_free_port()}"
    with regauge.Client(url) as client, pytest.raises(TransientError, match="is unreachable"):
        client.encode("text")
    assert time.monotonic() - start < 5.0


def test_several_models_need_a_name() -> None:
    with run_fake_server(models=("a", "b")) as fake:
        message = "has 2 models: a, b; set model"
        with regauge.Client(fake.url) as client, pytest.raises(SettingsError, match=message):
            client.encode("text")
        with regauge.Client(fake.url, model="b") as client:
            client.encode("text")
        assert fake.requests[-1]["body"]["model"] == "b"


def test_an_answer_of_another_form_is_an_error() -> None:
    with run_fake_server(failures=[(200, {"data": []}), (200, {"rows": 1})]) as fake:
        for _ in range(2):
            client = regauge.Client(fake.url, model="m", in_flight=1)
            with client, pytest.raises(DataError, match="answers in an unknown form"):
                client.encode("text")


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["a", 1], "text 1 is of type int"), (["\ud800"], "lone surrogate"), ([b"a"], "type bytes")],
)
def test_an_element_that_is_no_text_is_an_error(texts: Any, message: str) -> None:
    with run_fake_server() as fake, regauge.Client(fake.url) as client:
        with pytest.raises(DataError, match=message):
            client.encode(texts)
        assert not fake.requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:80"}, "invalid url"),
        ({"in_flight": 0}, "in_flight is 0"),
        ({"texts_per_request": 0}, "texts_per_request is 0"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"priority": "high"}, "unknown priority 'high'"),
    ],
)
def test_an_invalid_argument_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        regauge.Client(**{"url": "http://127.0.0.1:80", **options})


def test_a_closed_client_is_an_error() -> None:
    with run_fake_server() as fake:
        client = regauge.Client(fake.url)
        client.encode("text")
        client.close()
        client.close()
        with pytest.raises(SettingsError, match="is closed"):
            client.encode("text")


def test_a_forgotten_client_ends_its_thread() -> None:
    with run_fake_server() as fake:
        client = regauge.Client(fake.url)
        client.encode("text")
        del client
        gc.collect()
        assert "regauge client" not in {thread.name for thread in threading.enumerate()}


def test_a_fixed_number_is_in_flight() -> None:
    with run_fake_server(seconds=0.01) as fake:
        with regauge.Client(fake.url, in_flight=3, texts_per_request=1) as client:
            client.encode(TEXTS)
            assert client.in_flight == 3
        assert fake.max_active == 3


def test_the_hint_of_the_server_is_the_first_number_in_flight() -> None:
    with run_fake_server(seconds=0.05, info={"recommended_records_in_flight": 27}) as fake:
        with regauge.Client(fake.url, texts_per_request=4) as client:
            client.encode(TEXTS[:28])
            assert client.in_flight == 7
        assert fake.max_active == 7


def test_more_requests_are_in_flight_while_the_throughput_grows() -> None:
    with run_fake_server(seconds=0.02, capacity=16) as fake:
        with regauge.Client(fake.url, texts_per_request=1) as client:
            assert client.in_flight is None
            client.encode(TEXTS * 8)
            assert client.in_flight is not None
            assert 12 <= client.in_flight <= 40
        assert fake.max_active > INITIAL_IN_FLIGHT


def test_fewer_requests_are_in_flight_after_refusals() -> None:
    with run_fake_server(seconds=0.01, capacity=2, max_queue=2, retry_after="0.05") as fake:
        options: dict[str, Any] = {"texts_per_request": 1}
        with regauge.Client(fake.url, **options) as client:
            vectors = client.encode(TEXTS * 2)
            assert client.in_flight is not None
            assert client.in_flight <= 8
        expected = np.stack([build_vector(text) for text in TEXTS * 2])
        assert np.array_equal(vectors, expected), "refused texts are sent again"


def simulate(capacity: int, *, max_in_flight: int | None = None) -> InFlight:
    """Return the state after many answers of a server that computes `capacity` requests at once."""
    in_flight, now = InFlight(), 0.0
    for _ in range(300):
        limit = in_flight.limit
        if max_in_flight is not None and limit > max_in_flight:
            in_flight.record_refusal(now, now + 0.01)
        seconds = 0.01 * max(1.0, limit / capacity)
        now += seconds
        for _ in range(limit):
            in_flight.record_answer(8, seconds)
    return in_flight


@pytest.mark.parametrize("capacity", [4, 16, 64])
def test_the_number_in_flight_is_near_the_capacity(capacity: int) -> None:
    assert 0.9 * capacity <= simulate(capacity).limit <= 2.1 * capacity


def test_refusals_bound_the_number_in_flight() -> None:
    assert 5 <= simulate(64, max_in_flight=10).limit <= 11


def test_requests_that_were_refused_together_lower_the_number_once() -> None:
    in_flight = InFlight(20)
    for index in range(20):
        in_flight.record_refusal(1.0, 1.1 + index / 100)
    assert in_flight.limit == 14
    in_flight.record_refusal(2.0, 2.1)
    assert in_flight.limit == 9


def test_a_wait_is_exponential_with_jitter() -> None:
    assert [compute_wait(attempt, None, lambda: 1.0) for attempt in range(3)] == [0.1, 0.2, 0.4]
    assert compute_wait(50, None, lambda: 1.0) == MAX_BACKOFF_SECONDS
    assert compute_wait(3, None, lambda: 0.0) == 0.0
    assert compute_wait(0, 2.0, lambda: 0.5) == pytest.approx(2.05)


def test_retry_after_is_a_number_or_a_date() -> None:
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert parse_retry_after("1.5", now) == 1.5
    assert parse_retry_after("-1", now) == 0.0
    assert parse_retry_after("Thu, 01 Jan 2026 00:00:30 GMT", now) == 30.0
    assert parse_retry_after("Wed, 31 Dec 2025 00:00:00 GMT", now) == 0.0
    assert parse_retry_after("soon", now) is None
    assert parse_retry_after(None, now) is None


def test_a_message_without_json_is_plain_text() -> None:
    assert read_message(500, b"<b>a\n b</b>") == "<b>a b</b>"
    assert read_message(429, b"") == "Too Many Requests"
    assert read_message(599, b"") == "no message"
    assert read_message(400, b"[1]") == "[1]"
