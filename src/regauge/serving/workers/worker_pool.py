"""A model's worker processes: started together, watched, and replaced when they end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from regauge.serving.workers.worker_process import WorkerProcess
from regauge.serving.workers.worker_requests import build_load_requests
from regauge.system.errors import ChildError, PreflightError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from regauge.inference.export.artifact import Artifact
    from regauge.serving.settings import Serve
    from regauge.serving.workers.worker_requests import LoadRequest

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 30.0
"""Pause before a worker is replaced; doubled while replacements fail to start."""
HEALTHY_SECONDS = 60.0
"""After running this long, a worker is replaced after the shortest pause."""

W = TypeVar("W", bound=WorkerProcess)


class WorkerPool(Generic[W]):
    """A model's workers; a lost one is replaced until the pool is stopped."""

    def __init__(
        self,
        worker_class: type[W],
        artifact: Artifact,
        settings: Serve,
        on_change: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> None:
        """Take the model, and options for its `LoadRequest`.

        `on_change` is called when `ready` has changed.
        """
        self._worker_class = worker_class
        self._requests = build_load_requests(artifact, settings.workers, **options)
        self._settings = settings
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._content_sha256: str | None = None
        self.ready: list[W] = []
        """Workers that compute."""
        self.num_replaced = 0
        """How many workers were lost."""
        self.start_seconds = 0.0
        """Time from the first start until all workers were ready."""

    async def start(self) -> None:
        """Start all workers; if one fails to start, raises the error after all have ended."""
        start = time.monotonic()
        tasks = [asyncio.create_task(self._start_worker(request)) for request in self._requests]
        try:
            self.ready = list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            started = [result for result in results if not isinstance(result, BaseException)]
            await asyncio.gather(*(worker.stop() for worker in started))
            raise
        self.start_seconds = time.monotonic() - start
        self._tasks = [
            asyncio.create_task(self._keep_alive(request, worker))
            for request, worker in zip(self._requests, list(self.ready), strict=True)
        ]
        self._on_change()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.ready))
        self.ready = []

    async def _start_worker(self, request: LoadRequest) -> W:
        """Start a worker; raises ChildError or PreflightError, after the process has ended.

        A worker that has loaded another version than the first one is refused.
        """
        worker = await self._worker_class.start(request, self._settings)
        content_sha256 = worker.ready_header["content_sha256"]
        self._content_sha256 = self._content_sha256 or content_sha256
        if content_sha256 != self._content_sha256:
            await worker.stop()
            problem = f"the files of {request.origin} have changed"
            raise PreflightError(problem, "the new version is loaded if it is valid")
        return worker

    async def _keep_alive(self, request: LoadRequest, worker: W) -> None:
        pause = MIN_PAUSE_SECONDS
        while True:
            await worker.wait_until_lost()
            self.num_replaced += 1
            self.ready.remove(worker)
            self._on_change()
            worker.fail_requests()
            seconds = time.monotonic() - worker.started_at
            logger.warning("Worker %d ended after %.0f s; starting another", worker.pid, seconds)
            await worker.stop()
            pause = MIN_PAUSE_SECONDS if seconds > HEALTHY_SECONDS else pause
            replacement: W | None = None
            while replacement is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                replacement = await self._start_replacement(request)
            worker = replacement
            self.ready.append(worker)
            self._on_change()

    async def _start_replacement(self, request: LoadRequest) -> W | None:
        """Return a new worker, or None if it did not start."""
        try:
            return await self._start_worker(request)
        except (ChildError, PreflightError) as error:
            logger.error("A worker did not start: %s", error)
            return None
