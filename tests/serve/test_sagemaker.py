"""The contract of SageMaker's containers: its routes, its command, and its image."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from regauge.jobs.clusters.sagemaker_container import build_command
from regauge.system.errors import SettingsError
from serve.servers import ServerProcess

LINES = "application/jsonlines"


def test_the_form_of_a_body_selects_the_route(http: httpx.Client) -> None:
    for path, body in [
        ("/v1/embeddings", {"input": ["a", "anna"], "encoding_format": "base64"}),
        ("/embed", {"inputs": ["a", "anna"]}),
        ("/predict", {"inputs": "anna", "model": "classifier"}),
        ("/rerank", {"query": "a", "texts": ["b", "c"], "model": "reranker"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    ]:
        invoked = http.post("/invocations", json=body)
        assert invoked.status_code == 200, invoked.text
        assert invoked.json() == http.post(path, json=body).json()
    assert http.get("/ping").status_code == 200


def test_json_lines_are_answered_line_by_line(http: httpx.Client) -> None:
    lines = b'{"inputs": "a"}\n\n{"query": "a", "texts": ["b"], "model": "reranker"}\n'
    answer = http.post("/invocations", content=lines, headers={"Content-Type": LINES})
    assert answer.headers["content-type"] == LINES
    first, second = answer.text.splitlines()
    assert first == http.post("/embed", json={"inputs": "a"}).text
    body = {"query": "a", "texts": ["b"], "model": "reranker"}
    assert second == http.post("/rerank", json=body).text


@pytest.mark.parametrize(
    ("content", "kind", "status", "problem"),
    [
        (b"a,b", "text/csv", 415, "content type 'text/csv' is not"),
        (b"{", "application/json", 422, "invalid JSON"),
        (b"{}", "application/json", 422, "inputs: field required"),
        (b'{"inputs": "a"}\n{"inputs": []}', LINES, 422, "inputs is empty"),
        (b"\n", LINES, 422, "does not contain a line"),
    ],
)
def test_an_invalid_body_is_an_error(
    http: httpx.Client, content: bytes, kind: str, status: int, problem: str
) -> None:
    answer = http.post("/invocations", content=content, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert problem in answer.json()["error"]


def test_the_command_serves_the_folder_of_sagemaker(
    tiny_artifacts: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = tiny_artifacts["encoder"]
    variables = {
        "SM_MODEL_DIR": str(folder),
        "SAGEMAKER_BIND_TO_PORT": "9000",
        "REGAUGE_SERVE_OPTIONS": "serve.overflow=truncate",
    }
    command = build_command(variables)
    assert command[:2] == ["serve", f"model={folder}"]
    assert command[-5:] == ["serve.overflow=truncate", "--host", "0.0.0.0", "--port", "9000"]  # noqa: S104 - as SageMaker requires
    assert build_command({"SM_MODEL_DIR": str(folder)})[-1] == "8080"
    for name in ("second", "first"):
        shutil.copytree(folder, tmp_path / "models" / name)
    several = build_command({"SM_MODEL_DIR": str(tmp_path / "models")})
    models = [f"{name}={tmp_path}/models/{name}" for name in ("first", "second")]
    assert several[1:3] == models
    with pytest.raises(SettingsError, match="has no artifact"):
        build_command({"SM_MODEL_DIR": str(tmp_path)})


def test_a_container_answers_and_ends_after_sigterm(
    tiny_artifacts: Mapping[str, Path], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    variables = {"SM_MODEL_DIR": str(tiny_artifacts["encoder"]), "SAGEMAKER_BIND_TO_PORT": port}
    command = [sys.executable, "-m", "regauge.jobs.clusters.sagemaker_container"]
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **variables}
        )
    try:
        ServerProcess(process, log).wait_until_ready()
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/ping").status_code == 200
        assert httpx.post(f"{url}/invocations", json={"inputs": "a"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_container_without_a_model_ends_with_one_line(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "regauge.jobs.clusters.sagemaker_container"],
        env={**os.environ, "SM_MODEL_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == SettingsError.exit_code
    assert "has no artifact" in process.stderr
    assert "Traceback" not in process.stderr
