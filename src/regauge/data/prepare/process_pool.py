"""A pool of spawned processes that end with the process that started them.

Processes are not forked, because other threads may be running. A worker exits as soon as its parent
ends or closes the pool, so a killed job leaves no processes behind.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Self, TypeVar

from regauge.system import stop_signals
from regauge.system.children import hide_main_module, start_resource_tracker
from regauge.system.errors import TransientError
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

T = TypeVar("T")
R = TypeVar("R")


class _WorkerProcess(SpawnProcess):
    """A worker process. It passes SIGTERM on to its parent, which therefore kills it instead."""

    def start(self) -> None:
        """Start the process without the script of the user, which it would run again."""
        with hide_main_module():
            super().start()

    def terminate(self) -> None:
        """Kill the process, as an executor does with the workers of a broken pool."""
        self.kill()


class _WorkerContext(SpawnContext):
    """Starts worker processes."""

    Process = _WorkerProcess


class ProcessPool:
    """Processes that are started on first use and end with the context."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._context = _WorkerContext()
        self._receiver, self._sender = self._context.Pipe(duplex=False)
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._sender.close()
        if self._executor:
            self._executor.shutdown(cancel_futures=True)
        self._sender.close()
        self._receiver.close()

    def map_unordered(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield results in order of completion; a single process or item runs in this process.

        Raises the errors of the function, TransientError if a process was killed, and
        StopSignalError after a stop signal.
        """
        if self._processes <= 1 or len(items) <= 1:
            for item in items:
                stop_signals.check_stop()
                yield function(item)
            return
        if not self._executor:
            start_resource_tracker()
            self._executor = ProcessPoolExecutor(
                self._processes,
                self._context,
                initializer=_initialize_worker,
                initargs=(self._receiver,),
            )
        finished: SimpleQueue[Future[R]] = SimpleQueue()
        try:
            with stop_signals.block_signals():  # the first calls start the processes
                futures = [self._executor.submit(function, item) for item in items]
            for future in futures:
                future.add_done_callback(finished.put)
            for _ in futures:
                yield _wait_for_item(finished).result()
        except BrokenProcessPool:
            stop_signals.check_stop()
            raise TransientError(
                "a worker process was killed (out of memory?) or could not start",
                "lower prepare.processes and run again; it resumes",
            ) from None


def _wait_for_item(items: SimpleQueue[T]) -> T:
    """Return the next item of a queue; raises StopSignalError after a stop signal."""
    while True:
        stop_signals.check_stop()
        with suppress(Empty):
            return items.get(timeout=POLL_SECONDS)


def _initialize_worker(receiver: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stop_signals.pass_to_parent()
    threading.Thread(target=_exit_with_parent, args=(receiver,), daemon=True).start()


def _exit_with_parent(receiver: Connection) -> None:
    """Wait for the end of the pipe: the parent has closed it, or has ended."""
    try:
        receiver.recv()
    except EOFError:
        os._exit(0)
