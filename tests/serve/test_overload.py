"""A real server at four times its rate: every request is answered or refused in time.

Rates and latencies are printed and not compared, because other work may use the processors.
`test_scheduler.py` proves the shares and the waits on a simulated clock.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from serve.chaos_backend import BATCH_VARIABLE, TOKEN_VARIABLE
from serve.load_client import Answer, LoadClient, LoadOptions
from serve.servers import (
    LENGTHS,
    ServerProcess,
    copy_with_chaos,
    draw_texts,
    encoder,
    install_chaos,
    read_resources,
    start_server,
    wait_for,
)

__all__ = ["encoder"]

NUM_RECORDS = 8
TIMEOUT_SECONDS = 10.0
Figure = Callable[[str, float], None]


@pytest.fixture(scope="module")
def server(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a server whose batches take time without using a processor."""
    folder = tmp_path_factory.mktemp("server")
    variables = install_chaos(folder) | {BATCH_VARIABLE: "30", TOKEN_VARIABLE: "0.1"}
    artifact = copy_with_chaos(encoder, folder / "model")
    option = f"serve.queue.timeout_seconds={TIMEOUT_SECONDS}"
    with start_server(folder, str(artifact), option, environment=variables) as running:
        yield running


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, list[str]]]:
    return [{"inputs": draw_texts(NUM_RECORDS, seed)} for seed in range(20)]


def send_load(
    server: ServerProcess, bodies: list[dict[str, list[str]]], **options: float
) -> list[Answer]:
    return LoadClient(LoadOptions(f"{server.address}/embed", bodies, **options)).finish()  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [10.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_four_times_the_load_is_answered_or_refused(
    server: ServerProcess, bodies: list[dict[str, list[str]]], figure: Figure, seconds: float
) -> None:
    closed = send_load(server, bodies, seconds=4.0, concurrency=24)
    assert {answer.status for answer in closed} <= {200, 429}
    sustainable = sum(answer.status == 200 for answer in closed) / 4.0
    before = read_resources(server.process.pid)
    options = LoadOptions(f"{server.address}/embed", bodies, seconds=seconds, rate=4 * sustainable)
    client = LoadClient(options)
    wait_for(lambda: server.get("/health").json()["status"] == "overloaded", seconds)
    assert server.get("/health").status_code == 200
    answers = client.finish()
    counts = Counter(answer.status for answer in answers)
    assert set(counts) == {200, 429}, counts
    assert len(answers) == round(4 * sustainable * seconds)
    accepted = [answer for answer in answers if answer.status == 200]
    assert all(answer.has_retry_after for answer in answers if answer.status == 429)
    assert max(answer.seconds for answer in accepted) <= TIMEOUT_SECONDS + 1
    goodput = sum(item.sent_at + item.seconds <= seconds for item in accepted) / seconds
    figure("requests per second, sustainable", sustainable)
    figure("requests per second, goodput at 4 times the load", goodput)
    figure("seconds of an accepted request, p99", percentile(accepted))
    wait_for(lambda: server.get("/health").json()["status"] == "ready")
    after = read_resources(server.process.pid)
    assert after[0] - before[0] < 50
    assert after[1] == before[1]
    assert server.health()["waiting_records"] == 0
    assert "Traceback" not in server.log


def test_an_idle_server_answers_as_many_texts_as_it_announces(server: ServerProcess) -> None:
    text = " ".join(["w5"] * (LENGTHS[-1] - 1))
    count = server.get("/info").json()["max_client_batch_size"]
    refused = server.post("/embed", {"inputs": [text] * 2048})
    assert refused.status_code == 413
    fitting = int(re.findall(r"send at most (\d+) of these records", refused.json()["error"])[0])
    assert 8 < count <= fitting < 2048
    wait_for(lambda: server.health()["waiting_records"] == 0)
    assert server.embed([text] * count).shape[0] == count
    message = server.post("/v1/embeddings", {"input": [text] * 2048})
    assert (message.status_code, message.json()["error"]["code"]) == (400, "too_large")


def percentile(answers: list[Answer]) -> float:
    return float(np.percentile([answer.seconds for answer in answers], 99))


def test_an_interactive_client_beside_bulk_clients(server: ServerProcess, figure: Figure) -> None:
    url = f"{server.address}/embed"
    short = LoadOptions(url, [{"inputs": "w5 w6"}], seconds=3.0, concurrency=1, pause_seconds=0.02)
    alone = LoadClient(short).finish()
    bulk_body = {"inputs": draw_texts(100, 1)}
    bulk = LoadClient(LoadOptions(url, [bulk_body], seconds=5.0, concurrency=4))
    wait_for(lambda: server.health()["waiting_records"] > 100)
    beside = LoadClient(short).finish()
    bulk_answers = bulk.finish()
    for answers in (alone, beside, bulk_answers):
        assert {answer.status for answer in answers} <= {200, 429}
        assert sum(answer.status == 200 for answer in answers) > 0
    assert {answer.status for answer in (*alone, *beside)} == {200}
    figure("seconds of an interactive request alone, p99", percentile(alone))
    figure("seconds of an interactive request beside bulk, p99", percentile(beside))
