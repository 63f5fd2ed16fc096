"""A loaded version of a causal model: its tokenizer, and the workers that generate text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.serving.loaded_version import LoadedVersion
from regauge.serving.text_generation.served_text_model import ServedTextModel
from regauge.serving.text_generation.text_worker import TextWorkerRequest
from regauge.serving.text_generation.text_workers import TextWorkers
from regauge.serving.workers.worker_requests import build_load_requests

if TYPE_CHECKING:
    from regauge.inference.export.artifact import Artifact
    from regauge.serving.settings import Serve


class TextVersion(LoadedVersion):
    """A version of a causal model that answers requests."""

    def __init__(self, name: str, artifact: Artifact, settings: Serve) -> None:
        """Take the name of the model in requests, and its artifact."""
        super().__init__(artifact)
        self._name = name
        limits = settings.workers
        table = settings.generation.model_dump()
        requests = [
            TextWorkerRequest(**request.to_header(), settings=table)
            for request in build_load_requests(artifact, limits)
        ]
        self.workers = TextWorkers(
            requests,
            settings.generation,
            start_timeout_seconds=limits.start_timeout_seconds,
            hang_timeout_seconds=limits.hang_timeout_seconds,
        )
        """The worker processes."""
        self._model: ServedTextModel | None = None

    async def start(self) -> None:
        await self.workers.start()
        self._model = ServedTextModel(self._name, self.artifact, self.workers)
        self.content_sha256 = self.artifact.content_sha256

    async def stop(self) -> None:
        await self.workers.stop()

    @property
    def model(self) -> ServedTextModel:
        """The model as the routes see it."""
        if self._model is None:
            raise RuntimeError("the version has not started")
        return self._model

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self.workers.ready]

    @property
    def num_replaced(self) -> int:
        return self.workers.num_replaced

    @property
    def num_waiting(self) -> int:
        return sum(worker.client.heartbeat.waiting for worker in self.workers.ready)

    def estimate_wait(self) -> float:
        """Return 0: the time of a generated text is unknown before its end."""
        return 0.0

    def is_overloaded(self, max_wait_seconds: float) -> bool:
        """Return False: a full queue of a text model refuses each request by itself."""
        del max_wait_seconds
        return False
