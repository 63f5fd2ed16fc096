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

from regauge.serving.wire import encode_message, read_message
from regauge.serving.workers.worker_group import WorkerGroup
from regauge.serving.workers.worker_process import spawn_worker, wait_for_exit
from regauge.system.errors import ChildError, PreflightError
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from regauge.serving.settings import WorkerSettings
    from regauge.serving.wire import Message
    from regauge.serving.workers.engine_worker import WorkerRequest
    from regauge.serving.workers.worker_process import Process

MODULE = "regauge.serving.workers.engine_worker"
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

    def __init__(
        self,
        process: Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        ready_header: dict[str, Any],
        hang_timeout_seconds: float,
    ) -> None:
        """Take a process that is ready, and the streams of its socket."""
        self.ready_header = ready_header
        """The message that it is ready."""
        self.started_at = time.monotonic()
        """When it was ready, by `time.monotonic`."""
        self._process = process
        self._reader, self._writer = streams
        self._hang_timeout_seconds = hang_timeout_seconds
        self._answers: deque[asyncio.Future[Message]] = deque()
        self._hang_timer: asyncio.TimerHandle | None = None
        self._numbers = 0

    @classmethod
    async def start(cls, request: WorkerRequest, settings: WorkerSettings) -> WorkerProcess:
        """Start a process and wait until its model is loaded.

        Raises ChildError with the error of the worker, and PreflightError if it ends without one or
        takes too long.
        """
        process, connection = spawn_worker(MODULE, request.to_header())
        streams = await asyncio.open_connection(sock=connection, limit=MAX_MESSAGE_BYTES)
        try:
            header = await _read_ready_header(request.origin, streams[0], settings)
        except BaseException:
            streams[1].close()
            process.kill()
            process.wait()
            raise
        return cls(process, streams, header, settings.hang_timeout_seconds)

    @property
    def num_batches(self) -> int:
        """Number of batches that it has not answered."""
        return len(self._answers)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

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
        self._writer.close()
        await wait_for_exit(self._process, EXIT_SECONDS)
        is_running = True
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(WorkerLostError(is_running=is_running))
            is_running = False

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def _restart_timer(self) -> None:
        if self._hang_timer is not None:
            self._hang_timer.cancel()
            self._hang_timer = None
        if self._answers:
            loop = asyncio.get_running_loop()
            self._hang_timer = loop.call_later(self._hang_timeout_seconds, self._end_hang)

    def _end_hang(self) -> None:
        seconds = self._hang_timeout_seconds
        logger.warning("Worker %d computed one batch for %g s; replacing it", self.pid, seconds)
        self.kill()


class WorkerPool(WorkerGroup["WorkerRequest", WorkerProcess]):
    """The workers of a model that compute batches."""

    def __init__(
        self,
        requests: Sequence[WorkerRequest],
        settings: WorkerSettings,
        on_change: Callable[[], object],
    ) -> None:
        """Take a request for each worker; `on_change` is called if `ready` has changed."""
        super().__init__(requests, on_change)
        self._settings = settings
        self._content_sha256: str | None = None

    async def _start_worker(self, request: WorkerRequest) -> WorkerProcess:
        """Start a worker; raises PreflightError if it has loaded another version than the first."""
        worker = await WorkerProcess.start(request, self._settings)
        content_sha256 = worker.ready_header["content_sha256"]
        self._content_sha256 = self._content_sha256 or content_sha256
        if content_sha256 != self._content_sha256:
            await worker.stop()
            problem = f"the files of {request.origin} have changed"
            raise PreflightError(problem, "the new version is loaded if it is valid")
        return worker

    async def _wait_until_lost(self, worker: WorkerProcess) -> None:
        await worker.read_answers()


async def _read_ready_header(
    path: str, reader: asyncio.StreamReader, settings: WorkerSettings
) -> dict[str, Any]:
    """Return the first message of a worker; raises ChildError or PreflightError."""
    seconds = settings.start_timeout_seconds
    try:
        message = await asyncio.wait_for(read_message(reader), seconds)
    except TimeoutError:
        problem = f"{path} was not ready within {seconds:g} s"
        raise PreflightError(problem, "raise serve.workers.start_timeout_seconds") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        problem = f"a worker of {path} ended while it loaded the model"
        raise PreflightError(problem, "see its messages above") from None
    header = message.header
    if header["type"] == "error":
        raise ChildError(header["code"], f"{header['error']}; {header['remedy']}")
    return header
