"""A worker process that computes batches, in the order received."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from regauge.serving.wire import encode_message
from regauge.serving.workers.worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from regauge.serving.wire import Message


class WorkerLostError(Exception):
    """The worker ended before it answered a batch."""

    def __init__(self, *, is_running: bool) -> None:
        super().__init__("the worker ended")
        self.is_running = is_running
        """Whether it was computing this batch, and not an earlier one."""


class BatchWorker(WorkerProcess):
    """A worker process and the batches sent to it.

    If it ends, the batch it was computing is reported as lost while running, and the batches
    waiting in the socket as not started.
    """

    exit_seconds = 2.0
    silence_problem = "computed one batch"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answers: deque[asyncio.Future[Message]] = deque()
        self._began_at = 0.0
        """When it began to compute the first of these batches."""
        self._numbers = 0

    @property
    def num_batches(self) -> int:
        """Number of unanswered batches."""
        return len(self._answers)

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._began_at if self._answers else 0.0

    def compute(
        self, header: dict[str, Any], arrays: Sequence[np.ndarray]
    ) -> asyncio.Future[Message]:
        """Send a batch; the future is the answer, or raises WorkerLostError."""
        self._numbers += 1
        batch = {"type": "batch", **header, "id": self._numbers}
        self._writer.write(encode_message(batch, arrays))
        if not self._answers:
            self._began_at = time.monotonic()
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        return answer

    def _handle(self, message: Message) -> None:
        answer = self._answers.popleft()
        self._began_at = time.monotonic()
        if not answer.done():
            answer.set_result(message)

    def fail_requests(self) -> None:
        is_running = True
        while self._answers:
            answer = self._answers.popleft()
            if not answer.done():
                answer.set_exception(WorkerLostError(is_running=is_running))
            is_running = False
