"""The queue for texts whose token vectors are computed.

Workers compute them one text at a time, outside the scheduler's batches. At most one text per model
is computed at once, so other requests wait for no more than one of them per batch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from regauge.serving.request_errors import (
    DeadlineError,
    InferenceError,
    OverloadedError,
    UnavailableError,
)
from regauge.serving.workers.batch_worker import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from regauge.serving.dispatcher import RequestOptions
    from regauge.serving.workers.batch_worker import BatchWorker
    from regauge.serving.workers.worker_pool import WorkerPool

MAX_ATTEMPTS = 2
"""How many workers a text may crash."""
SMOOTHING = 0.2
"""Weight of a new measurement in the mean time per text."""


class TokenVectorQueue:
    """Computes the token vectors of texts for one model."""

    def __init__(self, pool: WorkerPool[BatchWorker]) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        self._seconds = 0.0
        self.num_waiting = 0
        """Number of texts not computed yet."""

    async def compute(
        self, texts: Sequence[np.ndarray], options: RequestOptions
    ) -> list[np.ndarray]:
        """Return each text's token vectors, [tokens, width] fp32.

        A text is its ids, [tokens] int32. Raises OverloadedError, UnavailableError, DeadlineError,
        or InferenceError if a text fails.
        """
        self._check_room(len(texts), options)
        self.num_waiting += len(texts)
        computed: list[np.ndarray] = []
        try:
            async with asyncio.timeout(options.timeout_seconds):
                for index, ids in enumerate(texts):
                    async with self._turn:  # in the order of arrival, so requests alternate
                        computed.append(await self._compute_text(index, ids))
                    self.num_waiting -= 1
        except TimeoutError:
            raise DeadlineError("the request was not answered in time") from None
        finally:
            self.num_waiting -= len(texts) - len(computed)
        return computed

    def _check_room(self, count: int, options: RequestOptions) -> None:
        """Raise OverloadedError if a request with `count` texts would be late."""
        seconds = (self.num_waiting + count) * self._seconds
        limit = options.timeout_seconds
        if seconds > limit:
            problem = f"the expected time of {seconds:.1f} s is over the limit of {limit:.1f} s"
            raise OverloadedError(problem, retry_after=max(1, round(seconds - limit)))

    async def _compute_text(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Compute one text; again if the worker ends."""
        for _ in range(MAX_ATTEMPTS):
            if not self._pool.ready:
                seconds = max(1, round(self._pool.start_seconds))
                raise UnavailableError("no worker is ready", retry_after=seconds)
            worker = min(self._pool.ready, key=lambda item: item.num_batches)
            try:
                message = await worker.compute({"type": "token_vectors"}, [ids])
            except WorkerLostError:
                continue
            if message.header["type"] == "failure":
                raise InferenceError(f"record {index} failed: {message.header['problem']}")
            self._seconds += SMOOTHING * (message.header["milliseconds"] / 1e3 - self._seconds)
            [vectors] = message.arrays
            return vectors
        raise InferenceError(f"record {index} failed: workers ended while they computed it")
