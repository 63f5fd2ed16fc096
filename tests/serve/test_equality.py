"""The server's vectors equal those of `predict`, in any company and after any history."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import regauge
from serve.servers import LENGTHS, PATIENT, ServerProcess, draw_texts, encoder, start_server

__all__ = ["encoder"]

NUM_CLIENTS = 64
NUM_REPEATS = 5


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return texts of all lengths, with those at the edges of every bucket."""
    edges = [
        " ".join(f"w{5 + (index + count) % 200}" for index in range(count))
        for length in LENGTHS
        for count in (length - 3, length - 2, length - 1)
        if count <= LENGTHS[-1] - 2
    ]
    return [*edges, *draw_texts(NUM_CLIENTS - len(edges), 11)]


@pytest.fixture(scope="module", params=[True, False], ids=["invariant", "not invariant"])
def server(
    request: pytest.FixtureRequest, encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, bool]]:
    option = f"serve.batch_invariant={str(request.param).lower()}"
    with start_server(tmp_path_factory.mktemp("server"), str(encoder), option, PATIENT) as running:
        yield running, request.param


def check_equal(actual: np.ndarray, expected: np.ndarray, *, is_invariant: bool) -> None:
    if is_invariant:
        assert actual.tobytes() == expected.tobytes()
    else:
        assert np.allclose(actual, expected, atol=1e-3)


def test_vectors_are_those_of_predict_under_concurrent_clients(
    server: tuple[ServerProcess, bool], encoder: Path, texts: list[str]
) -> None:
    """64 clients send one text and the rest in other orders, five times."""
    running, is_invariant = server
    model = regauge.load(encoder, threads=1, batch_invariant=is_invariant)
    expected = np.asarray(model.encode(texts), np.float32)

    def send(number: int) -> None:
        draw = np.random.default_rng(number)
        with httpx.Client(base_url=running.address, timeout=300) as client:
            for _ in range(NUM_REPEATS):
                order = draw.permutation(len(texts))[: int(draw.integers(1, 12))]
                order = np.array([number, *order])
                body = {"inputs": [texts[index] for index in order]}
                response = client.post("/embed", json=body)
                assert response.status_code == 200, response.text
                actual = np.array(response.json(), np.float32)
                check_equal(actual, expected[order], is_invariant=is_invariant)

    with ThreadPoolExecutor(NUM_CLIENTS) as executor:
        list(executor.map(send, range(NUM_CLIENTS)))
    assert "regauge_serve_batch_records_count" in running.get("/metrics").text


def test_a_vector_does_not_depend_on_what_was_computed_before(
    server: tuple[ServerProcess, bool], texts: list[str]
) -> None:
    running, is_invariant = server
    ordered = sorted(texts, key=len)
    short, long = ordered[0], ordered[-1]
    first = [running.embed(short), running.embed(long)]
    for batch in ([long] * 9, [short] * 30, texts, [short, long]):
        running.embed(batch)
        check_equal(running.embed(short), first[0], is_invariant=is_invariant)
        check_equal(running.embed(long), first[1], is_invariant=is_invariant)
    both = running.embed([short, long, short, long])
    check_equal(both, np.concatenate(first * 2), is_invariant=is_invariant)


def test_all_encodings_have_the_same_numbers(
    server: tuple[ServerProcess, bool], texts: list[str]
) -> None:
    import base64

    running, is_invariant = server
    numbers = running.post("/v1/embeddings", {"input": texts}).json()["data"]
    body = {"input": texts, "encoding_format": "base64"}
    encoded = running.post("/v1/embeddings", body).json()["data"]
    actual = np.array([item["embedding"] for item in numbers], np.float32)
    decoded = np.array(
        [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in encoded]
    )
    check_equal(actual, decoded, is_invariant=is_invariant)
    check_equal(running.embed(texts), decoded, is_invariant=is_invariant)
    assert np.allclose(np.linalg.norm(decoded, axis=1), 1, atol=1e-3)


def test_only_the_workers_of_a_run_load_torch(
    encoder: Path, texts: list[str], tmp_path: Path
) -> None:
    """A run is compiled by no export, so that the server does not read a manifest."""
    run = encoder.parent / "run"
    with start_server(tmp_path, str(run)) as server:
        answer = server.post("/embed", {"inputs": texts[:8]})
        server_maps, worker_maps = (
            Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, *server.workers)
        )
    assert "libtorch" in worker_maps
    assert "libtorch" not in server_maps
    expected = regauge.load(run, threads=1).encode(texts[:8])
    assert np.allclose(answer.json(), expected, atol=1e-5)
