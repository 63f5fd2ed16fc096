"""Artifacts of small models, and real processes of `regauge serve` on a free port."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import regauge
from distributed import datasets
from distributed.runs import settings
from end_to_end.predicting import EAGER, export_run, update_manifest
from regauge.inference.export.manifest import BUCKET_TIMES
from regauge.system import processes
from regauge.training.run import attempt
from serve import chaos_backend

START_SECONDS = 240.0
"""Time in which a server must be ready; the machine may be busy."""
STOP_SECONDS = 60.0
READY = re.compile(r"Serving .* at (http://\S+) \(ready after")
LENGTHS = (8, 16, 32)
EXPORT = (
    *EAGER,
    'candidates.precisions=["fp32"]',
    "parity.metrics=false",
    f"buckets.lengths={list(LENGTHS)}",
)
SOURCE = Path(regauge.__file__).parents[1]
PATIENT = "serve.queue.max_wait_seconds=60"
"""Setting with which a busy machine refuses no request."""
QUICK_HTTP = ("serve.models.poll_seconds=0.2", "serve.http.drain_seconds=20")


def build_encoder(folder: Path, seed: int = 7) -> Path:
    """Train and export a small encoder; return the folder of its artifact."""
    data = datasets.write_pairs(folder / "data")
    run = settings(folder / "run", data, "contrastive", stop={"steps": 4}, seed=seed)
    attempt(run, processes.World())
    return export_run(folder / "run", folder / "artifact", *EXPORT)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of a small encoder; modules that import this share it."""
    return _build_once(tmp_path_factory.getbasetemp() / "serve-encoder", 7)


@pytest.fixture(scope="session")
def other_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the artifact of an encoder with other weights."""
    return _build_once(tmp_path_factory.getbasetemp() / "serve-other-encoder", 8)


def _build_once(folder: Path, seed: int) -> Path:
    if not (folder / "artifact").is_dir():
        build_encoder(folder, seed)
    return folder / "artifact"


def copy_artifact(original: Path, folder: Path) -> Path:
    return Path(shutil.copytree(original, folder))


def copy_with_chaos(original: Path, folder: Path) -> Path:
    """Return a copy whose backend is the one of `chaos_backend`, with times of its own."""
    copy_artifact(original, folder)
    (folder / BUCKET_TIMES).unlink(missing_ok=True)

    def change(document: dict[str, Any]) -> None:
        document["compiled"]["backend"] = {"kind": "chaos"}

    update_manifest(folder, change)
    return folder


def install_chaos(folder: Path) -> dict[str, str]:
    """Install the backend as another package; return the environment that finds it."""
    shutil.copy(chaos_backend.__file__, folder / "chaos_backend.py")
    metadata = folder / "chaos-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: chaos\nVersion: 1.0\n")
    points = "[regauge.backends]\nchaos = chaos_backend:ChaosBackend\n"
    (metadata / "entry_points.txt").write_text(points)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)])}


def draw_texts(count: int, seed: int = 0, max_words: int = 28) -> list[str]:
    """Return texts of words without an effect on `chaos_backend`."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(f"w{word}" for word in draw.integers(5, chaos_backend.RAISES, length))
        for length in draw.integers(1, max_words, count)
    ]


class ServerProcess:
    """A process of `regauge serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log_file = log
        self.address = ""
        """The URL; empty until the server is ready."""

    @property
    def log(self) -> str:
        """The output of the server so far."""
        return self.log_file.read_text()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def workers(self) -> list[int]:
        """The ids of the worker processes."""
        return list_children(self.process.pid)

    def wait_until_ready(self) -> None:
        """Wait until the server accepts requests."""
        wait_for(lambda: READY.search(self.log) or self.process.poll() is not None, START_SECONDS)
        match = READY.search(self.log)
        assert match, self.log
        self.address = match[1]

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.address}{path}", json=body, timeout=300, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", timeout=300, **options)

    def embed(self, texts: str | list[str], **options: Any) -> np.ndarray:
        """Return the vectors of texts, which must be answered."""
        response = self.post("/embed", {"inputs": texts}, **options)
        assert response.status_code == 200, response.text
        return np.array(response.json(), np.float32)

    def health(self, name: str = "model") -> dict[str, Any]:
        """Return what `/health` tells of a model."""
        model: dict[str, Any] = self.get("/health").json()["models"][name]
        return model

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a stop signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)


@contextmanager
def start_server(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None, is_ready: bool = True
) -> Iterator[ServerProcess]:
    """Serve models on a free port; check that no process is left behind.

    The output is in `server.log` of the folder. `arguments` are those of the command; a model has
    one worker by default, on a machine of any size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    port = () if "--port" in arguments else ("--port", "0")
    is_counted = any(argument.startswith("serve.workers.count=") for argument in arguments)
    count = () if is_counted else ("serve.workers.count=1",)
    variables = {"PYTHONPATH": str(SOURCE), "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "regauge", "serve", *arguments, *port, *count],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **variables, **(environment or {})},
        )
    server = ServerProcess(process, log)
    children: list[int] = []
    try:
        if is_ready:
            server.wait_until_ready()
        yield server
        children = server.workers
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
    wait_for(lambda: not any(map(is_running, children)), 10)


def run_server(folder: Path, *arguments: str, **options: Any) -> tuple[int, str]:
    """Return the exit code and the output of a server that ends by itself."""
    with start_server(folder, *arguments, is_ready=False, **options) as server:
        return server.process.wait(START_SECONDS), server.log


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> float:
    """Poll a condition until it holds; return how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, "the condition did not hold in time"
        time.sleep(0.02)
    return time.monotonic() - start


def list_children(pid: int) -> list[int]:
    """Return the ids of the child processes of a process."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children.extend(map(int, path.read_text().split()))
    return children


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def read_resources(pid: int) -> tuple[float, int, int]:
    """Return the resident megabytes, the threads and the descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = dict(line.split(":", 1) for line in status.splitlines())
    megabytes = int(values["VmRSS"].split()[0]) / 1e3
    return megabytes, int(values["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir()))
