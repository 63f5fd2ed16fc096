"""A worker process as the server sees it: its start, the messages on the socket, and its end."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

from regauge.serving.wire import SOCKET_BYTES, encode_message, read_message
from regauge.system import children
from regauge.system.errors import ChildError, PreflightError
from regauge.system.log import logger
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    import subprocess

    from regauge.serving.settings import Serve
    from regauge.serving.wire import Message
    from regauge.serving.workers.worker_requests import LoadRequest

COMMAND = (sys.executable, "-m", "regauge.serving.workers.worker_main")
MAX_MESSAGE_BYTES = 1 << 30


class WorkerProcess(ABC):
    """A worker process that has loaded its model."""

    exit_seconds: ClassVar[float]
    """Time for a worker to end after its last request; then it is killed."""
    silence_problem: ClassVar[str]
    """What a worker did for too long before it is replaced."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        ready_header: dict[str, Any],
        settings: Serve,
    ) -> None:
        """Take a ready process, and the socket's streams."""
        self.ready_header = ready_header
        """The message that it is ready."""
        self.started_at = time.monotonic()
        """When it was ready, on time.monotonic()."""
        self._process = process
        self._reader, self._writer = streams
        self._settings = settings
        self.reading = asyncio.create_task(self._read())
        """Handles the process's messages; done when the process has ended."""

    @classmethod
    async def start(cls, request: LoadRequest, settings: Serve) -> Self:
        """Start a process and wait until the model is loaded.

        Raises ChildError with the worker's error, and PreflightError if it ends without one or
        takes too long.
        """
        process, connection = children.connect(COMMAND)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        connection.sendall(encode_message(request.to_header()))
        connection.settimeout(0)
        streams = await asyncio.open_connection(sock=connection, limit=MAX_MESSAGE_BYTES)
        try:
            seconds = settings.workers.start_timeout_seconds
            header = await _read_ready_header(request.origin, streams[0], seconds)
        except BaseException:
            streams[1].close()
            process.kill()
            process.wait()
            raise
        return cls(process, streams, header, settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has closed its socket."""
        return self.reading.done()

    @property
    @abstractmethod
    def silent_seconds(self) -> float:
        """How long an answer has been due; 0 if the process has nothing to compute."""

    @abstractmethod
    def _handle(self, message: Message) -> None:
        """Handle a message from the process."""

    @abstractmethod
    def fail_requests(self) -> None:
        """Fail the unanswered requests, because the process has ended."""

    async def wait_until_lost(self) -> None:
        """Return when the process has ended; it is killed if silent for too long."""
        limit = self._settings.workers.hang_timeout_seconds
        while not self.has_ended and self.silent_seconds < limit:
            seconds = max(POLL_SECONDS, limit - self.silent_seconds)
            await asyncio.wait([self.reading], timeout=seconds)
        if not self.has_ended:
            message = "Worker %d %s for %g s; replacing it"
            logger.warning(message, self.pid, self.silence_problem, limit)
            self._process.kill()
            await asyncio.wait([self.reading])

    async def stop(self) -> None:
        """End the process; unanswered requests fail."""
        if not self._writer.is_closing():
            self._writer.write_eof()
        deadline = time.monotonic() + self.exit_seconds
        try:
            while self._process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._process.kill()
        self._process.wait()
        self._writer.close()
        await asyncio.wait([self.reading])
        with suppress(OSError):  # the process may have closed the connection
            await self._writer.wait_closed()
        self.fail_requests()

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._handle(await read_message(self._reader))


async def _read_ready_header(
    path: str, reader: asyncio.StreamReader, seconds: float
) -> dict[str, Any]:
    """Return a worker's first message; raises ChildError or PreflightError."""
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
