"""Every length and every mix of requests gets the outputs that the artifact computes alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from regauge.inference.export.model import LoadedModel
from serve.live_server import BUCKETS, LIMIT, LiveServer

LoadModel = Callable[[str], LoadedModel]
SPECIAL_TOKENS = 2
LENGTHS = sorted({length + step for length in (3, *BUCKETS) for step in (-1, 0, 1)})
NUM_REQUESTS, CONCURRENCY = 150, 50
WORDS = [*"abcdefgh0123456"]


def make_text(num_tokens: int) -> str:
    """Return a text with a number of tokens, special tokens included; a digit is a token."""
    return " ".join(str(index % 10) for index in range(num_tokens - SPECIAL_TOKENS))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_is_right_or_refused(
    http: httpx.Client, load_model: LoadModel, length: int
) -> None:
    text = make_text(length)
    [tokens] = http.post("/tokenize", json={"inputs": text}).json()
    assert len(tokens) == length
    ids = [token["id"] for token in tokens]
    for inputs in (text, ids, [ids, ids]):
        answer = http.post("/embed", json={"inputs": inputs})
        if length > LIMIT:
            assert answer.status_code == 413
            assert "longer than the 48 tokens" in answer.json()["error"]
        else:
            assert answer.status_code == 200
            expected = load_model("encoder").encode(text)
            np.testing.assert_allclose(answer.json()[0], expected, atol=1e-5)
    truncated = http.post("/embed", json={"inputs": text, "truncate": True})
    assert truncated.status_code == 200
    assert truncated.headers.get("regauge-truncated-records", "0") == str(int(length > LIMIT))
    np.testing.assert_allclose(truncated.json(), load_model("encoder").encode([text]), atol=1e-5)


def make_bodies(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return requests for a model with texts of all lengths."""
    draw = np.random.default_rng(5)
    bodies: list[tuple[str, dict[str, Any]]] = []
    for _ in range(NUM_REQUESTS):
        count = int(draw.integers(1, 4))
        sizes = draw.integers(0, 40, count)
        texts = [" ".join(draw.choice(WORDS, size)) for size in sizes]
        if name == "encoder":
            bodies.append(("/embed", {"inputs": texts}))
        elif name == "reranker":
            bodies.append(("/rerank", {"query": "anna", "texts": texts, "model": name}))
        else:
            records = [[text] for text in texts]
            bodies.append(("/predict", {"inputs": records, "model": name}))
    return bodies


def collect_numbers(answer: Any) -> list[Any]:
    """Return the numbers of an answer in the order of their keys."""
    if isinstance(answer, dict):
        return [number for key in sorted(answer) for number in collect_numbers(answer[key])]
    if isinstance(answer, list):
        return [number for item in answer for number in collect_numbers(item)]
    return [answer] if isinstance(answer, int | float) else []


async def send_all(
    url: str, bodies: list[tuple[str, dict[str, Any]]], concurrency: int
) -> list[Any]:
    """Return the answers of requests, of which some are sent at once."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def send(path: str, body: dict[str, Any]) -> Any:
            async with gate:
                answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        return await asyncio.gather(*(send(path, body) for path, body in bodies))


@pytest.mark.parametrize("name", ["encoder", "classifier", "reranker", "tagger"])
def test_concurrent_requests_get_equal_answers(
    server: LiveServer, http: httpx.Client, name: str
) -> None:
    bodies = make_bodies(name)
    alone = asyncio.run(send_all(server.url, bodies, 1))
    together = asyncio.run(send_all(server.url, bodies, CONCURRENCY))
    is_invariant = http.get("/info", params={"model": name}).json()["batch_invariant"]
    if is_invariant:
        assert together == alone
    for first, second in zip(alone, together, strict=True):
        np.testing.assert_allclose(
            collect_numbers(first), collect_numbers(second), atol=1e-3, rtol=1e-3
        )
