"""A process that computes shards: it reads the next one while it answers, and writes beside both.

It is told shards through a pipe, and says there what became of them. It ends when the pipe does.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from regauge import log, processes
from regauge.artifacts import postprocess
from regauge.errors import RegaugeError, explain
from regauge.prediction.worker import Order, worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from regauge.prediction.worker import Worker

SIGN_SECONDS = 0.5
END = None


class Member:
    """The three steps of a worker, each in a thread of its own."""

    def __init__(self, pipe: Connection, work: Worker) -> None:
        self._pipe = pipe
        self._work = work
        self._speaking = threading.Lock()
        self._signed, self._rows = 0.0, 0
        self._read: queue.Queue[Any] = queue.Queue(1)
        self._computed: queue.Queue[Any] = queue.Queue(1)
        work.engine.told = self._sign

    def run(self) -> None:
        """Work until there are no more shards; the caller's thread computes."""
        reader = self._start(self._reading)
        writer = self._start(self._writing)
        while (taken := self._read.get()) is not END:
            self._sign(0)
            self._computed.put((taken, self._work.compute(taken)))
        self._computed.put(END)
        reader.join()
        writer.join()

    def say(self, event: str, **facts: Any) -> None:
        """Send a message; nothing is left to be done where nobody hears it."""
        with self._speaking, suppress(BrokenPipeError):
            self._pipe.send({"event": event, **facts})

    def _reading(self) -> None:
        while (shard := self._told()) is not END:
            taken = self._work.read(shard)
            self._sign(0)
            if taken is None:
                self.say("beyond", shard=shard)
            else:
                self._read.put(taken)
        self._read.put(END)

    def _writing(self) -> None:
        postprocess.prepare()
        while (computed := self._computed.get()) is not END:
            line = self._work.writer.write(*computed)
            self.say("shard", line=line)

    def _told(self) -> Any:
        """Return the next shard, or the end."""
        try:
            return self._pipe.recv()
        except EOFError:
            return END

    def _sign(self, rows: int) -> None:
        """Say how many records were answered since the last sign, now and then."""
        self._rows += rows
        now = time.monotonic()
        if now - self._signed >= SIGN_SECONDS:
            self._signed = now
            self.say("sign", rows=self._rows)
            self._rows = 0

    def _start(self, step: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the other side hears it
                _fail(self._pipe, error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread


def member(pipe: Connection, order: Order, device: int, step: int) -> None:
    """Be a worker, in a process of its own, until there is nothing left."""
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; one answers
    log.configure()
    try:
        work = worker(order, device, step)
        one = Member(pipe, work)
        one.say("ready", seconds=work.ready_seconds)
        one.run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other side hears it
        _fail(pipe, error)
    os._exit(0)  # all is written: half a second of taking libraries down, for nothing


def _fail(pipe: Connection, error: BaseException) -> None:
    """Say why this process ends, and end it."""
    known = error if isinstance(error, RegaugeError) else RegaugeError(*_told(error))
    with suppress(BrokenPipeError):
        pipe.send({"event": "failed", "error": known})
    os._exit(1)


def _told(error: BaseException) -> tuple[str, str]:
    """Return a problem and a remedy for what nobody foresaw."""
    problem, _, remedy = explain(error)[0].rpartition("; ")
    return problem, remedy
