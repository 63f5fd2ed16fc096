"""Worker process: reads, computes and writes three shards at once, in three threads.

It receives shards through a pipe and sends events back. It ends when the pipe is closed.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge.inference.export.postprocess import import_pyarrow
from regauge.inference.predict.shard import compute_shard
from regauge.inference.predict.worker import build_worker
from regauge.system import log, stop_signals
from regauge.system.errors import RegaugeError, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from regauge.inference.predict.worker import Worker

PROGRESS_SECONDS = 0.5
"""Minimum seconds between progress events."""
END = None
"""Marks where the shards in a queue end."""


class ShardPipeline:
    """A worker's three steps, each in a separate thread."""

    def __init__(self, pipe: Connection, worker: Worker) -> None:
        self._pipe = pipe
        self._worker = worker
        self._send_lock = threading.Lock()
        self._last_progress, self._rows, self._bytes, self._row_bytes = 0.0, 0, 0.0, 0.0
        self._encoded: queue.Queue[Any] = queue.Queue(1)
        self._computed: queue.Queue[Any] = queue.Queue(1)
        worker.engine.on_batch = self._report_progress

    def run(self) -> None:
        """Process shards until none are left; the calling thread computes."""
        reader = self._start_thread(self._read_shards)
        writer = self._start_thread(self._write_shards)
        while (encoded := self._encoded.get()) is not END:
            self._report_progress(0)
            self._row_bytes = encoded.source_bytes / max(len(encoded.records), 1)
            self._computed.put((encoded, compute_shard(self._worker.engine, encoded)))
        self._computed.put(END)
        reader.join()
        writer.join()

    def send(self, event: str, **fields: Any) -> None:
        """Send an event; do nothing if the parent process has closed the pipe."""
        with self._send_lock, suppress(BrokenPipeError):
            self._pipe.send({"event": event, **fields})

    def _read_shards(self) -> None:
        while (shard := self._receive_shard()) is not END:
            encoded = self._worker.read_shard(shard)
            self._report_progress(0)
            if encoded is None:
                self.send("past_end", shard=shard)
            else:
                self._encoded.put(encoded)
        self._encoded.put(END)

    def _write_shards(self) -> None:
        import_pyarrow()
        while (computed := self._computed.get()) is not END:
            line = self._worker.writer.write(*computed)
            self.send("shard", line=line)

    def _receive_shard(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            return END

    def _report_progress(self, rows: int) -> None:
        """Count computed rows; send them at intervals. The event is also a heartbeat."""
        self._rows += rows
        self._bytes += rows * self._row_bytes
        now = time.monotonic()
        if now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self.send("progress", rows=self._rows, source_bytes=round(self._bytes))
            self._rows, self._bytes = 0, 0.0

    def _start_thread(self, step: Callable[[], None]) -> threading.Thread:
        def run_step() -> None:
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - the parent process reports any error
                _exit_with(self._pipe, error)

        thread = threading.Thread(target=run_step, daemon=True)
        thread.start()
        return thread


def run_worker_process(pipe: Connection) -> None:
    """Run the worker sent by the parent process, until the pipe is closed."""
    stop_signals.pass_to_parent()
    log.configure()
    try:
        worker = build_worker(*pipe.recv())
        pipeline = ShardPipeline(pipe, worker)
        pipeline.send("ready", seconds=worker.ready_seconds)
        pipeline.run()
    except BaseException as error:  # noqa: BLE001 - the parent process reports any error
        _exit_with(pipe, error)
    os._exit(0)  # all files are written; unloading libraries would take half a second


def _exit_with(pipe: Connection, error: BaseException) -> None:
    problem, _, remedy = describe_error(error)[0].rpartition("; ")
    reported = error if isinstance(error, RegaugeError) else RegaugeError(problem, remedy)
    with suppress(BrokenPipeError):
        pipe.send({"event": "failed", "error": reported})
    os._exit(1)
