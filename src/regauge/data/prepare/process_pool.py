"""Pool of spawned processes that end with the process that started them.

Processes are not forked, because other threads may be running.
"""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection, wait
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Self, TypeVar

from regauge.system import stop_signals
from regauge.system.children import FunctionProcess, start_function
from regauge.system.errors import TransientError
from regauge.system.timing import POLL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")
WORKER = "regauge.data.prepare.process_pool:run_calls"
VARIABLES = {"TOKENIZERS_PARALLELISM": "false"}


class ProcessPool:
    """Processes that start on first use and end with the context."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._children: list[FunctionProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        self._children.clear()

    def map_unordered(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield results in order of completion; a single process or item runs in this process.

        Raises the function's errors, TransientError if a process was killed, and StopSignalError
        after a stop signal. The context must end after an error.
        """
        if self._processes <= 1 or len(items) <= 1:
            for item in items:
                stop_signals.check_stop()
                yield function(item)
            return
        self._start(min(self._processes, len(items)))
        for result, error in self._call(function, items):
            if error is not None:
                raise error
            yield result

    def _start(self, count: int) -> None:
        with stop_signals.block_signals():
            while len(self._children) < count:
                self._children.append(start_function(WORKER, variables=VARIABLES))

    def _call(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[Any]:
        """Give each process one item at a time; yield each result with its error."""
        pending = iter(items)
        busy: list[Connection] = []
        try:
            for child, item in zip(self._children, pending, strict=False):
                child.pipe.send((function, item))
                busy.append(child.pipe)
            while busy:
                stop_signals.check_stop()
                ready = wait(busy, POLL_SECONDS)
                for pipe in [pipe for pipe in busy if pipe in ready]:
                    answer = pipe.recv()
                    try:
                        pipe.send((function, next(pending)))
                    except StopIteration:
                        busy.remove(pipe)
                    yield answer
        except (EOFError, ConnectionError):
            stop_signals.check_stop()
            raise TransientError(
                "a worker process was killed (out of memory?) or could not start",
                "lower prepare.processes and run again; it resumes",
            ) from None


def run_calls(pipe: Connection) -> None:
    """Answer each call in a pipe with its result and its error, until the pipe is closed."""
    stop_signals.pass_to_parent()
    with suppress(EOFError):
        while True:
            function, item = pipe.recv()
            answer: tuple[Any, Exception | None]
            try:
                answer = function(item), None
            except Exception as error:  # noqa: BLE001 - the parent process raises it
                error.add_note("".join(format_exception(error)))
                answer = None, error
            pipe.send(answer)
