"""A worker process that generates text, as the server sees it."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from regauge.serving.text_generation.text_requests import EngineLimits, TokenEvent
from regauge.serving.wire import encode_message
from regauge.serving.workers.worker_process import WorkerProcess
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.serving.text_generation.text_queue import TokenStream
    from regauge.serving.wire import Message

SMOOTHING = 0.1
"""Weight of a new step in the mean time per step."""
BUSY_SHARE = 0.75
"""Share of the places that are taken while steps are measured."""


class TextWorker(WorkerProcess):
    """A worker process that generates text, and the requests sent to it."""

    exit_seconds = 5.0
    silence_problem = "did not produce a token"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.limits = EngineLimits(**self.ready_header["limits"])
        """Engine limits."""
        self.heartbeat: dict[str, Any] = {
            "step_seconds": 0.0,
            "cache_blocks": (0, 0),
            "prompt_token_seconds": 0.0,
        }
        """The last heartbeat: how long the current step takes, how many requests are running and
        waiting, the cache blocks in use and in all, and the time to read a prompt token."""
        self.num_tokens = 0
        """How many tokens the worker has generated."""
        self._last_message = time.monotonic()
        self._streams: dict[str, TokenStream] = {}
        self.step_seconds = float(self.ready_header["step_seconds"])
        """Mean time per token of each answer while most places are taken."""
        self._last_events = 0.0

    @property
    def silent_seconds(self) -> float:
        """How long the current step takes, or the last message is ago, whichever is longer."""
        return max(time.monotonic() - self._last_message, float(self.heartbeat["step_seconds"]))

    @property
    def prompt_token_seconds(self) -> float:
        """Mean time to read a prompt token."""
        return float(self.heartbeat["prompt_token_seconds"])

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    def send(self, stream: TokenStream) -> None:
        """Send a request, whose events the stream gets."""
        request = stream.request
        self._streams[request.request_id] = stream
        header = {
            "type": "add",
            "id": request.request_id,
            "options": request.generation.model_dump(),
            "number": request.number,
        }
        self._writer.write(encode_message(header, [request.prompt]))

    def forget(self, request_id: str) -> None:
        """Cancel an unfinished request."""
        if self._streams.pop(request_id, None) is not None and not self.has_ended:
            self._writer.write(encode_message({"type": "cancel", "id": request_id}))

    def fail_requests(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end()

    def _handle(self, message: Message) -> None:
        header = message.header
        self._last_message = time.monotonic()
        if header["type"] == "failed":
            logger.error("Worker %d failed: %s", self.pid, header["message"])
        elif header["type"] == "heartbeat":
            self.heartbeat = header
        events = [TokenEvent(*values) for values in header.get("events", ())]
        self._measure_step(events)
        for event in events:
            stream = self._streams.get(event.request_id)
            self.num_tokens += event.token is not None
            if event.finish_reason is not None:
                self._streams.pop(event.request_id, None)
            if stream is not None:
                stream.put(event)

    def _measure_step(self, events: Sequence[TokenEvent]) -> None:
        """Update the time per step, given the events of one or several steps."""
        counts = Counter(event.request_id for event in events if event.token is not None)
        if not counts:
            return
        is_busy = self.num_requests >= BUSY_SHARE * self.limits.max_running
        seconds = (self._last_message - self._last_events) / max(counts.values())
        if is_busy and self._last_events:
            self.step_seconds += SMOOTHING * (seconds - self.step_seconds)
        self._last_events = self._last_message if is_busy else 0.0
