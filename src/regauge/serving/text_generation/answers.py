"""Answers being generated: their text parts, alone or merged from several."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from regauge.serving.request_errors import InferenceError, RequestError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy as np

    from regauge.models.settings import Generation
    from regauge.serving.text_generation.text_requests import TokenEvent
    from regauge.serving.text_generation.text_version import TextVersion


class Answer:
    """One answer to a prompt, as it is generated."""

    def __init__(
        self,
        model: TextVersion,
        index: int,
        prompt: np.ndarray,
        generation: Generation,
        timeout_seconds: float | None,
    ) -> None:
        """Send the request to a worker; raises the errors of `TextWorker.start_answer`."""
        self.index = index
        """Index in the request."""
        self.num_tokens = 0
        """How many tokens the answer has so far."""
        self.finish_reason: str | None = None
        """`stop` or `length` after the end."""
        self._text = model.build_answer(generation)
        self._stream = model.start_answer(prompt, generation, index, timeout_seconds)

    async def read_parts(self) -> AsyncIterator[str]:
        """Yield the text's parts; raises RequestError if the answer fails."""
        while events := await self._stream.read():
            part = self._add(events)
            if self.finish_reason is not None:
                self._stream.close()
            if part:
                yield part
            if self.finish_reason is not None:
                return

    async def collect_text(self) -> str:
        return "".join([part async for part in self.read_parts()])

    def close(self) -> None:
        """Cancel the answer if it has not ended."""
        self._stream.close()

    def _add(self, events: Sequence[TokenEvent]) -> str:
        """Return the text added by events."""
        part = ""
        for event in events:
            if event.token is not None:
                part += self._text.add([event.token])
                self.num_tokens += 1
                if self._text.has_stopped:
                    self.finish_reason = "stop"
                    return part
            if event.finish_reason == "error":
                raise InferenceError(f"the model failed to generate: {event.message}")
            if event.finish_reason == "cancelled":
                raise UnavailableError("the request was cancelled by the server", retry_after=1)
            if event.finish_reason is not None:
                self.finish_reason = event.finish_reason
                part += self._text.finish()
        return part


async def merge_parts(
    answers: Sequence[Answer], idle_seconds: float
) -> AsyncIterator[tuple[Answer, str] | None]:
    """Yield parts of several answers as they arrive; an empty part ends an answer.

    Yields None if nothing arrived for some seconds. Raises RequestError if an answer fails.
    """
    parts: asyncio.Queue[tuple[Answer, str] | RequestError] = asyncio.Queue(maxsize=1)

    async def forward(answer: Answer) -> None:
        try:
            async for part in answer.read_parts():
                await parts.put((answer, part))
        except RequestError as error:
            await parts.put(error)
        else:
            await parts.put((answer, ""))

    tasks = [asyncio.create_task(forward(answer)) for answer in answers]
    num_open = len(tasks)
    try:
        while num_open:
            item: Any = None
            try:
                async with asyncio.timeout(idle_seconds):
                    item = await parts.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, RequestError):
                raise item
            num_open -= not item[1]
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
