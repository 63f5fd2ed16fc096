"""Faults of a real server: dead, stuck and poisoned workers, signals, and wrong artifacts."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import regauge
from regauge.system.stop_signals import REPEAT_SECONDS
from serve.chaos_backend import BATCH_VARIABLE, EXITS, NOT_FINITE, RAISES
from serve.servers import (
    ServerProcess,
    copy_artifact,
    copy_with_chaos,
    draw_texts,
    encoder,
    install_chaos,
    is_running,
    run_server,
    start_server,
    update_manifest,
    wait_for,
)

__all__ = ["encoder"]

PATIENT = "serve.queue.timeout_seconds=300"
"""A worker is replaced slowly on a busy machine."""


@pytest.fixture(scope="module")
def chaos(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return an artifact that fails for marked texts, and the environment that serves it."""
    folder = tmp_path_factory.mktemp("chaos")
    variables = install_chaos(folder) | {BATCH_VARIABLE: "5"}
    return copy_with_chaos(encoder, folder / "model"), variables


@pytest.fixture(scope="module")
def server(
    chaos: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    artifact, variables = chaos
    options = (PATIENT, "serve.workers.hang_timeout_seconds=2")
    folder = tmp_path_factory.mktemp("server")
    with start_server(folder, str(artifact), *options, environment=variables) as running:
        yield running
        assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def vectors(encoder: Path) -> Callable[[list[str]], np.ndarray]:
    """Return a function that returns the vectors that `predict` writes."""
    return regauge.load(encoder, threads=1).encode


def send_batches(
    server: ServerProcess, batches: list[list[str]]
) -> list[tuple[list[str], httpx.Response]]:
    """Send requests at once; return each with its answer."""
    with ThreadPoolExecutor(len(batches)) as executor:
        answers = executor.map(lambda texts: server.post("/embed", {"inputs": texts}), batches)
        return list(zip(batches, answers, strict=True))


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        (RAISES, "ValueError: this text is poison"),
        (NOT_FINITE, "the model's output is not finite"),
        (EXITS, "workers ended while they computed it"),
    ],
)
def test_a_poisoned_record_harms_no_other(
    server: ServerProcess,
    vectors: Callable[[list[str]], np.ndarray],
    word: int,
    problem: str,
) -> None:
    replaced = server.health()["replaced_workers"]
    good = [draw_texts(4, seed) for seed in range(8)]
    poisoned = [*draw_texts(3, 100), f"w5 w{word}"]
    *answers, (_, failed) = send_batches(server, [*good, poisoned])
    for texts, response in answers:
        assert response.status_code == 200, response.text
        assert np.allclose(response.json(), vectors(texts), atol=1e-3)
    assert failed.status_code == 424
    assert failed.json()["error"] == f"record 3 failed: {problem}"
    wait_for(lambda: server.health()["workers"] == 1)
    lost = server.health()["replaced_workers"] - replaced
    assert lost == (2 if word == EXITS else 0)
    assert len(server.workers) == 1


def test_a_killed_worker_is_replaced_under_load(
    server: ServerProcess, vectors: Callable[[list[str]], np.ndarray], figure: Any
) -> None:
    texts = draw_texts(20, 1)
    expected = vectors(texts)
    counts = {200: 0, 503: 0}
    [victim] = server.workers
    killed_at: list[float] = []
    recovered_at: list[float] = []

    def send(client_number: int) -> None:
        with httpx.Client(base_url=server.address, timeout=120) as client:
            for index in range(30):
                item = (client_number + index) % len(texts)
                while True:
                    response = client.post("/embed", json={"inputs": [texts[item]]})
                    counts[response.status_code] += 1
                    if response.status_code == 200:
                        break
                    assert int(response.headers["Retry-After"]) >= 1
                    time.sleep(0.05)
                assert np.allclose(response.json()[0], expected[item], atol=1e-3)
                if killed_at and server.workers != [victim] and not recovered_at:
                    recovered_at.append(time.monotonic())
                if counts[200] >= 50 and not killed_at:
                    killed_at.append(time.monotonic())
                    os.kill(victim, signal.SIGKILL)

    with ThreadPoolExecutor(6) as executor:
        list(executor.map(send, range(6)))
    assert counts[200] == 180
    assert killed_at
    figure("seconds until a killed worker was replaced", recovered_at[0] - killed_at[0])
    assert server.health()["workers"] == 1
    assert len(server.workers) == 1
    assert not is_running(victim)


def test_a_stuck_worker_is_replaced(
    server: ServerProcess, vectors: Callable[[list[str]], np.ndarray], figure: Any
) -> None:
    [victim] = server.workers
    os.kill(victim, signal.SIGSTOP)
    start = time.monotonic()
    texts = draw_texts(3, 2)
    answer = server.embed(texts)
    figure("seconds until a stuck worker was replaced", time.monotonic() - start)
    assert np.allclose(answer, vectors(texts), atol=1e-3)
    assert not is_running(victim)
    assert "computed one batch for 2 s; replacing it" in server.log


def test_deadlines_are_kept(server: ServerProcess) -> None:
    """A wait that is too long is refused at once, and one that becomes too long ends in time."""
    wait_for(lambda: server.health()["workers"] == 1)
    server.embed("w5")
    refused = server.post("/embed", {"inputs": "w5"}, headers={"Regauge-Timeout-Ms": "1"})
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) >= 1
    [worker] = server.workers
    os.kill(worker, signal.SIGSTOP)
    try:
        late = server.post("/embed", {"inputs": "w5"}, headers={"Regauge-Timeout-Ms": "500"})
    finally:
        os.kill(worker, signal.SIGCONT)
    assert late.status_code == 504
    assert server.health()["waiting_records"] == 0
    server.embed("w5")


def test_a_client_that_leaves_frees_its_work(server: ServerProcess) -> None:
    wait_for(lambda: server.health()["workers"] == 1)
    server.embed("w5")
    [worker] = server.workers
    body = json.dumps({"inputs": draw_texts(400, 3)}).encode()
    head = f"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    os.kill(worker, signal.SIGSTOP)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
            wait_for(lambda: server.health()["waiting_records"] > 100)
        wait_for(lambda: server.health()["waiting_records"] == 0)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert len(server.embed(draw_texts(50, 4))) == 50
    assert 'status="499"' in server.get("/metrics").text


@pytest.mark.parametrize(("version", "count"), [("1.0", 1), ("1.1", 3)])
@pytest.mark.parametrize("seconds", [0.0, 0.6])
def test_a_client_that_only_closes_its_side_is_answered(
    server: ServerProcess, version: str, count: int, seconds: float
) -> None:
    """The client of a stopped worker waits for its answers, whose first bytes come earlier."""
    expected = server.post("/embed", {"inputs": "w5"}).content
    body = b'{"inputs": "w5"}'
    keep = "Expect: 100-continue\r\n" if version == "1.1" else ""
    head = f"POST /embed HTTP/{version}\r\nHost: x\r\n{keep}Content-Length: {len(body)}\r\n\r\n"
    [worker] = server.workers
    if seconds:
        os.kill(worker, signal.SIGSTOP)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall((head.encode() + body) * count)
            connection.shutdown(socket.SHUT_WR)
            time.sleep(seconds)
            os.kill(worker, signal.SIGCONT)
            content = b""
            while part := connection.recv(65536):
                content += part
    finally:
        os.kill(worker, signal.SIGCONT)
    answers = content.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").split(b"HTTP/1.1 200 OK\r\n")
    assert answers.pop(0) == b""
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [expected] * count
    assert b"connection: close" in answers[-1]


def test_failed_records_are_reported_in_their_places(
    chaos: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """With `item_errors` the other records are answered; then SIGTERM under load loses nothing."""
    artifact, variables = chaos
    options = (str(artifact), "serve.item_errors=true", PATIENT)
    with start_server(tmp_path, *options, environment=variables) as server:
        texts = ["w5 w6", f"w5 w{RAISES}", "w7", "w8 " * 40]
        rows = server.post("/embed", {"inputs": texts}).json()
        assert [row is None for row in rows] == [False, True, False, True]
        document = server.post("/v1/embeddings", {"input": texts}).json()
        objects = [item["object"] for item in document["data"]]
        assert objects == ["embedding", "error", "embedding", "error"]
        assert "poison" in document["data"][1]["error"]["message"]
        assert "longer than" in document["data"][3]["error"]["message"]
        check_drain(server)


def check_drain(server: ServerProcess) -> None:
    """Stop a server under the load of keep-alive clients; every request must be answered."""
    num_answers, failures = [0] * 8, []
    begun = threading.Event()

    def send(number: int) -> None:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            while True:
                try:
                    response = client.post("/embed", json={"inputs": draw_texts(2, number)})
                except httpx.ConnectError:
                    return  # the server has closed its listener
                except httpx.HTTPError as error:
                    failures.append(repr(error))
                    return
                if response.status_code != 200:
                    failures.append(response.text)
                num_answers[number] += 1
                if sum(num_answers) > 40:
                    begun.set()

    with ThreadPoolExecutor(len(num_answers)) as executor:
        sends = [executor.submit(send, number) for number in range(len(num_answers))]
        assert begun.wait(60)
        assert server.stop() == 0
        for future in sends:
            future.result()
    assert failures == []
    assert min(num_answers) > 0
    assert "state: stopped" in server.log


def test_a_second_signal_ends_the_server_soon(
    chaos: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    artifact, variables = chaos
    options = (str(artifact), PATIENT, "serve.http.drain_seconds=300")
    with start_server(tmp_path, *options, environment=variables) as server:
        [worker] = server.workers
        os.kill(worker, signal.SIGSTOP)
        body = b'{"inputs": "w5"}'
        head = f"POST /embed HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
            wait_for(lambda: "regauge_serve_phase_seconds_total" in server.get("/metrics").text)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "Draining" in server.log)
            time.sleep(REPEAT_SECONDS + 0.1)  # earlier signals are one request
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 128 + signal.SIGTERM
        wait_for(lambda: not is_running(worker), 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_server_starts_ends_it(
    encoder: Path, tmp_path: Path, number: int
) -> None:
    with start_server(tmp_path, str(encoder), is_ready=False) as server:
        wait_for(lambda: server.workers)
        [worker] = server.workers
        assert server.stop(number) == 0
        assert "Serving" not in server.log
        assert "Traceback" not in server.log
        wait_for(lambda: not is_running(worker), 10)


def test_a_killed_server_leaves_no_worker(encoder: Path, tmp_path: Path) -> None:
    with start_server(tmp_path, str(encoder)) as server:
        [worker] = server.workers
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not is_running(worker), 10)


def damage_pooling(artifact: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        modes = document["program"]["pooling"]["modes"]
        document["program"]["pooling"]["modes"] = ["cls" if "mean" in modes else "mean"]

    update_manifest(artifact, change)


def damage_weights(artifact: Path) -> None:
    path = artifact / "weights.safetensors"
    weights = load_file(path)
    name = max(weights, key=lambda key: weights[key].numel())
    weights[name] = torch.randn_like(weights[name])
    save_file(weights, path)
    update_manifest(artifact)


def cut_weights(artifact: Path) -> None:
    path = artifact / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_tokenizer(artifact: Path) -> None:
    (artifact / "tokenizer" / "tokenizer.json").unlink()


def cut_manifest(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_text(path.read_text()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_pooling, "row 0 of parity_rows.json ("),
        (damage_weights, "row 0 of parity_rows.json ("),
        (cut_weights, "weights.safetensors"),
        (remove_tokenizer, "tokenizer.json"),
        (cut_manifest, "manifest.json"),
    ],
)
def test_a_wrong_artifact_is_refused(
    encoder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    artifact = copy_artifact(encoder, tmp_path / "model")
    damage(artifact)
    code, log = run_server(tmp_path / "server", str(artifact))
    assert code == 64, log
    check_line(log, message)


def check_line(log: str, message: str) -> None:
    """Check that a command printed one line with a problem and a remedy."""
    lines = [line for line in log.splitlines() if line]
    assert len(lines) == 1, log
    assert lines[0].startswith("regauge: ")
    assert message in lines[0]
    assert ";" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere"),
        (("{artifact}", "serve.queue.max_wait=3"), "did you mean 'max_wait_seconds'"),
        (("{artifact}", "--port", "-1"), "port"),
        (("{artifact}", "serve.workers.count=0"), "count"),
        (("{artifact}", "serve.overflow=cut"), "overflow"),
        (("{artifact}", "{artifact}"), "two models are called"),
        (("a/b/c={artifact}",), "invalid model name"),
        (("{artifact}", "serve.host=256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("{artifact}", "serve.http.api_keys_file=nowhere"), "API keys in nowhere"),
    ],
)
def test_wrong_arguments_are_one_clear_line(
    encoder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    command = [argument.format(artifact=encoder) for argument in arguments]
    code, log = run_server(tmp_path, *command)
    assert code == 2, log
    check_line(log, message)


def test_a_port_in_use_is_named(encoder: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        code, log = run_server(tmp_path, str(encoder), "--port", str(port))
    assert code == 2, log
    check_line(log, f"cannot listen on 127.0.0.1:{port}: Address already in use")
