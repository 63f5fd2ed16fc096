"""A worker process of the server that generates text.

    python -m regauge.serving.text_generation.text_worker FD

FD is a socket to the server. The first message is a `TextWorkerRequest`. The worker answers with
`ready`, or with `error` and ends. It reads the socket in a thread, so that requests and
cancellations arrive while the engine computes. Another thread sends a heartbeat every second. It
says how long the current step takes, so that a watchdog can tell a hang from a long step.

Messages to the worker have the `type` "add" (with `id`, `options`, `number` and the array of the
prompt), "cancel" (with `id`) or "shutdown". Messages from it are "ready" (with `limits`), "events"
(token events), "heartbeat" and "failed" (with `message`).
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from regauge import config
from regauge.models.settings import Generation
from regauge.serving.text_generation.settings import TextServing
from regauge.serving.text_generation.text_requests import TextRequest, TokenEvent
from regauge.serving.wire import encode_message, receive_message
from regauge.serving.workers.worker_main import LoadRequest, run_worker_process
from regauge.system.errors import DataError, RegaugeError, first_line
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from regauge.serving.text_generation.text_requests import TextEngine
    from regauge.serving.wire import Message

HEARTBEAT_SECONDS = 1.0
"""Time between two heartbeats."""
JOIN_SECONDS = 5.0
"""Longest wait for a thread at the end of the loop."""


@dataclass(frozen=True, kw_only=True)
class TextWorkerRequest(LoadRequest):
    """What a worker loads."""

    settings: dict[str, Any] = field(default_factory=dict)
    """The table of `TextServing`."""


def main(descriptor: int) -> int:
    """Serve the socket with this file descriptor; return the exit code."""
    return run_worker_process(
        descriptor,
        lambda header: load_requested_engine(TextWorkerRequest(**header)),
        _serve_and_close,
    )


def _serve_and_close(connection: socket.socket, engine: TextEngine) -> None:
    try:
        serve_engine(connection, engine)
    finally:
        engine.close()


def load_requested_engine(request: TextWorkerRequest) -> TextEngine:
    """Return the engine of a request, after its parity rows were computed again.

    Raises the errors of `open_model` and of the engine, and DataError if a row differs.
    """
    request.prepare_process()
    from regauge.inference.export.parity_rows import check_artifact
    from regauge.inference.export.uncompiled import open_model
    from regauge.serving.text_generation.engine_choice import load_text_engine
    from regauge.serving.text_generation.text_parity import generate_tokens

    artifact = open_model(request.path, threads=request.threads)
    settings = config.build(TextServing, request.settings)
    engine = load_text_engine(artifact, settings, threads=request.threads, device=request.device)
    try:
        check_artifact(artifact, partial(generate_tokens, engine, artifact.generation_options))
    except BaseException:
        engine.close()
        raise
    return engine


def serve_engine(
    connection: socket.socket, engine: TextEngine, *, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> None:
    """Serve an engine until "shutdown" arrives or the other end closes the connection."""
    loop = WorkerLoop(connection, engine, heartbeat_seconds)
    loop.run()


class WorkerLoop:
    """The connection of a worker with its engine, and the threads of the connection."""

    def __init__(
        self, connection: socket.socket, engine: TextEngine, heartbeat_seconds: float
    ) -> None:
        self._connection = connection
        self._engine = engine
        self._heartbeat_seconds = heartbeat_seconds
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._has_ended = threading.Event()
        self._num_steps = 0
        self._step_start: float | None = None

    def run(self) -> None:
        """Run the loop; raises the error of the engine after it was sent."""
        threads = [
            threading.Thread(target=self._read, name="text-requests", daemon=True),
            threading.Thread(target=self._beat, name="text-heartbeat", daemon=True),
        ]
        self._send({"type": "ready", "limits": asdict(self._engine.limits)})
        for thread in threads:
            thread.start()
        try:
            self._serve()
        except (RuntimeError, MemoryError, ValueError, RegaugeError) as error:
            self._send({"type": "failed", "message": first_line(error)})
            raise
        finally:
            self._has_ended.set()
            _shut_down(self._connection)
            for thread in threads:
                thread.join(JOIN_SECONDS)

    def _serve(self) -> None:
        """Handle messages and compute steps; waits for a message while there is no work."""
        while True:
            for message in self._take_messages():
                if message is None or message.header["type"] == "shutdown":
                    return
                self._handle(message)
            if self._engine.has_work:
                self._step()

    def _take_messages(self) -> Iterator[Message | None]:
        """Yield the messages that have arrived; None is the end of the connection."""
        if not self._engine.has_work:
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
            self._engine.cancel(header["id"])
            return
        request = _parse_request(header, message.arrays)
        try:
            self._engine.add(request)
        except DataError as error:
            event = TokenEvent(request.request_id, None, "error", error.problem)
            self._send_events([event])

    def _step(self) -> None:
        self._step_start = time.monotonic()
        events = self._engine.step()
        self._step_start = None
        self._num_steps += 1
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
        """Send heartbeats until the loop ends."""
        while not self._has_ended.wait(self._heartbeat_seconds):
            start = self._step_start
            self._send(
                {
                    "type": "heartbeat",
                    "steps": self._num_steps,
                    "step_seconds": 0.0 if start is None else time.monotonic() - start,
                    "running": self._engine.num_running,
                    "waiting": self._engine.num_waiting,
                }
            )

    def _send(self, header: dict[str, Any]) -> None:
        """Send a message; without a reader the loop ends by the inbox."""
        try:
            with self._send_lock:
                self._connection.sendall(encode_message(header))
        except OSError as error:
            if not self._has_ended.is_set():
                logger.warning("A message of the text worker was not sent: %s", error)


def _parse_request(header: dict[str, Any], arrays: list[np.ndarray]) -> TextRequest:
    """Return the request of a message."""
    options = {**header["options"], "stop": tuple(header["options"].get("stop", ()))}
    return TextRequest(header["id"], arrays[0], Generation(**options), header["number"])


def _shut_down(connection: socket.socket) -> None:
    """End the reading of a socket by other threads; it may be closed already."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("The socket was closed by the other end: %s", error)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
