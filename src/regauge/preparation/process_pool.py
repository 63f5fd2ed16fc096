"""The same function over many items by spawned processes that die with the one that asked.

Nothing is forked, because threads may be alive; a worker ends as soon as the parent is gone or
has stopped listening, so that a killed job leaves nobody behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Self, TypeVar

from regauge.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """Processes that are started when they are first needed, and end with the context."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._context = multiprocessing.get_context("spawn")
        self._listener, self._speaker = self._context.Pipe(duplex=False)
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._speaker.close()
        if self._executor:
            self._executor.shutdown(cancel_futures=True)
        self._speaker.close()
        self._listener.close()

    def each(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield the results as they become ready; with one process or item, work here.

        Raises what the function raises, and TransientError for a process that was killed.
        """
        if self._processes <= 1 or len(items) <= 1:
            yield from map(function, items)
            return
        if not self._executor:
            self._executor = ProcessPoolExecutor(
                self._processes, self._context, initializer=_start, initargs=(self._listener,)
            )
        try:
            futures = [self._executor.submit(function, item) for item in items]
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise TransientError(
                "a process of prepare was killed (no memory?) or could not start",
                "lower prepare.processes and run again: it continues where it was",
            ) from None


def _start(listener: Connection) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, args=(listener,), daemon=True).start()


def _die_with_parent(listener: Connection) -> None:
    """Wait for the end of the pipe, which comes when the parent closes it or is gone."""
    try:
        listener.recv()
    except EOFError:
        os._exit(0)
