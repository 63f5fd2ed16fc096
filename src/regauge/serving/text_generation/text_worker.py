"""A worker process's model for generating text: an engine, and the messages to it.

It reads the socket in a thread, so that requests and cancellations arrive while the engine
computes. Another thread sends a heartbeat every second. It says how long the current step takes, so
that the server can tell a hang from a long step.

Messages to the worker have the `type` "add" (with `id`, `options`, `number` and the prompt array)
or "cancel" (with `id`). Messages from it are "ready" (with `limits` and `step_seconds`), "events"
(token events), "heartbeat" and "failed" (with `message`).
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from regauge import config
from regauge.models.settings import Generation
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.text_requests import TextRequest, TokenEvent
from regauge.serving.wire import encode_message, receive_message
from regauge.system.errors import DataError, RegaugeError, first_line
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from regauge.serving.text_generation.text_requests import TextEngine
    from regauge.serving.wire import Message
    from regauge.serving.workers.worker_requests import LoadRequest

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats."""
JOIN_SECONDS = 5.0
"""Maximum wait for a thread at the end of the loop."""


class TextEngineWorker:
    """A loaded engine, the socket to the server, and the socket's threads."""

    def __init__(self, engine: TextEngine, content_sha256: str, step_seconds: float) -> None:
        """Take an engine, the hash of the loaded artifact, and the time per step."""
        self.engine = engine
        """Generates the answers."""
        engine.on_progress = self._restart_step
        self._ready = {"content_sha256": content_sha256, "step_seconds": step_seconds}
        self._connection: socket.socket
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._has_ended = threading.Event()
        self._step_start: float | None = None

    @classmethod
    def load(cls, request: LoadRequest) -> Self:
        """Load an engine, and recompute the artifact's parity rows.

        Raises the errors of `open_model` and of the engine, and DataError if a row differs.
        """
        from regauge.inference.export.parity_rows import check_artifact
        from regauge.inference.export.uncompiled import open_model
        from regauge.serving.text_generation.engine_choice import (
            generate_tokens,
            load_text_engine,
            measure_step_seconds,
        )

        artifact = open_model(request.path, threads=request.threads)
        settings = config.build(TextServing, request.generation or {})
        engine = load_text_engine(
            artifact, settings, threads=request.threads, device=request.device
        )
        try:
            check_artifact(artifact, partial(generate_tokens, engine, artifact.generation_options))
            step_seconds = measure_step_seconds(engine)
        except BaseException:
            engine.close()
            raise
        return cls(engine, artifact.content_sha256, step_seconds)

    def close(self) -> None:
        self.engine.close()

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the server closes the socket.

        Raises the engine's error after sending it.
        """
        self._connection = connection
        threads = [
            threading.Thread(target=self._read, name="text-requests", daemon=True),
            threading.Thread(target=self._beat, name="text-heartbeat", daemon=True),
        ]
        self._send({"type": "ready", **self._ready, "limits": asdict(self.engine.limits)})
        for thread in threads:
            thread.start()
        try:
            self._generate()
        except (RuntimeError, MemoryError, ValueError, RegaugeError) as error:
            self._send({"type": "failed", "message": first_line(error)})
            raise
        finally:
            self._has_ended.set()
            _shut_down(connection)
            for thread in threads:
                thread.join(JOIN_SECONDS)

    def _generate(self) -> None:
        """Handle messages and compute steps; without work, wait for a message."""
        while True:
            for message in self._take_messages():
                if message is None:
                    return
                self._handle(message)
            if self.engine.has_work:
                self._step()

    def _take_messages(self) -> Iterator[Message | None]:
        """Yield the messages that have arrived; None is the end of the connection."""
        if not self.engine.has_work:
            yield self._inbox.get()
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                return

    def _handle(self, message: Message) -> None:
        """Add or cancel a request; a request that does not fit ends with an error."""
        header = message.header
        if header["type"] == "cancel":
            self.engine.cancel(header["id"])
            return
        request = _parse_request(header, message.arrays)
        try:
            self.engine.add(request)
        except DataError as error:
            event = TokenEvent(request.request_id, None, "error", error.problem)
            self._send_events([event])

    def _restart_step(self) -> None:
        self._step_start = time.monotonic()

    def _step(self) -> None:
        self._restart_step()
        events = self.engine.step()
        self._step_start = None
        if events:
            self._send_events(events)

    def _send_events(self, events: Sequence[TokenEvent]) -> None:
        self._send({"type": "events", "events": list(map(list, events))})

    def _read(self) -> None:
        """Put messages into the inbox until the connection ends."""
        message: Message | None = None
        while True:
            try:
                message = receive_message(self._connection)
            except (OSError, ValueError) as error:
                if not self._has_ended.is_set():
                    logger.warning("The connection of the text worker failed: %s", error)
                message = None
            self._inbox.put(message)
            if message is None:
                return

    def _beat(self) -> None:
        while not self._has_ended.wait(HEARTBEAT_SECONDS):
            start = self._step_start
            self._send(
                {
                    "type": "heartbeat",
                    "step_seconds": 0.0 if start is None else time.monotonic() - start,
                    "running": self.engine.num_running,
                    "waiting": self.engine.num_waiting,
                    "cache_blocks": self.engine.cache_blocks,
                    "prompt_token_seconds": self.engine.prompt_token_seconds,
                }
            )

    def _send(self, header: dict[str, Any]) -> None:
        """Send a message; without a reader the loop ends through the inbox."""
        try:
            with self._send_lock:
                self._connection.sendall(encode_message(header))
        except OSError as error:
            if not self._has_ended.is_set():
                logger.warning("A message of the text worker was not sent: %s", error)


def _parse_request(header: dict[str, Any], arrays: list[np.ndarray]) -> TextRequest:
    options = {**header["options"], "stop": tuple(header["options"].get("stop", ()))}
    return TextRequest(header["id"], arrays[0], Generation(**options), header["number"])


def _shut_down(connection: socket.socket) -> None:
    """Make other threads stop reading a socket, which may already be closed."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("The socket was closed by the other end: %s", error)
