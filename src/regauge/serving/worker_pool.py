"""The worker processes of a model: started, watched and replaced.

A worker that ends, or that computes one batch for too long, is replaced. The batch that it was
computing is reported as lost while running, and the batches that waited in its socket as not
started.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge.errors import ChildError, PreflightError
from regauge.log import logger
from regauge.serving.wire import encode_message, read_message
from regauge.serving.worker_process import (
    HEALTHY_SECONDS,
    MAX_PAUSE_SECONDS,
    MIN_PAUSE_SECONDS,
    Process,
    spawn_worker,
    wait_for_exit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from regauge.serving.engine_worker import WorkerRequest
    from regauge.serving.settings import WorkerSettings
    from regauge.serving.wire import Message

MODULE = "regauge.serving.engine_worker"
MAX_MESSAGE_BYTES = 1 << 30
EXIT_SECONDS = 2.0
"""Time in which a worker ends after its socket is closed."""


class WorkerLostError(Exception):
    """The worker ended before it answered a batch."""

    def __init__(self, *, is_running: bool) -> None:
        super().__init__("the worker ended")
        self.is_running = is_running
        """Whether it was computing this batch, and not an earlier one."""


class WorkerProcess:
    """A worker process and the batches that it was sent."""

    def __init__(self, request: WorkerRequest, settings: WorkerSettings) -> None:
        self._request = request
        self._settings = settings
        self._process: Process | None = None
        self._answers: deque[asyncio.Future[Message]] = deque()
        self._hang_timer: asyncio.TimerHandle | None = None
        self._numbers = 0
        self.started_at = time.monotonic()

    @property
    def num_batches(self) -> int:
        """Number of batches that it has not answered."""
        return len(self._answers)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid if self._process else 0

    async def start(self) -> dict[str, Any]:
        """Start the process and return its `ready` message.

        Raises ChildError with the error of the worker, and PreflightError if it ends without one or
        takes too long.
        """
        process, connection = spawn_worker(MODULE, self._request.to_header())
        self._process = process
        self._reader, self._writer = await asyncio.open_connection(
            sock=connection, limit=MAX_MESSAGE_BYTES
        )
        try:
            seconds = self._settings.start_timeout_seconds
            message = await asyncio.wait_for(read_message(self._reader), seconds)
        except TimeoutError:
            problem = f"{self._request.path} was not ready within {seconds:g} s"
            raise PreflightError(problem, "raise serve.workers.start_timeout_seconds") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            problem = f"a worker of {self._request.path} ended while it loaded the model"
            raise PreflightError(problem, "see its messages above") from None
        header = message.header
        if header["type"] == "error":
            raise ChildError(header["code"], f"{header['error']}; {header['remedy']}")
        self.started_at = time.monotonic()
        return header

    async def read_answers(self) -> None:
        """Resolve the batches as they are answered; return when the process has ended."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = await read_message(self._reader)
                answer = self._answers.popleft()
                self._restart_timer()
                if not answer.done():
                    answer.set_result(message)

    def compute(
        self, header: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> asyncio.Future[Message]:
        """Send a batch; the future is its answer, or raises WorkerLostError."""
        self._numbers += 1
        batch = {"type": "batch", **header, "id": self._numbers}
        self._writer.write(encode_message(batch, arrays))
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        if len(self._answers) == 1:
            self._restart_timer()
        return answer

    async def stop(self) -> None:
        """End the process; batches without an answer are lost."""
        if self._hang_timer is not None:
            self._hang_timer.cancel()
        if hasattr(self, "_writer"):
            self._writer.close()
        process = self._process
        if process is not None:
            await wait_for_exit(process, EXIT_SECONDS)
        is_running = True
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(WorkerLostError(is_running=is_running))
            is_running = False

    def kill(self) -> None:
        """Kill the process at once."""
        if self._process is not None:
            self._process.kill()

    def _restart_timer(self) -> None:
        if self._hang_timer is not None:
            self._hang_timer.cancel()
            self._hang_timer = None
        if self._answers:
            loop = asyncio.get_running_loop()
            self._hang_timer = loop.call_later(self._settings.hang_timeout_seconds, self._end_hang)

    def _end_hang(self) -> None:
        seconds = self._settings.hang_timeout_seconds
        logger.warning("Worker %d computed one batch for %g s; replacing it", self.pid, seconds)
        self.kill()


class WorkerPool:
    """The workers of a model; a lost one is replaced until the pool is stopped."""

    def __init__(
        self,
        requests: Sequence[WorkerRequest],
        settings: WorkerSettings,
        on_change: Callable[[], object],
    ) -> None:
        """Take a request for each worker; `on_change` is called if `ready` has changed."""
        self._requests = requests
        self._settings = settings
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: set[WorkerProcess] = set()
        self.ready: list[WorkerProcess] = []
        """The workers that compute batches."""
        self._content_sha256 = ""
        self.num_replaced = 0
        """Number of workers that were lost."""
        self.start_seconds = 0.0
        """Time from the start of a worker until it was ready."""

    async def start(self) -> dict[str, Any]:
        """Start all workers; return the `ready` message of the first one.

        Raises the error of a worker that does not start; the others are then stopped.
        """
        start = time.monotonic()
        workers = [WorkerProcess(request, self._settings) for request in self._requests]
        self._starting.update(workers)
        try:
            headers = await asyncio.gather(*(worker.start() for worker in workers))
        except BaseException:
            await asyncio.gather(*(worker.stop() for worker in workers))
            raise
        finally:
            self._starting.difference_update(workers)
        self.start_seconds = time.monotonic() - start
        self._content_sha256 = headers[0]["content_sha256"]
        self.ready = workers
        self._tasks = [
            asyncio.create_task(self._keep_alive(request, worker))
            for request, worker in zip(self._requests, workers, strict=True)
        ]
        self._on_change()
        return headers[0]

    async def stop(self) -> None:
        """Stop all workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in (*self.ready, *self._starting)))
        self.ready = []

    async def _keep_alive(self, request: WorkerRequest, worker: WorkerProcess | None) -> None:
        """Replace a worker whenever it ends."""
        pause = MIN_PAUSE_SECONDS
        while True:
            if worker is not None:
                await worker.read_answers()
                self.num_replaced += 1
                self.ready.remove(worker)
                self._on_change()
                ran_seconds = time.monotonic() - worker.started_at
                if ran_seconds > HEALTHY_SECONDS:
                    pause = MIN_PAUSE_SECONDS
                logger.warning(
                    "Worker %d ended after %.0f s; starting another", worker.pid, ran_seconds
                )
                await worker.stop()
            await asyncio.sleep(pause)
            worker = await self._start_replacement(request)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _start_replacement(self, request: WorkerRequest) -> WorkerProcess | None:
        """Return a new worker; None if it did not start."""
        worker = WorkerProcess(request, self._settings)
        try:
            header = await worker.start()
            _check_content(request, header, self._content_sha256)
        except (ChildError, PreflightError) as error:
            logger.error("A worker did not start: %s", error)
            await worker.stop()
            return None
        except asyncio.CancelledError:
            await worker.stop()
            raise
        self.ready.append(worker)
        self._on_change()
        return worker


def _check_content(request: WorkerRequest, header: dict[str, Any], sha256: str) -> None:
    """Raise PreflightError if a worker has loaded another version than the first one."""
    if header["content_sha256"] != sha256:
        problem = f"the files of {request.path} have changed"
        raise PreflightError(problem, "the new version is loaded if it is valid")
