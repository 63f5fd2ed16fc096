"""Processes of one kind: started together, and replaced when they end."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from regauge.system.errors import ChildError, PreflightError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 30.0
"""Pause before a worker is replaced, which doubles while replacements fail to start."""
HEALTHY_SECONDS = 60.0
"""A worker that ran this long is replaced after the shortest pause."""


class ReplaceableWorker(Protocol):
    """A worker process that is ready."""

    started_at: float
    """When it was ready, by `time.monotonic`."""

    @property
    def pid(self) -> int:
        """The id of the process."""

    async def stop(self) -> None:
        """End the process."""


W = TypeVar("W", bound=ReplaceableWorker)
R = TypeVar("R")


class WorkerGroup(ABC, Generic[R, W]):
    """The workers of a model; a lost one is replaced until the group is stopped."""

    def __init__(
        self, requests: Sequence[R], on_change: Callable[[], object] = lambda: None
    ) -> None:
        """Take a request for each worker; `on_change` is called if `ready` has changed."""
        self._requests = requests
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self.ready: list[W] = []
        """The workers that compute."""
        self.num_replaced = 0
        """Number of workers that were lost."""
        self.start_seconds = 0.0
        """Time from the start of the workers until all were ready."""

    @abstractmethod
    async def _start_worker(self, request: R) -> W:
        """Start a worker; raises ChildError or PreflightError, after the process has ended."""

    @abstractmethod
    async def _wait_until_lost(self, worker: W) -> None:
        """Return when a worker has ended; end one that hangs."""

    async def start(self) -> None:
        """Start all workers; raises the error of one that does not start, after all have ended."""
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
        """End all workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.ready))
        self.ready = []

    async def _keep_alive(self, request: R, worker: W) -> None:
        """Replace a worker whenever it ends."""
        pause = MIN_PAUSE_SECONDS
        while True:
            await self._wait_until_lost(worker)
            self.num_replaced += 1
            self.ready.remove(worker)
            self._on_change()
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

    async def _start_replacement(self, request: R) -> W | None:
        """Return a new worker; None if it did not start."""
        try:
            return await self._start_worker(request)
        except (ChildError, PreflightError) as error:
            logger.error("A worker did not start: %s", error)
            return None
