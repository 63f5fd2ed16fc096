"""Delivers events to one sink, in a thread that the rest of the command never waits for.

Every delivery is a process that is killed at its time limit, so a sink that answers slowly,
endlessly, or not at all costs only that time. `notifications.jsonl` has one line per event and
sink: delivered, failed or dropped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from regauge.monitoring.delivery import DeliveryThread
from regauge.monitoring.notify.events import Event
from regauge.monitoring.notify.send_request import PERMANENT
from regauge.system import jsonl
from regauge.system.errors import RegaugeError
from regauge.system.log import logger

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.monitoring.notify.settings import Notifications
    from regauge.monitoring.notify.sinks import Sink

JOURNAL = "notifications.jsonl"
COMMAND = (sys.executable, "-m", "regauge.monitoring.notify.send_request")
MAX_QUEUED_EVENTS = 32
"""Queue capacity, besides the event being delivered; the oldest event is dropped."""
KILL_SECONDS = 1.0
"""Longest wait for a killed process to end."""


class SendError(Exception):
    """A failed request, with the problem as one line."""

    def __init__(self, problem: str, *, is_permanent: bool = False) -> None:
        super().__init__(problem)
        self.is_permanent = is_permanent


class SinkQueue(DeliveryThread[Event]):
    """The events that wait for one sink; the first one is being delivered.

    The thread starts with the first event.
    """

    min_pause_seconds, max_pause_seconds = 1.0, 60.0

    def __init__(self, sink: Sink, settings: Notifications, folder: Path) -> None:
        super().__init__(f"notifications {sink.name}")
        self._sink, self._settings, self._journal = sink, settings, folder / JOURNAL
        self._attempts, self._problem = 0, ""
        """Attempts to deliver the first event, and the problem of the last one."""
        self._process: subprocess.Popen[str] | None = None

    def put(self, event: Event) -> None:
        dropped = None
        with self._changed:
            if len(self._queue) > MAX_QUEUED_EVENTS:
                dropped = self._queue[1]
                del self._queue[1]
            self._queue.append(event)
            self._changed.notify()
        if dropped is not None:
            self._record(dropped, "dropped", "the queue is full")
        if not self.ident:
            with suppress(RuntimeError):  # no memory for a thread; `close` reports the events
                self.start()

    def close(self) -> None:
        """Wait for the queued events until the deadline of `begin_close`; report the others."""
        if self.ident:
            self.join(max(0.0, self._seconds_left()))
        with self._changed:
            unsent, attempts = list(self._queue), self._attempts
            self._queue.clear()
            process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()
        if self.ident:
            self.join(KILL_SECONDS)
        reason = f"not delivered within {self._settings.exit_seconds:g} s at the end"
        for index, event in enumerate(unsent):
            self._record(event, "failed", reason, 0 if index else attempts)

    def run(self) -> None:
        """Deliver events until the command ends."""
        while self._wait_for_work():
            event = self._queue[0]
            self._retry(partial(self._attempt, event))
            problem, attempts = self._problem, self._attempts
            with self._changed:
                if not self._queue or (problem and self._seconds_left() <= 0):
                    return  # `close` reports the event
                self._queue.popleft()
                self._attempts, self._problem = 0, ""
            self._record(event, "failed" if problem else "delivered", problem, attempts)

    def _attempt(self, event: Event) -> None:
        self._attempts += 1
        self._send(event)
        self._problem = ""

    def _gives_up(self, error: Exception) -> bool:
        self._problem = self._sink.redact(str(error))
        is_permanent = isinstance(error, SendError) and error.is_permanent
        return is_permanent or self._attempts >= self._settings.max_attempts

    def _send(self, event: Event) -> None:
        """Send an event once, in a process that is killed at the time limit."""
        limit = self._settings.timeout_seconds
        request = json.dumps({**self._sink.build_request(event), "timeout_seconds": limit})
        with subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C must not end the message about it
        ) as process:
            self._process = process
            try:
                problem, _ = process.communicate(request, timeout=limit)
            except subprocess.TimeoutExpired:
                raise SendError(f"no answer within {limit:g} s") from None
            finally:
                process.kill()
        code = process.returncode
        if code:
            problem = problem or f"the sending process ended with code {code}"
            raise SendError(problem, is_permanent=code == PERMANENT)

    def _record(
        self,
        event: Event,
        state: Literal["delivered", "failed", "dropped"],
        problem: str,
        attempts: int = 0,
    ) -> None:
        """Write how a delivery ended to the journal; log an event that was not delivered."""
        name = self._sink.name
        line = {
            "time": round(time.time(), 3),
            "event": event.name,
            "event_time": round(event.time, 3),
            "sink": name,
            "state": state,
            "problem": problem,
            "attempts": attempts,
        }
        with suppress(OSError, RegaugeError):  # a full disk does not end a run
            jsonl.append_line(self._journal, line)
        if problem:
            logger.warning("event '%s' not delivered to %s: %s", event.name, name, problem)
