"""Hostile clients: the server refuses what is wrong and stays as it was."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.serving import api_keys, request_body, request_errors
from regauge.serving.api_keys import VARIABLE, ApiKeys
from regauge.serving.request_body import RequestBody
from regauge.serving.request_errors import FieldError, TooLargeError
from regauge.serving.routes.kserve import InferBody
from regauge.serving.routes.openai import EmbeddingsBody
from regauge.serving.routes.tei import EmbedBody
from regauge.serving.runtime import ServingRuntime
from regauge.serving.settings import HttpSettings, Serve
from regauge.serving.text_generation.openai_requests import CompletionRequest
from regauge.system.errors import SettingsError
from serve.attack_requests import KINDS, Attack, build_post, draw_attack, run_attack
from serve.servers import (
    ServerProcess,
    draw_texts,
    encoder,
    read_resources,
    start_server,
    wait_for,
)

__all__ = ["encoder"]

KEYS = ("first-key", "second-key")
TIMEOUT_SECONDS = 1.0
"""Time in which the server of these tests expects headers and bodies."""
MAX_BODY_BYTES = 200_000
MAX_ADDRESS_CONNECTIONS = 60
OPTIONS = (
    f"serve.http.header_timeout_seconds={TIMEOUT_SECONDS}",
    f"serve.http.body_timeout_seconds={TIMEOUT_SECONDS}",
    f"serve.http.max_body_bytes={MAX_BODY_BYTES}",
    "serve.http.max_total_body_bytes=400000",
    "serve.http.keep_alive_seconds=2",
    f"serve.http.max_connections={2 * MAX_ADDRESS_CONNECTIONS}",
    f"serve.http.max_address_connections={MAX_ADDRESS_CONNECTIONS}",
)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@pytest.fixture(scope="module")
def server(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("server"), f"model={encoder}", *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def guarded_server(
    encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Return a server with API keys."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.txt").write_text("# keys of the tests\n" + "\n".join(KEYS) + "\n")
    option = f"serve.http.api_keys_file={folder / 'keys.txt'}"
    with start_server(folder, f"model={encoder}", option) as running:
        yield running


def attack(server: ServerProcess, attacks: list[Attack]) -> Counter[int]:
    """Run attacks from 32 clients; return how often each status was answered."""
    statuses: Counter[int] = Counter()
    address = ("127.0.0.1", server.port)

    def run(item: Attack) -> None:
        answer = run_attack(address, item, 60)
        codes = [int(code) for code in STATUS.findall(answer)]
        statuses.update(codes)
        assert not any(code >= 500 for code in codes), (item.name, item.parts, answer[:500])
        assert b"Traceback" not in answer
        assert b"root:" not in answer
        if item.is_slow and item.parts:
            assert codes in ([408], []), (item.name, answer)

    with ThreadPoolExecutor(32) as executor:
        list(executor.map(run, attacks))
    return statuses


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.full)])
def test_hostile_requests_leave_nothing_behind(server: ServerProcess, count: int) -> None:
    expected = server.embed("w5 w6")
    draw = random.Random(1)  # noqa: S311 - equal attacks in every run
    warm = [build(draw)._replace(name=name) for name, build in KINDS for _ in range(10)]
    attack(server, warm)
    before = settle(server)
    with ThreadPoolExecutor(1) as executor:
        attacking = executor.submit(attack, server, [draw_attack(draw) for _ in range(count)])
        while not attacking.done():
            assert server.get("/health").status_code == 200
            time.sleep(0.05)
        statuses = attacking.result()
    assert {200, 400, 404, 408, 413, 422, 431} <= set(statuses), statuses
    after = settle(server)
    assert server.process.poll() is None
    assert "Traceback" not in server.log, server.log[-3000:]
    assert (server.embed("w5 w6") == expected).all()
    megabytes, threads, descriptors = (new - old for new, old in zip(after, before, strict=True))
    assert megabytes < 20
    assert threads <= 0
    assert descriptors <= 1
    health = server.get("/health").json()
    assert health["models"]["model"]["waiting_records"] == 0


def settle(server: ServerProcess) -> tuple[float, int, int]:
    """Return the resources of a server when all connections have ended."""
    wait_for(lambda: count_connections(server) == 0, 60)
    return read_resources(server.process.pid)


def count_connections(server: ServerProcess) -> int:
    """Return the number of established connections of the port of a server."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    port = f":{server.port:04X}"
    return sum(line.split()[1].endswith(port) and line.split()[3] in {"01", "08"} for line in lines)


def test_slow_headers_and_bodies_end_in_time(server: ServerProcess) -> None:
    """A byte now and then does not extend the time."""
    whole = build_post(b'{"inputs": "w5"}')
    for cut in (10, whole.index(b"\r\n\r\n") + 6):
        start = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.2) as connection:
            connection.sendall(whole[:cut])
            position, answer = cut, b""
            while not answer and position < len(whole) and time.monotonic() < start + 30:
                try:
                    answer = connection.recv(1000)
                    break
                except TimeoutError:
                    connection.sendall(whole[position : position + 1])
                    position += 1
        assert b" 408 " in answer
        assert time.monotonic() - start < 20


def test_the_bodies_of_all_requests_have_a_limit(server: ServerProcess) -> None:
    """Two bodies fill the budget, so a third is refused until they end."""
    body = b'{"inputs": "w5"' + b" " * 150_000 + b"}"
    request = build_post(body)
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    try:
        for connection in connections:
            connection.sendall(request[:-1])
        wait_for(lambda: server.post("/embed", {"inputs": "w" * 110_000}).status_code == 429, 10)
        refused = server.post("/embed", {"inputs": "w" * 110_000})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert server.post("/embed", {"inputs": "w5"}).status_code == 200
    finally:
        for connection in connections:
            connection.close()
    wait_for(lambda: server.post("/embed", {"inputs": "w" * 110_000}).status_code != 429)


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[..., list[socket.socket]]]:
    """Return a function that opens connections from an address and sends bytes on each."""
    connections: list[socket.socket] = []

    def open_all(count: int, content: bytes = b"", address: str = "127.0.0.1") -> list[Any]:
        opened = [
            socket.create_connection(("127.0.0.1", server.port), 30, (address, 0))
            for _ in range(count)
        ]
        connections.extend(opened)
        for connection in opened:
            connection.sendall(content)
        return opened

    wait_for(lambda: count_connections(server) == 0, 30)
    yield open_all
    for connection in connections:
        connection.close()
    wait_for(lambda: count_connections(server) == 0)


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
ADDRESSES = [f"127.0.0.{number}" for number in range(2, 4)]


def is_healthy(connection: socket.socket) -> bool:
    """Return whether a request is answered; False if the server has closed the connection."""
    connection.sendall(HEALTH)
    answer = b""
    while not answer.endswith(b"}}}"):
        part = connection.recv(1000)
        if not part:
            return False
        answer += part
    return b" 200 " in answer


def test_a_new_connection_closes_the_oldest_idle_one(
    server: ServerProcess, connect: Callable[..., list[socket.socket]]
) -> None:
    [used] = connect(1)
    [other] = connect(1, b"", ADDRESSES[0])
    assert is_healthy(used)
    assert is_healthy(other)
    waiting = connect(MAX_ADDRESS_CONNECTIONS - 1)
    server.embed("w5")  # a connection above the limit of its address
    assert used.recv(1000) == b""
    assert is_healthy(other)
    assert is_healthy(waiting[-1])


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ADDRESSES])
def test_health_is_answered_while_all_connections_are_busy(
    server: ServerProcess, connect: Callable[..., list[socket.socket]], addresses: list[str]
) -> None:
    unfinished = build_post(b'{"inputs": "w5"}')[:-1]
    for address in addresses:
        connect(MAX_ADDRESS_CONNECTIONS, unfinished[:-20], address)
    assert server.get("/health").status_code == 200
    refused = server.post("/embed", {"inputs": "w5"})
    assert refused.status_code == 503
    assert refused.headers["Retry-After"] == "1"
    assert refused.headers["Connection"] == "close"


def test_large_and_long_inputs_are_refused(server: ServerProcess) -> None:
    body = {"inputs": "w5 " * (MAX_BODY_BYTES // 3)}
    assert server.post("/embed", body).status_code == 413
    assert server.post("/embed", {"inputs": "w5 " * 40}).status_code == 413
    assert server.post("/embed", {"inputs": ["w5"] * 3000}).status_code == 413
    assert server.post("/embed", {"inputs": []}).status_code == 422
    chunks = iter([b'{"inputs": "', b"w" * MAX_BODY_BYTES, b'"}'])
    response = httpx.post(f"{server.address}/embed", content=chunks, timeout=60)
    assert response.status_code == 413


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer wrong", "Bearer first-ke", "Bearer first-key2", "Basic first-key",
     "Bearer first-key second-key", "first-key", "Bearer \xff"],
)  # fmt: skip
def test_a_wrong_key_is_refused_without_detail(guarded_server: ServerProcess, header: str) -> None:
    for path in ("/embed", "/v1/embeddings", "/tokenize"):
        headers = {b"Authorization": header.encode("latin-1")} if header else {}
        response = guarded_server.post(path, {"inputs": "w5"}, headers=headers)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"].startswith("Bearer, Basic ")
        assert "a valid API key is required" in response.text
        assert len(response.text) < 160
    for path in ("/info", "/v1/models", "/metrics"):
        assert guarded_server.get(path).status_code == 401


def test_a_key_is_accepted(guarded_server: ServerProcess) -> None:
    for key in KEYS:
        guarded_server.embed("w5", headers={"Authorization": f"bearer {key}"})
    assert guarded_server.get("/health").status_code == 200
    assert not any(key in guarded_server.log for key in KEYS)


def test_a_key_is_compared_with_all_keys_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def record(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", record)
    keys = ApiKeys(["one", "two", "three"])
    for header, is_valid in {"Bearer one": True, "Bearer three": True, "Bearer x": False}.items():
        compared.clear()
        assert (keys.find_client(header) is not None) == is_valid
        assert len(compared) == 3
        assert {len(item) for pair in compared for item in pair} == {32}


def test_a_browser_sends_a_key_as_a_password() -> None:
    keys = ApiKeys(["one", "two: three"])
    for pair, is_valid in {
        ":one": True,
        "me:two: three": True,
        "one:": False,
        "one": False,
    }.items():
        header = f"Basic {base64.b64encode(pair.encode()).decode()}"
        assert (keys.find_client(header) is not None) == is_valid
    for header in ("Basic", "Basic !", "Basic /w==", "Digest one", "one"):
        assert keys.find_client(header) is None
    assert keys.find_client("Basic Om9uZQ==") == keys.find_client("bearer one")


@pytest.mark.parametrize("variable", [" , ", ""])
def test_a_variable_without_a_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(VARIABLE, variable)
    with pytest.raises(SettingsError, match=f"{VARIABLE} does not contain an API key"):
        ApiKeys.read(None)


@pytest.mark.parametrize(
    ("host", "keys", "count"),
    [
        ("0.0.0.0", [], 1),  # noqa: S104
        ("::", [], 1),
        ("example.com", [], 1),
        ("0.0.0.0", ["one"], 0),  # noqa: S104
        ("127.0.0.2", [], 0),
        ("::1", [], 0),
        ("localhost", [], 0),
    ],
)
def test_a_server_that_is_open_to_a_network_warns(
    host: str, keys: list[str], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    ApiKeys(keys).warn_if_open(host)
    assert len(caplog.records) == count


def test_changed_keys_are_read_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file without a key, or a missing one, revokes nothing."""
    monkeypatch.setattr(api_keys, "WATCH_SECONDS", 0.01)
    path = tmp_path / "keys.txt"
    path.write_text("old")
    keys = ApiKeys.read(str(path))

    async def change() -> None:
        watching = asyncio.create_task(keys.watch())
        path.write_text("new\nother")
        while keys.find_client("Bearer new") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert keys.find_client("Bearer old") is None
        for action in (lambda: path.write_text("# none"), path.unlink):
            count = len(caplog.records)
            action()
            while len(caplog.records) == count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(change())
    assert keys.find_client("Bearer new") is not None
    assert "The API keys stay as they are" in caplog.text


DOCUMENTS = st.recursive(
    st.text(alphabet='ab[{]}"\\'), lambda items: st.lists(items) | st.dictionaries(st.text(), items)
)


def count_parts(document: Any) -> int:
    if isinstance(document, dict):
        return 1 + len(document) + sum(map(count_parts, document.values()))
    return 1 + sum(map(count_parts, document)) if isinstance(document, list) else 0


@given(DOCUMENTS)
def test_the_parts_of_a_body_are_counted_before_they_are_built(document: Any) -> None:
    raw_body, number = json.dumps(document).encode(), count_parts(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "MAX_PARTS", number)
        request_body.check_parts(raw_body)
        patch.setattr(request_body, "MAX_PARTS", number - 1)
        if number:
            with pytest.raises(TooLargeError, match="lists, objects and keys"):
                request_body.check_parts(raw_body)


@pytest.mark.parametrize("schema", [EmbeddingsBody, CompletionRequest, InferBody])
@pytest.mark.parametrize("end", [b"]", b'"\\"' * 100_000])
def test_every_body_has_a_limit_for_lists(schema: type[RequestBody], end: bytes) -> None:
    with pytest.raises(TooLargeError, match="65536 lists, objects and keys"):
        schema.parse(b'{"prompt": [' + b"[1]," * 70_000 + end, {})


@pytest.mark.parametrize("schema", [EmbedBody, EmbeddingsBody, CompletionRequest, InferBody])
def test_thousands_of_wrong_keys_are_read_once(
    schema: type[RequestBody], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of an error's location must not look at all keys."""
    raw_body = b"{" + b",".join(b'"k%d": 1' % number for number in range(60_000)) + b"}"
    calls = []
    original = request_errors._locate

    def count(document: Any, location: Any, indices: dict[int, dict[str, int]]) -> Any:
        position = original(document, location, indices)
        calls.append(len(indices))
        return position

    monkeypatch.setattr(request_errors, "_locate", count)
    with pytest.raises(FieldError, match="k0: extra inputs are not permitted"):
        schema.parse(raw_body, {})
    assert len(calls) >= 60_000
    assert max(calls) == 1
    with pytest.raises(TooLargeError):
        schema.parse(raw_body.replace(b"1", b"{}"), {})


@pytest.mark.parametrize(
    ("settings", "host", "origin", "is_allowed"),
    [
        ({}, "127.0.0.1:8080", None, True),
        ({}, "localhost:8080", "http://localhost:8080", True),
        ({}, "[::1]:8080", "http://[::1]:8080", True),
        ({}, "127.0.0.1:8080", "http://evil.example", False),
        ({}, "127.0.0.1:8080", "http://127.0.0.1:9090", False),
        ({}, "127.0.0.1:8080", "null", False),
        ({}, "evil.example:8080", "http://evil.example:8080", False),
        ({}, "evil.example:8080", None, False),
        ({"host": "0.0.0.0"}, "example.com", None, True),  # noqa: S104
        ({"host": "0.0.0.0"}, "example.com", "https://example.com", True),  # noqa: S104
        ({"host": "0.0.0.0"}, "example.com", "https://evil.example", False),  # noqa: S104
        ({"origins": ["https://app.example"]}, "127.0.0.1", "https://app.example", True),
        ({"origins": ["https://app.example"]}, "app.example", "https://app.example", True),
        ({"origins": ["https://app.example"]}, "127.0.0.1", "https://evil.example", False),
        ({"origins": ["*"]}, "evil.example", "https://evil.example", True),
    ],
)
def test_a_web_page_needs_permission(
    settings: dict[str, Any], host: str, origin: str | None, *, is_allowed: bool
) -> None:
    """An allowed request arrives at the server, which has not started."""
    origins = settings.pop("origins", [])
    serve = Serve(artifacts={"model": "x"}, http=HttpSettings(allowed_origins=origins), **settings)
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})

    async def send() -> list[httpx.Response]:
        with ThreadPoolExecutor(1) as executor:
            app: Any = ServingRuntime(serve, ApiKeys([]), executor).app
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                question = {"Access-Control-Request-Method": "POST", **headers}
                question["Access-Control-Request-Headers"] = "authorization,content-type"
                return [
                    await client.post("/embed", json={"inputs": "a"}, headers=headers),
                    await client.get("/v1/models", headers=headers),
                    await client.options("/embed", headers=question),
                ]

    posted, read, preflight = asyncio.run(send())
    assert (posted.status_code, read.status_code) == ((503, 200) if is_allowed else (403, 403))
    if origins and origin:
        assert (preflight.status_code == 200) == is_allowed
        shown = read.headers.get("Access-Control-Allow-Origin")
        assert (shown in {origin, "*"}) == is_allowed


def test_requests_are_logged_with_the_id_of_the_client(caplog: pytest.LogCaptureFixture) -> None:
    """An id that could break a log line is replaced; without the setting nothing is logged."""
    caplog.set_level("INFO", logger="regauge")

    async def send(path: str, request_id: str, *, is_logged: bool = True) -> str:
        http = HttpSettings(access_log=is_logged)
        with ThreadPoolExecutor(1) as executor:
            serve = Serve(artifacts={"model": "x"}, http=http)
            transport = httpx.ASGITransport(ServingRuntime(serve, ApiKeys([]), executor).app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answer = await client.get(path, headers={"X-Request-Id": request_id})
        return answer.headers["X-Request-Id"]

    assert asyncio.run(send("/v1/models", "first")) == "first"
    assert re.fullmatch("[0-9a-f]{32}", asyncio.run(send("/v1/models/a%0Ab", "two words")))
    assert asyncio.run(send("/missing", "third")) == "third"
    asyncio.run(send("/v1/models", "fourth", is_logged=False))
    lines = [record.getMessage() for record in caplog.records if record.name == "regauge"]
    assert re.fullmatch(r"127.0.0.1 GET '/v1/models' 200 [\d.]+ ms first", lines[0])
    assert re.fullmatch(r"127.0.0.1 GET '/v1/models/a\\nb' 404 [\d.]+ ms [0-9a-f]{32}", lines[1])
    assert lines[2:] == ["127.0.0.1 GET '/missing' 404 0.0 ms third"]


def test_the_server_listens_on_the_loopback_by_default(server: ServerProcess) -> None:
    assert Serve(artifacts={"model": "x"}).host == "127.0.0.1"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert f"0100007F:{server.port:04X}" in listening
    assert f"00000000:{server.port:04X}" not in listening


def test_texts_of_a_request_stay_in_one_answer(server: ServerProcess) -> None:
    """Answers of pipelined requests come in order, each with its own vectors."""
    texts = draw_texts(10, 5)
    requests = b"".join(build_post(b'{"inputs": "%s"}' % text.encode()) for text in texts)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(requests)
        answer = b""
        while answer.count(b"]]") < len(texts):
            answer += connection.recv(65536)
    bodies = re.findall(rb"\r\n\r\n(\[\[.*?\]\])", answer)
    expected = [server.post("/embed", {"inputs": text}).content for text in texts]
    assert bodies == expected
