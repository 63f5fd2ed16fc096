"""Delivers events to one sink, in a thread that no other part of a command waits for.

Every delivery is a process that is killed at its time limit, so a sink that answers slowly,
endlessly, or not at all costs only that time. `notifications.jsonl` has one line per event and
sink: delivered, failed or dropped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from regauge.monitoring.notify.send_request import PERMANENT
from regauge.system import jsonl
from regauge.system.errors import RegaugeError
from regauge.system.log import logger

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.monitoring.notify.events import Event
    from regauge.monitoring.notify.settings import Notifications
    from regauge.monitoring.notify.sinks import Sink

JOURNAL = "notifications.jsonl"
COMMAND = (sys.executable, "-m", "regauge.monitoring.notify.send_request")
MAX_QUEUED_EVENTS = 32
"""Capacity of a queue, besides the event that is being delivered; the oldest event is dropped."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 60.0, 0.5
"""First and longest pause before a retry, and the longest one at the end of a command."""
KILL_SECONDS = 1.0
"""Longest wait for the end of a killed process."""


class SinkQueue(threading.Thread):
    """The events that wait for one sink. The thread starts with the first event."""

    def __init__(self, sink: Sink, settings: Notifications, folder: Path) -> None:
        super().__init__(name=f"notifications {sink.name}", daemon=True)
        self._sink, self._settings, self._journal = sink, settings, folder / JOURNAL
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        """The first event is being delivered."""
        self._attempts = 0
        """Attempts to deliver the first event."""
        self._is_closing = self._is_abandoned = False
        self._process: subprocess.Popen[str] | None = None

    def put(self, event: Event) -> None:
        """Queue an event without waiting."""
        dropped = None
        with self._changed:
            if len(self._events) > MAX_QUEUED_EVENTS:
                dropped = self._events[1]
                del self._events[1]
            self._events.append(event)
            self._changed.notify()
        if dropped is not None:
            self._record(dropped, "dropped", "the queue is full")
        if not self.ident:
            with suppress(RuntimeError):  # no memory for a thread; `close` reports the events
                self.start()

    def begin_close(self) -> None:
        """Shorten the pauses, because the command ends; the thread ends with the last event."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def close(self, deadline: float) -> None:
        """Wait for the queued events until `deadline` on time.monotonic(); report the others."""
        if self.ident:
            self.join(max(0.0, deadline - time.monotonic()))
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()
            unsent, attempts = list(self._events), self._attempts
            self._events.clear()
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
        """Deliver the events until the end of the command."""
        while (event := self._wait_for_event()) is not None:
            problem = self._deliver(event)
            with self._changed:
                if self._is_abandoned:  # `close` has reported the event
                    return
                self._events.popleft()
                attempts, self._attempts = self._attempts, 0
            self._record(event, "failed" if problem else "delivered", problem, attempts)

    def _wait_for_event(self) -> Event | None:
        """Return the first event; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._is_closing)
            return self._events[0] if self._events else None

    def _deliver(self, event: Event) -> str:
        """Try to deliver an event; return the last problem, or an empty text."""
        pause = MIN_PAUSE_SECONDS
        while True:
            self._attempts += 1
            problem, is_permanent = self._send(event)
            is_last = is_permanent or self._attempts >= self._settings.max_attempts
            if not problem or is_last or not self._pause(pause):
                return self._sink.redact(problem)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _pause(self, seconds: float) -> bool:
        """Pause before a retry, briefly at the end of a command; return whether to retry."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closing, seconds):
                return True
            return not self._changed.wait_for(
                lambda: self._is_abandoned, min(seconds, LAST_PAUSE_SECONDS)
            )

    def _send(self, event: Event) -> tuple[str, bool]:
        """Send an event once; return the problem, empty for none, and whether it is permanent."""
        limit = self._settings.timeout_seconds
        pipe = subprocess.PIPE
        try:
            request = json.dumps({**self._sink.build_request(event), "timeout_seconds": limit})
            with subprocess.Popen(
                COMMAND,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C must not end the message about it
            ) as process:
                self._process = process
                try:
                    problem, _ = process.communicate(request, timeout=limit)
                finally:
                    process.kill()
        except subprocess.TimeoutExpired:
            return f"no answer within {limit:g} s", False
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}", False
        if process.returncode and not problem:
            problem = f"the sending process ended with code {process.returncode}"
        return problem, process.returncode == PERMANENT

    def _record(
        self,
        event: Event,
        state: Literal["delivered", "failed", "dropped"],
        problem: str,
        attempts: int = 0,
    ) -> None:
        """Write how a delivery ended to the journal; log an event that was not delivered."""
        name = self._sink.name
        line = {"time": round(time.time(), 3), "event": event.name}
        line |= {"event_time": round(event.time, 3), "sink": name, "state": state}
        line |= {"problem": problem, "attempts": attempts}
        with suppress(OSError, RegaugeError):  # a full disk does not end a run
            jsonl.append_line(self._journal, line)
        if problem:
            logger.warning("event '%s' not delivered to %s: %s", event.name, name, problem)
