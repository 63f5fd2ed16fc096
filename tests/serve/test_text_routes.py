"""OpenAI's routes for text with its own client: a server, its worker process and its failures."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os import kill
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from regauge.data.tokenizer import LoadedTokenizer
from regauge.inference.export.model import load
from regauge.inference.export.uncompiled import open_model
from regauge.models.settings import Generation
from regauge.serving.text_generation.settings import TextServing
from serve import reference
from serve.servers import wait_for
from serve.text_server import MODEL_NAME, OneModel, serve
from serve.writers import MAX_TOKENS, write_model

SERVING = TextServing(engine="transformers", max_running_requests=8, max_queued_requests=24)
MESSAGES: list[Any] = [
    {"role": "system", "content": "Short"},
    {"role": "user", "content": "Colors"},
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("writer"), "mistral")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, OneModel]]:
    with serve(folder, SERVING) as running:
        yield running


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder, threads=1, batch_invariant=False)


@pytest.fixture
def client(server: tuple[str, OneModel]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
def post(server: tuple[str, OneModel]) -> Iterator[Callable[..., httpx.Response]]:
    """Return a function that posts a body to a route."""
    with httpx.Client(base_url=server[0], timeout=60) as connected:

        def send(route: str, body: Any, **headers: str) -> httpx.Response:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return connected.post(f"/v1/{route}", content=content, headers=headers)

        yield send


@pytest.fixture(scope="module")
def continue_text(folder: Path) -> Callable[..., str]:
    """Return a function that continues a text as `regauge generate` does."""
    tokenizer = LoadedTokenizer(folder)

    def generate(text: str, **options: Any) -> str:
        [prompt] = tokenizer.encode([text])
        artifact = open_model(str(folder), threads=1)
        [tokens] = reference.generate(artifact, [prompt], Generation(**options))
        return tokenizer.decode(tokens)

    return generate


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}],
    ids=["greedy", "drawn"],
)
def test_completions_equal_those_of_generate(
    client: openai.OpenAI, continue_text: Callable[..., str], options: dict[str, Any]
) -> None:
    expected = continue_text("The sea", max_new_tokens=24, **options)
    answer = client.completions.create(model=MODEL_NAME, prompt="The sea", max_tokens=24, **options)
    assert answer.choices[0].text == expected
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("The sea")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    is_full = answer.usage.completion_tokens == 24
    assert answer.choices[0].finish_reason == ("length" if is_full else "stop")
    parts = [
        chunk.choices[0].text
        for chunk in client.completions.create(
            model=MODEL_NAME, prompt="The sea", max_tokens=24, stream=True, **options
        )
    ]
    assert "".join(parts) == expected
    assert len(parts) > 3


def read_metrics(address: str) -> dict[str, float]:
    """Return the samples of the model; Prometheus' parser reads the page."""
    page = httpx.get(f"{address}/metrics").text
    return {
        sample.name.removeprefix("regauge_serve_"): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels == {"model": MODEL_NAME}
    }


def test_tokens_and_first_tokens_are_counted(
    server: tuple[str, OneModel], client: openai.OpenAI
) -> None:
    before = read_metrics(server[0])
    options = {"model": MODEL_NAME, "prompt": ["The sea", "A"], "max_tokens": 24}
    usage = client.completions.create(**options, n=2).usage
    assert usage is not None
    after = read_metrics(server[0])
    growth = {name: after[name] - before.get(name, 0) for name in after}
    assert growth["time_to_first_token_seconds_count"] == 4
    assert growth["prompt_tokens_total"] == 2 * usage.prompt_tokens == 2 * len("The seaA")
    assert growth["generation_tokens_total"] == usage.completion_tokens
    wait_for(lambda: read_metrics(server[0]).get("kv_cache_usage_ratio") == 0)
    assert read_metrics(server[0])["kv_cache_blocks"] == 8 * (MAX_TOKENS + 32) / 32


@pytest.mark.parametrize("part", [{"top_p": 0.8}, {"top_k": 5}])
def test_a_part_of_the_tokens_is_drawn_at_temperature_1(
    client: openai.OpenAI, continue_text: Callable[..., str], part: dict[str, Any]
) -> None:
    """As in OpenAI's API, where `temperature` is 1 by default."""
    options = {"model": MODEL_NAME, "prompt": "The sea", "max_tokens": 24, "seed": 4}
    answers = [
        client.completions.create(**options, **more, extra_body=part).choices[0].text
        for more in ({}, {"temperature": 1.0}, {"temperature": 0})
    ]
    drawn = continue_text("The sea", max_new_tokens=24, seed=4, temperature=1.0, **part)
    greedy = continue_text("The sea", max_new_tokens=24)
    assert answers == [drawn, drawn, greedy]
    assert greedy != drawn


@pytest.mark.parametrize("text", ["The sea", "x" * 60])
def test_an_answer_without_a_limit_fills_the_room(
    client: openai.OpenAI, continue_text: Callable[..., str], text: str
) -> None:
    expected = continue_text(text, max_new_tokens=MAX_TOKENS - len(text))
    answer = client.completions.create(model=MODEL_NAME, prompt=text)
    assert answer.choices[0].text == expected
    assert answer.usage is not None
    is_full = answer.usage.total_tokens == MAX_TOKENS
    assert answer.choices[0].finish_reason == ("length" if is_full else "stop")


def test_chats_equal_those_of_generate(client: openai.OpenAI, model: Any) -> None:
    expected = model.generate(MESSAGES, max_new_tokens=24)
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=24)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == answer.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_tools_are_rendered_by_the_template(client: openai.OpenAI) -> None:
    counts = []
    for more in ({}, {"tools": [TOOL, TOOL]}):
        answer = client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=1, **more
        )
        assert answer.usage is not None
        counts.append(answer.usage.prompt_tokens)
    assert counts[1] == counts[0] + len("2 tools")


def test_several_prompts_have_several_answers(
    client: openai.OpenAI, continue_text: Callable[..., str]
) -> None:
    options = {"temperature": 1.0, "seed": 7}
    expected = client.completions.create(
        model=MODEL_NAME, prompt=["one", "two"], max_tokens=9, n=2, **options
    )
    assert [choice.index for choice in expected.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in expected.choices]
    assert len(set(texts)) == 4
    assert texts[0] == continue_text("one", max_new_tokens=9, **options)
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(
        model=MODEL_NAME, prompt=["one", "two"], max_tokens=9, n=2, stream=True, **options
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_prompts_of_tokens_are_not_encoded_again(client: openai.OpenAI, folder: Path) -> None:
    [encoded] = LoadedTokenizer(folder).encode(["abc"])
    ids = encoded.tolist()
    text = client.completions.create(model=MODEL_NAME, prompt="abc", max_tokens=9)
    first = client.completions.create(model=MODEL_NAME, prompt=ids, max_tokens=9)
    both = client.completions.create(model=MODEL_NAME, prompt=[ids, ids], max_tokens=9)
    assert [choice.text for choice in both.choices] == [first.choices[0].text] * 2
    assert text.choices[0].text == first.choices[0].text


def test_a_stop_text_ends_the_answer_and_is_held_back(
    client: openai.OpenAI, continue_text: Callable[..., str]
) -> None:
    whole = continue_text("The sea", max_new_tokens=24)
    stop = whole[5:8]
    expected = whole[: whole.find(stop)]
    options: dict[str, Any] = {"model": MODEL_NAME, "prompt": "The sea", "max_tokens": 24}
    for value in (stop, ["never", stop]):
        answer = client.completions.create(**options, stop=value)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"
    parts = [
        chunk.choices[0].text
        for chunk in client.completions.create(**options, stop=stop, stream=True)
    ]
    assert "".join(parts) == expected


def test_sixteen_clients_get_the_answers_of_one(
    client: openai.OpenAI, server: tuple[str, OneModel]
) -> None:
    def ask(number: int) -> str:
        prompt = f"prompt {number}" * (1 + number % 3)
        answer = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=20)
        return answer.choices[0].text

    alone = list(map(ask, range(16)))
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert together == alone
    assert len(set(alone)) > 8
    wait_for(lambda: server[1].num_open == 0)


def open_stream(address: str, body: dict[str, Any], receive_bytes: int) -> socket.socket:
    """Send a request and read nothing of its answer."""
    parsed = urlparse(address)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((parsed.hostname, parsed.port))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parsed.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_disconnects_frees_its_places(
    server: tuple[str, OneModel], client: openai.OpenAI, *, is_stream: bool
) -> None:
    address, context = server
    body = {
        "prompt": [[5, number] for number in range(6, 30)],
        "max_tokens": 120,
        "temperature": 1.5,
        "seed": 2,
        "stream": is_stream,
    }
    worker = context.workers.ready[0]
    num_before = worker.num_tokens
    with open_stream(address, body, 4096):
        wait_for(lambda: context.num_requests > 0)
    wait_for(lambda: context.num_requests == 0 and context.num_open == 0)
    last = worker.heartbeat
    wait_for(
        lambda: (
            worker.heartbeat is not last
            and not worker.heartbeat["running"] + worker.heartbeat["waiting"]
        )
    )
    assert worker.num_tokens - num_before < 24 * 120 / 3  # about two thirds reach no end token
    assert client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=2).choices


def test_a_slow_reader_does_not_block_others(
    server: tuple[str, OneModel], client: openai.OpenAI
) -> None:
    address, context = server
    body = {
        "prompt": [[5, number] for number in range(6, 12)],
        "max_tokens": 120,
        "temperature": 1.5,
        "seed": 1,
        "stream": True,
    }
    with open_stream(address, body, 2048) as connection:
        wait_for(lambda: context.num_requests > 0)
        for _ in range(3):
            answer = client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=9)
            assert answer.choices[0].text
        wait_for(lambda: context.num_requests == 0)  # all tokens, though none was read
        received = b""
        while b"[DONE]" not in received:
            received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200")
    wait_for(lambda: context.num_open == 0)


@pytest.mark.parametrize(
    ("route", "body", "status", "field"),
    [
        ("completions", b"{", 400, None),
        ("completions", b"[]", 400, None),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, None),
        ("completions", {"prompt": [[1], "a", 5]}, 400, "prompt"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("completions", {"prompt": [1, True]}, 400, "prompt"),
        ("completions", {"prompt": [1, 2**40]}, 400, "prompt"),
        ("completions", {"prompt": [100_000]}, 400, None),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 128}, 400, None),
        ("completions", {"prompt": "a" * 129}, 400, None),
        ("completions", {"prompt": ["a"] * 129}, 400, None),
        ("completions", {"prompt": "a" * 100_000}, 400, None),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "a", "temperature": 3}, 400, "temperature"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n"),
        ("completions", {"prompt": "a", "stop": list("abcde")}, 400, "stop"),
        ("completions", {"prompt": "a", "stop": ""}, 400, "stop"),
        ("completions", {"prompt": "a", "logprobs": 3}, 400, "logprobs"),
        ("completions", {"prompt": "a", "logprobs": 0}, 400, "logprobs"),
        ("completions", {"prompt": "a", "echo": True}, 400, "echo"),
        ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "a", "temprature": 1}, 400, "temprature"),
        ("completions", {"prompt": "a", "model": "other"}, 404, None),
        ("completions", {"prompt": "a\ud800"}, 400, None),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": ["a"]}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, None),
        ("chat/completions", {"messages": [{"role": "boss", "content": "a"}]}, 400, None),
        (
            "chat/completions",
            {"messages": [*MESSAGES, {"role": "assistant", "content": "a"}]},
            400,
            None,
        ),
        ("chat/completions", {"messages": MESSAGES, "tools": "a"}, 400, "tools"),
        (
            "chat/completions",
            {"messages": MESSAGES, "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 127}, 400, None),
    ],
)
def test_a_malformed_request_is_refused_in_openais_schema(
    post: Callable[..., httpx.Response], route: str, body: Any, status: int, field: str | None
) -> None:
    response = post(route, body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field


def test_neutral_fields_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Colors"}]}],
        max_tokens=2,
        presence_penalty=0,
        logprobs=False,
        user="me",
        response_format={"type": "text"},
        tool_choice="none",
    )
    assert answer.usage is not None


def test_a_late_answer_is_refused(post: Callable[..., httpx.Response]) -> None:
    body = {"prompt": "a", "max_tokens": 120, "n": 4, "temperature": 1.5}
    waiting = post("completions", {**body, "n": 24}, **{"Regauge-Timeout-Ms": "1"})
    assert waiting.status_code == 429
    response = post("completions", body, **{"Regauge-Timeout-Ms": "1"})
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "server_error"
    assert post("completions", body, **{"Regauge-Timeout-Ms": "0"}).status_code == 400
    stream = post("completions", {**body, "stream": True}, **{"Regauge-Timeout-Ms": "1"})
    assert stream.status_code == 200
    assert "not complete in time" in stream.text
    assert "[DONE]" not in stream.text


def test_more_requests_than_the_queue_holds_are_refused(
    post: Callable[..., httpx.Response], server: tuple[str, OneModel]
) -> None:
    places = SERVING.max_running_requests - 1  # one is kept for another client
    room = places + SERVING.max_queued_requests
    body = {"prompt": "a", "max_tokens": 2, "n": room + 1}
    response = post("completions", body)
    assert response.status_code == 429
    assert int(response.headers["Retry-After"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"
    assert post("completions", {**body, "n": room}).status_code == 200
    wait_for(lambda: server[1].num_requests == 0)


def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model is called 'other'"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="logprobs is not supported"):
        client.completions.create(model=MODEL_NAME, prompt="a", logprobs=2)
    with pytest.raises(openai.BadRequestError, match="the prompt has") as caught:
        client.completions.create(model=MODEL_NAME, prompt="a" * 2000, max_tokens=9)
    assert caught.value.code == "context_length_exceeded"


def test_a_lost_worker_fails_its_requests(
    server: tuple[str, OneModel], post: Callable[..., httpx.Response]
) -> None:
    context = server[1]
    body = {"prompt": "a", "max_tokens": 120, "n": 16, "temperature": 1.5}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, "completions", body)
        wait_for(lambda: context.num_requests > 0)
        kill(context.workers.ready[0].pid, signal.SIGKILL)
        response = answer.result()
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert "process that generated the answer ended" in response.json()["error"]["message"]
    wait_for(lambda: context.workers.num_replaced == 1)
    missing = post("completions", {**body, "n": 1})
    assert missing.status_code == 503
    assert missing.headers["Retry-After"] == "1"


@pytest.mark.full
def test_a_lost_worker_is_replaced(
    server: tuple[str, OneModel], post: Callable[..., httpx.Response]
) -> None:
    context = server[1]
    wait_for(lambda: len(context.workers.ready) == 1)
    body = {"prompt": "a", "max_tokens": 2}
    assert post("completions", body).status_code == 200
    num_replaced = context.workers.num_replaced
    kill(context.workers.ready[0].pid, signal.SIGKILL)
    wait_for(lambda: context.workers.num_replaced == num_replaced + 1)
    wait_for(lambda: len(context.workers.ready) == 1)
    assert post("completions", body).status_code == 200
