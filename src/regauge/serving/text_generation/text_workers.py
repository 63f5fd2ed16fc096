"""The worker processes that generate text with one model: started, watched and replaced.

A request goes to the worker with the fewest requests. A worker that ends, whose step takes too
long, or that sends no heartbeat is replaced; its requests fail.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from regauge import choices
from regauge.errors import ChildError, PreflightError
from regauge.log import logger
from regauge.processes import die_with_parent
from regauge.serving.request_errors import UnavailableError
from regauge.serving.text_generation.text_client import TextWorkerClient
from regauge.serving.wire import encode_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from regauge.models.settings import Generation
    from regauge.serving.text_generation.settings import TextServing
    from regauge.serving.text_generation.text_client import TokenStream
    from regauge.serving.text_generation.text_requests import EngineLimits
    from regauge.serving.text_generation.text_worker import TextWorkerRequest

MODULE = "regauge.serving.text_generation.text_worker"
WATCH_SECONDS = 1.0
"""Time between two looks at the heartbeats."""
EXIT_SECONDS = 5.0
"""Time in which a worker ends after its socket is closed."""
POLL_SECONDS = 0.02
"""Time between two looks whether a process has ended."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 30.0
"""Pause before a worker is replaced, which doubles while replacements fail."""
HEALTHY_SECONDS = 60.0
"""A worker that ran this long is replaced after the shortest pause."""


class TextWorkerProcess:
    """A worker process with its client."""

    def __init__(self, process: subprocess.Popen[bytes], client: TextWorkerClient) -> None:
        self._process = process
        self.client = client
        """The client of the worker."""
        self.start_time = time.monotonic()
        """When the worker was ready."""

    @classmethod
    async def start(
        cls, request: TextWorkerRequest, settings: TextServing, timeout_seconds: float
    ) -> TextWorkerProcess:
        """Start a process and wait until its model is loaded.

        Raises ChildError with the error of the worker, and PreflightError if it ends without one or
        takes too long.
        """
        process, connection = _spawn_worker(request)
        try:
            async with asyncio.timeout(timeout_seconds):
                return cls(process, await TextWorkerClient.connect(connection, settings))
        except BaseException as error:
            connection.close()
            process.kill()
            process.wait()
            if isinstance(error, TimeoutError):
                problem = f"{request.path} was not ready within {timeout_seconds:g} s"
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
        deadline = time.monotonic() + EXIT_SECONDS
        self.client.request_end()
        while self._process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(POLL_SECONDS)
        self.kill()
        self._process.wait()
        await self.client.close()


class TextWorkers:
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
        self._requests = requests
        self._settings = settings
        self._start_timeout_seconds = start_timeout_seconds
        self._hang_timeout_seconds = hang_timeout_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._limits: EngineLimits | None = None
        self.ready: list[TextWorkerProcess] = []
        """The workers that generate."""
        self.num_replaced = 0
        """Number of workers that were lost."""

    @property
    def limits(self) -> EngineLimits:
        """The limits of a request."""
        if self._limits is None:
            raise TypeError("the workers were not started")
        return self._limits

    async def start(self) -> None:
        """Start all workers; raises the error of one that does not start, after all have ended."""
        results = await asyncio.gather(
            *(self._start_worker(request) for request in self._requests), return_exceptions=True
        )
        self.ready = [result for result in results if isinstance(result, TextWorkerProcess)]
        for result in results:
            if isinstance(result, BaseException):
                await self.stop()
                raise result
        self._limits = self.ready[0].client.limits
        self._tasks = [
            asyncio.create_task(self._keep_alive(request, worker), name="text-workers")
            for request, worker in zip(self._requests, list(self.ready), strict=True)
        ]

    async def stop(self) -> None:
        """End all workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.ready))
        self.ready = []

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
        timeout_seconds = self._start_timeout_seconds
        return await TextWorkerProcess.start(request, self._settings, timeout_seconds)

    async def _keep_alive(self, request: TextWorkerRequest, worker: TextWorkerProcess) -> None:
        """Replace a worker whenever it ends."""
        pause = MIN_PAUSE_SECONDS
        while True:
            await self._watch(worker)
            self.num_replaced += 1
            self.ready.remove(worker)
            seconds = time.monotonic() - worker.start_time
            logger.warning("Text worker %d ended after %.0f s; replacing it", worker.pid, seconds)
            await worker.stop()
            pause = MIN_PAUSE_SECONDS if seconds > HEALTHY_SECONDS else pause
            worker = await self._replace(request, pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _watch(self, worker: TextWorkerProcess) -> None:
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

    async def _replace(self, request: TextWorkerRequest, pause: float) -> TextWorkerProcess:
        """Return a new worker; tries again after longer and longer pauses."""
        while True:
            await asyncio.sleep(pause)
            try:
                worker = await self._start_worker(request)
            except (ChildError, PreflightError) as error:
                logger.error("A text worker did not start: %s", error)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
            else:
                self.ready.append(worker)
                return worker


def _spawn_worker(request: TextWorkerRequest) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process and send its request; return it with the socket to it."""
    connection, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(descriptor)],
            env={**os.environ, **choices.module_folders_environment()},
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            # Only the child can request this. It takes no lock that a parent thread may hold.
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
    connection.sendall(encode_message(request.to_header()))
    connection.settimeout(0)
    return process, connection
