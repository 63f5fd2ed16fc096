"""Processes of this machine, one for each device or for as many cores as the artifact needs."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from regauge.errors import NoProgressError, RegaugeError, TransientError
from regauge.log import logger
from regauge.prediction.executors import Executor
from regauge.prediction.shard_queue import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from regauge.prediction.shard_queue import Tickets
    from regauge.prediction.worker import Order

AHEAD = 2
"""Shards that a process has: one that it answers, and one that it reads meanwhile."""
KILLED = -9
"""Ended by SIGKILL: on a machine without memory left, by its kernel."""
POLL_SECONDS = 1.0
END_SECONDS = 10.0


class Local(Executor):
    """Processes that are started again where one is lost, and its shards given to others."""

    def run(self, order: Order, tickets: Tickets) -> Iterator[dict[str, Any]]:
        with _crew(order, tickets) as crew:
            while tickets.left:
                yield from crew.look()


@dataclass
class _Seat:
    """A process and what it was told."""

    number: int
    """Of its device."""
    process: SpawnProcess
    pipe: Connection
    heard: float
    ready: bool = False
    ahead: int = AHEAD
    """Shards that it is given at a time."""
    shards: list[Shard] = field(default_factory=list)


class _Crew:
    """The processes of a job."""

    def __init__(self, order: Order, tickets: Tickets) -> None:
        self._order = order
        self._tickets = tickets
        self._working = order.job.settings.execution
        self._lost: Counter[Shard | None] = Counter()
        self._step = 0
        self._seats: list[_Seat] = []

    def start(self, size: int) -> None:
        """Start as many processes as there are devices, or as are worth it."""
        self._seats = [self._seated(number) for number in range(size)]

    def look(self) -> Iterator[dict[str, Any]]:
        """Yield what is heard within a second, and see to it that everybody has work."""
        for seat in self._seats:
            self._feed(seat)
        heard = wait([seat.pipe for seat in self._seats], POLL_SECONDS)
        for seat in list(self._seats):
            try:
                while seat.pipe in heard and seat.pipe.poll():
                    seat.heard = time.monotonic()
                    yield from self._hear(seat, seat.pipe.recv())
            except (EOFError, ConnectionResetError):
                yield self._replaced(seat, "ended")
                continue
            except TransientError as error:
                yield self._replaced(seat, f"failed: {error.problem}", error)
                continue
            if time.monotonic() - seat.heard > self._working.hang_seconds:
                yield self._replaced(seat, f"said nothing for {self._working.hang_seconds:g} s")
        yield {"event": "look"}  # whoever reads may want to stop

    def end(self) -> None:
        """Let the processes end; those that do not are killed."""
        for seat in self._seats:
            seat.pipe.close()
        until = time.monotonic() + END_SECONDS
        for seat in self._seats:
            seat.process.join(max(0.0, until - time.monotonic()))
            seat.process.kill()
            seat.process.join()

    def kill(self) -> None:
        """End the processes at once."""
        for seat in self._seats:
            seat.process.kill()

    def _feed(self, seat: _Seat) -> None:
        with suppress(BrokenPipeError):
            while len(seat.shards) < seat.ahead and (shard := self._tickets.take(seat.number)):
                seat.shards.append(shard)
                seat.pipe.send(shard)

    def _hear(self, seat: _Seat, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        event = message["event"]
        if event == "failed":
            error: RegaugeError = message["error"]
            raise error
        if event == "shard":
            line = message["line"]
            shard = Shard(line["piece"], line["part"])
            seat.shards.remove(shard)
            seat.ahead = AHEAD
            yield {**line, "event": event}
            self._tickets.finish(shard, last=line["last"])
        elif event == "beyond":
            seat.shards.remove(message["shard"])
            self._tickets.beyond(message["shard"])
        else:
            seat.ready = True
            yield {**message, "worker": seat.number}

    def _replaced(
        self, seat: _Seat, how: str, error: TransientError | None = None
    ) -> dict[str, Any]:
        """Start a process in the place of one that is lost, and give what it was at to others.

        A killed process is a sign that memory did not suffice. Where a shard has cost as many as
        are allowed, it raises what the last one failed with, or NoProgressError.
        """
        seat.process.kill()
        seat.process.join()
        shards = self._tickets.give_back(seat.number)
        blamed = shards[0] if shards and seat.ready else None
        self._lost[blamed] += 1
        code = seat.process.exitcode
        if code == KILLED and how == "ended":
            self._step += 1
        what = f"shard {blamed.name}" if blamed else "the start"
        if self._lost[blamed] >= self._working.attempts:
            if error is not None:
                raise error
            problem = f"{what} ended {self._lost[blamed]} processes, the last one {how} ({code})"
            remedy = "see the lines before, and correct its file or leave it out"
            raise NoProgressError(problem, remedy)
        told = (seat.number, how, code, what)
        logger.warning("worker %d %s (%s) at %s: another takes its place", *told)
        other = self._seated(seat.number)
        other.ahead = 1  # so that the next loss has one shard to blame
        self._seats[self._seats.index(seat)] = other
        return {"event": "lost", "worker": seat.number, "how": how, "code": code}

    def _seated(self, number: int) -> _Seat:
        from regauge.prediction.executors._process import member

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._order, number, self._step)
        process = context.Process(target=member, args=arguments)
        process.start()
        theirs.close()
        return _Seat(number, process, ours, time.monotonic())


@contextmanager
def _crew(order: Order, tickets: Tickets) -> Iterator[_Crew]:
    crew = _Crew(order, tickets)
    try:
        crew.start(_size(order, tickets))
        yield crew
        crew.end()
    finally:
        crew.kill()


def _size(order: Order, tickets: Tickets) -> int:
    """Return how many processes are worth starting: as many as there are pieces, or devices."""
    from regauge.artifacts import artifact as artifacts
    from regauge.processes import available_cores

    wanted = order.job.settings.execution.workers
    if wanted != "auto":
        return wanted
    artifact = artifacts.located(order.job.settings.artifact)
    devices = artifact.manifest.compiled.backend.devices
    if artifact.accelerator.on_host:
        cores = artifact.manifest.target.threads * devices
        return max(1, min(available_cores() // cores, tickets.left))
    return max(1, artifact.accelerator.count() // devices)
