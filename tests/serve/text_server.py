"""A server of one causal model on a loopback port, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from regauge.artifacts.uncompiled import open_model
from regauge.serving.request_errors import UnknownModelError
from regauge.serving.routes.openai_text import build_routes
from regauge.serving.text_generation.served_text_model import ServedTextModel
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.text_worker import TextWorkerRequest
from regauge.serving.text_generation.text_workers import TextWorkers

MODEL_NAME = "writer"


class OneModel:
    """The context of the routes: a server with one model."""

    max_body_bytes = 100_000
    timeout_seconds: float | None = 60.0

    def __init__(self, folder: Path, serving: TextServing) -> None:
        self.folder = folder
        request = TextWorkerRequest(str(folder), serving.model_dump(), threads=1)
        self.workers = TextWorkers(
            [request], serving, start_timeout_seconds=120, hang_timeout_seconds=30
        )
        self.num_open = 0
        self.model: ServedTextModel | None = None

    @contextlib.asynccontextmanager
    async def run(self, _: Starlette) -> AsyncIterator[None]:
        await self.workers.start()
        client: Any = self.workers
        self.model = ServedTextModel(MODEL_NAME, open_model(str(self.folder)), client)
        try:
            yield
        finally:
            await self.workers.stop()

    @contextlib.asynccontextmanager
    async def use_text_model(self, name: str | None) -> AsyncIterator[ServedTextModel]:
        if self.model is None or name not in {None, MODEL_NAME}:
            raise UnknownModelError(f"no model '{name}'")
        self.num_open += 1
        try:
            yield self.model
        finally:
            self.num_open -= 1

    @property
    def num_requests(self) -> int:
        """Number of requests that the workers have."""
        return sum(worker.client.num_requests for worker in self.workers.ready)


@contextlib.contextmanager
def serve(folder: Path, serving: TextServing) -> Iterator[tuple[str, OneModel]]:
    """Serve a model; yield the address and the context of the routes."""
    context = OneModel(folder, serving)
    app = Starlette(routes=build_routes(context), lifespan=context.run)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_run, args=(server, listener), name="text-server")
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.1)
        assert server.started
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", context
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
    assert not thread.is_alive()


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    with asyncio.Runner() as runner:
        runner.run(server.serve(sockets=[listener]))
