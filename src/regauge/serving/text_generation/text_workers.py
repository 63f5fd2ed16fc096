"""The worker processes that generate text with one model: started, watched and replaced.

A request goes to the worker with the fewest requests. A worker that ends, whose step takes too
long, or that sends no heartbeat is replaced; its requests fail.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from regauge.serving.request_errors import UnavailableError
from regauge.serving.text_generation.text_client import TextWorkerClient
from regauge.serving.workers.worker_group import WorkerGroup
from regauge.serving.workers.worker_process import spawn_worker, wait_for_exit
from regauge.system.errors import PreflightError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from regauge.models.settings import Generation
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_client import TokenStream
    from regauge.serving.text_generation.text_requests import EngineLimits
    from regauge.serving.text_generation.text_worker import TextWorkerRequest
    from regauge.serving.workers.worker_process import Process

MODULE = "regauge.serving.text_generation.text_worker"
WATCH_SECONDS = 1.0
"""Time between two looks at the heartbeats."""
EXIT_SECONDS = 5.0
"""Time in which a worker ends after its socket is closed."""


class TextWorkerProcess:
    """A worker process with its client."""

    def __init__(self, process: Process, client: TextWorkerClient) -> None:
        self._process = process
        self.client = client
        """The client of the worker."""
        self.started_at = time.monotonic()
        """When it was ready, by `time.monotonic`."""

    @classmethod
    async def start(
        cls, request: TextWorkerRequest, settings: TextServing, timeout_seconds: float
    ) -> TextWorkerProcess:
        """Start a process and wait until its model is loaded.

        Raises ChildError with the error of the worker, and PreflightError if it ends without one or
        takes too long.
        """
        process, connection = spawn_worker(MODULE, request.to_header())
        try:
            async with asyncio.timeout(timeout_seconds):
                return cls(process, await TextWorkerClient.connect(connection, settings))
        except BaseException as error:
            connection.close()
            process.kill()
            process.wait()
            if isinstance(error, TimeoutError):
                problem = f"{request.origin} was not ready within {timeout_seconds:g} s"
                remedy = "raise serve.workers.start_timeout_seconds"
                raise PreflightError(problem, remedy) from None
            raise

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def silent_seconds(self) -> float:
        """How long the current step takes, or how long no message came, if that is longer."""
        silence = time.monotonic() - self.client.last_message
        return max(silence, self.client.heartbeat.step_seconds)

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    async def stop(self) -> None:
        """End the process; it is killed if it does not end by itself."""
        self.client.request_end()
        await wait_for_exit(self._process, EXIT_SECONDS)
        await self.client.close()


class TextWorkers(WorkerGroup["TextWorkerRequest", TextWorkerProcess]):
    """The workers of a causal model, with one queue of requests for each."""

    def __init__(
        self,
        requests: Sequence[TextWorkerRequest],
        settings: TextServing,
        *,
        start_timeout_seconds: float,
        hang_timeout_seconds: float,
    ) -> None:
        """Take a request for each worker, and the times after which a worker is given up."""
        super().__init__(requests)
        self._settings = settings
        self._start_timeout_seconds = start_timeout_seconds
        self._hang_timeout_seconds = hang_timeout_seconds
        self._limits: EngineLimits | None = None

    @property
    def limits(self) -> EngineLimits:
        """The limits of a request."""
        if self._limits is None:
            raise TypeError("the workers were not started")
        return self._limits

    def start_answer(
        self,
        prompt: np.ndarray,
        generation: Generation,
        number: int = 0,
        timeout_seconds: float | None = None,
    ) -> TokenStream:
        """Send a request to the worker with the fewest; see `TextWorkerClient.start_answer`."""
        workers = [worker.client for worker in self.ready if worker.client.is_alive]
        if not workers:
            raise UnavailableError("no process that generates text is ready", retry_after=1)
        client = min(workers, key=lambda worker: worker.num_requests)
        return client.start_answer(prompt, generation, number, timeout_seconds)

    async def _start_worker(self, request: TextWorkerRequest) -> TextWorkerProcess:
        seconds = self._start_timeout_seconds
        worker = await TextWorkerProcess.start(request, self._settings, seconds)
        self._limits = self._limits or worker.client.limits
        return worker

    async def _wait_until_lost(self, worker: TextWorkerProcess) -> None:
        """Return when a worker has ended; one that hangs is killed."""
        while worker.client.is_alive:
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await worker.client.wait_until_lost()
            except TimeoutError:
                if worker.silent_seconds > self._hang_timeout_seconds:
                    message = "Text worker %d gave no token for %.0f s; replacing it"
                    logger.warning(message, worker.pid, worker.silent_seconds)
                    worker.kill()
