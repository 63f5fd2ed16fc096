"""The Python client of OpenAI gets the vectors of texts and of tokens, and its own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from loopback import Answer, Request, answer_requests
from regauge.inference.export.model import LoadedModel
from serve.live_server import LiveServer, start_server

TEXTS = ["anna lives in oslo", "a", "the café costs 7, or less"]


def connect(url: str, **options: object) -> OpenAI:
    """Return a client of a server."""
    keys = {"api_key": "any", "max_retries": 0, **options}
    return OpenAI(base_url=f"{url}/v1", **keys)  # type: ignore[arg-type]


@pytest.fixture
def client(server: LiveServer) -> Iterator[OpenAI]:
    with connect(server.url) as connected:
        yield connected


def test_base64_and_float_are_the_vectors_of_the_artifact(
    client: OpenAI, load_model: Callable[[str], LoadedModel]
) -> None:
    default = client.embeddings.create(model="encoder", input=TEXTS)  # base64
    numbers = client.embeddings.create(model="encoder", input=TEXTS, encoding_format="float")
    vectors = np.array([item.embedding for item in default.data], np.float32)
    assert np.array_equal(vectors, np.array([item.embedding for item in numbers.data], np.float32))
    np.testing.assert_allclose(vectors, load_model("encoder").encode(TEXTS), atol=1e-5)
    assert [item.index for item in default.data] == [0, 1, 2]
    assert default.model == "encoder"
    assert default.usage.total_tokens == default.usage.prompt_tokens > len(TEXTS)
    single = client.embeddings.create(model="encoder", input=TEXTS[0])
    np.testing.assert_allclose(single.data[0].embedding, vectors[0], atol=1e-6)


def test_dimensions_shorten_and_normalize(client: OpenAI) -> None:
    whole = client.embeddings.create(model="encoder", input=TEXTS).data[0].embedding
    short = client.embeddings.create(model="encoder", input=TEXTS, dimensions=8).data[0].embedding
    expected = np.array(whole[:8]) / np.linalg.norm(whole[:8])
    np.testing.assert_allclose(short, expected, atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="over the 32 numbers"):
        client.embeddings.create(model="encoder", input=TEXTS, dimensions=33)


@pytest.mark.parametrize("adds_special_tokens", [True, False])
def test_tokens_have_the_vectors_of_their_texts(
    client: OpenAI, http: httpx.Client, *, adds_special_tokens: bool
) -> None:
    options = {"inputs": TEXTS, "add_special_tokens": adds_special_tokens}
    rows = http.post("/tokenize", json=options).json()
    lists = [[token["id"] for token in row] for row in rows]
    expected = client.embeddings.create(model="encoder", input=TEXTS).data
    several = client.embeddings.create(model="encoder", input=lists).data
    single = client.embeddings.create(model="encoder", input=lists[0]).data
    for given, item in zip([*several, *single], [*expected, expected[0]], strict=True):
        np.testing.assert_allclose(given.embedding, item.embedding, atol=1e-6)


def test_models_are_listed(client: OpenAI, server: LiveServer) -> None:
    assert [model.id for model in client.models.list()] == list(server.artifacts)
    assert client.models.retrieve("classifier").id == "classifier"
    with pytest.raises(openai.NotFoundError, match="no model is called 'missing'"):
        client.models.retrieve("missing")


def test_errors_have_the_classes_of_openai(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model is called 'missing'"):
        client.embeddings.create(model="missing", input="a")
    with pytest.raises(openai.BadRequestError, match="input is empty"):
        client.embeddings.create(model="encoder", input=[])
    with pytest.raises(openai.BadRequestError, match="the model returns classes"):
        client.embeddings.create(model="classifier", input="a")
    with pytest.raises(openai.BadRequestError, match="token 99999 is over"):
        client.embeddings.create(model="encoder", input=[99999])
    with pytest.raises(openai.BadRequestError, match="longer than the 48 tokens") as caught:
        client.embeddings.create(model="encoder", input="word " * 60)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="2049 records are over") as caught:
        client.embeddings.create(model="encoder", input=["a"] * 2049)
    assert caught.value.code == "too_large"


def test_a_wrong_key_is_an_authentication_error(
    tiny_artifacts: Mapping[str, Path], tmp_path: Path
) -> None:
    artifacts = {"encoder": tiny_artifacts["encoder"]}
    keys = {"REGAUGE_API_KEYS": "right,other"}
    with start_server(artifacts, tmp_path, keys) as running:
        for key in ("right", "other"):
            with connect(running.url, api_key=key) as client:
                assert client.embeddings.create(model="encoder", input="a").data
        with (
            connect(running.url, api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError, match="a valid API key is required"),
        ):
            client.embeddings.create(model="encoder", input="a")
        assert httpx.get(f"{running.url}/v2/health/ready").status_code == 200
        assert httpx.get(f"{running.url}/v2/models/encoder").status_code == 401


def test_a_client_retries_when_the_queue_is_full(server: LiveServer) -> None:
    """The first answers are those of a full queue, which a proxy gives with its Retry-After."""
    statuses: list[int] = []

    def forward(request: Request) -> Answer:
        headers = {"Regauge-Timeout-Ms": "0.0001"} if len(statuses) < 2 else {}
        url = f"{server.url}{request.path}"
        answer = httpx.post(url, content=request.body, headers=headers)
        statuses.append(answer.status_code)
        names = {"Content-Type", "Retry-After"} & {*map(str.title, answer.headers)}
        return answer.status_code, answer.content, {name: answer.headers[name] for name in names}

    with answer_requests(forward, "proxy") as url, connect(url, max_retries=3) as client:
        assert client.embeddings.create(model="encoder", input=TEXTS).data
    assert statuses == [429, 429, 200]
