"""A server of one causal model on a loopback port, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from regauge.serving.api_keys import ApiKeys
from regauge.serving.http_server import HttpServer
from regauge.serving.runtime import ServingRuntime
from regauge.serving.settings import HttpSettings, QueueSettings, Serve, WorkerSettings
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.text_client import TextWorker
from regauge.serving.text_generation.text_version import TextVersion
from regauge.serving.workers.worker_pool import WorkerPool

MODEL_NAME = "writer"
MAX_BODY_BYTES = 100_000
START_SECONDS = 120


class OneModel:
    """A server with one model, and its state."""

    def __init__(self, folder: Path, generation: TextServing) -> None:
        settings = Serve(
            artifacts={MODEL_NAME: str(folder)},
            generation=generation,
            http=HttpSettings(max_body_bytes=MAX_BODY_BYTES),
            queue=QueueSettings(timeout_seconds=0.001),  # of embeddings,
            workers=WorkerSettings(threads=1, hang_timeout_seconds=30.0),
        )
        self._executor = ThreadPoolExecutor(1)
        self.runtime = ServingRuntime(settings, ApiKeys([]), self._executor)
        self.context = self.runtime.context
        self.server = HttpServer(self.context, self.runtime.app)
        self.is_ready = threading.Event()

    async def run(self, listener: socket.socket) -> None:
        """Serve until the server is told to exit."""
        with self._executor:
            try:
                await self.runtime.start()
                await self.context.run_in_thread(int)  # starts the thread
                self.is_ready.set()
                await self.server.serve(sockets=[listener])
            finally:
                await self.runtime.stop()

    @property
    def version(self) -> TextVersion:
        """The loaded version of the model."""
        return cast("TextVersion", self.context.models.find(None).current)

    @property
    def workers(self) -> WorkerPool[TextWorker]:
        """The workers of the model."""
        return self.version.pool

    @property
    def num_open(self) -> int:
        """Number of requests that are being answered."""
        return sum(map(len, self.context.tasks.values()))

    @property
    def num_requests(self) -> int:
        """Number of requests that the workers have."""
        return sum(worker.num_requests for worker in self.workers.ready)


@contextlib.contextmanager
def serve(folder: Path, generation: TextServing) -> Iterator[tuple[str, OneModel]]:
    """Serve a model; yield the address and the server."""
    model = OneModel(folder, generation)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=_run, args=(model, listener), name="text-server")
        thread.start()
        try:
            while not model.is_ready.wait(0.1) and thread.is_alive():
                pass
            assert model.is_ready.is_set()
            yield f"http://127.0.0.1:{port}", model
        finally:
            model.server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


def _run(model: OneModel, listener: socket.socket) -> None:
    with asyncio.Runner() as runner:
        runner.run(model.run(listener))
