"""Delivers events to one sink, in a thread that no other part of a command waits for.

Every delivery is a process that is killed at its time limit. So a sink that answers slowly, with
an endless answer, or not at all costs nothing but that time. The last line of each event is in
`notifications.jsonl`: delivered, failed or dropped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from regauge.monitoring.notify.send_request import SendOutcome
from regauge.system import jsonl
from regauge.system.errors import RegaugeError
from regauge.system.json_files import parse_object
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from regauge.monitoring.notify.events import Event
    from regauge.monitoring.notify.settings import Notifications
    from regauge.monitoring.notify.sinks import Sink

JOURNAL = "notifications.jsonl"
COMMAND = (sys.executable, "-m", "regauge.monitoring.notify.send_request")
MAX_QUEUED_EVENTS = 32
"""Capacity of the queue of a sink; the oldest event is dropped first."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 60.0, 0.5
"""First and longest pause before a retry, and the longest one at the end of a command."""
KILL_SECONDS = 1.0
"""Longest wait for the end of a killed process."""

State = Literal["delivered", "failed", "dropped"]


class Journal:
    """The file `notifications.jsonl` in the folder of a run; a full disk is no error."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self._lock = threading.Lock()

    def write(self, event: Event, sink: str, state: State, problem: str, attempts: int) -> None:
        """Append how the delivery of an event to a sink ended."""
        line = {
            "time": round(time.time(), 3),
            "event": event.name,
            "event_time": round(event.time, 3),
            "sink": sink,
            "state": state,
            "problem": problem,
            "attempts": attempts,
        }
        with self._lock, suppress(OSError, RegaugeError):
            jsonl.append_line(self._path, line)


@dataclass
class _Delivery:
    """The event that is being delivered."""

    event: Event
    attempts: int = 0


class SinkQueue:
    """The events that wait for one sink. The thread is started with the first event."""

    def __init__(self, sink: Sink, settings: Notifications, journal: Journal) -> None:
        self._sink, self._settings, self._journal = sink, settings, journal
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._is_abandoned = False
        self._current: _Delivery | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"notifications {sink.name}", daemon=True
        )

    def put(self, event: Event) -> None:
        """Queue an event without waiting."""
        with self._changed:
            dropped = self._events.popleft() if len(self._events) >= MAX_QUEUED_EVENTS else None
            self._events.append(event)
            self._changed.notify()
        if dropped is not None:
            self._report(_Delivery(dropped), "dropped", "the queue is full")
        if not self._thread.ident:
            with suppress(RuntimeError):  # no memory for a thread; `close` reports the events
                self._thread.start()

    def begin_close(self) -> None:
        """Shorten the pauses, because the command ends; the thread ends with the last event."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def close(self, deadline: float) -> None:
        """Wait for the queued events until a time of the monotonic clock; report the others."""
        if self._thread.ident:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive() and not self._events:
            return
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()
            unsent = [*([self._current] if self._current else []), *map(_Delivery, self._events)]
            self._events.clear()
            process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()
        if self._thread.ident:
            self._thread.join(KILL_SECONDS)
        reason = f"not delivered within {self._settings.exit_seconds:g} s at the end"
        for delivery in unsent:
            self._report(delivery, "failed", reason)

    def _run(self) -> None:
        while (delivery := self._take()) is not None:
            self._deliver(delivery)

    def _take(self) -> _Delivery | None:
        """Wait for an event; returns None at the end."""
        with self._changed:
            self._current = None
            self._changed.wait_for(lambda: self._events or self._is_closing)
            if not self._events or self._is_abandoned:
                return None
            self._current = _Delivery(self._events.popleft())
            return self._current

    def _deliver(self, delivery: _Delivery) -> None:
        """Try to deliver an event until it succeeds, a retry is useless, or the last attempt."""
        pause = MIN_PAUSE_SECONDS
        while True:
            delivery.attempts += 1
            outcome = self._send(delivery.event)
            if self._is_abandoned:
                return
            if not outcome.problem:
                self._journal.write(
                    delivery.event, self._sink.name, "delivered", "", delivery.attempts
                )
                return
            is_last = delivery.attempts >= self._settings.max_attempts
            if outcome.is_permanent or is_last or not self._pause(pause):
                break
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
        if not self._is_abandoned:
            self._report(delivery, "failed", self._sink.redact(outcome.problem))

    def _send(self, event: Event) -> SendOutcome:
        """Send an event once, in a process that is killed at the time limit."""
        limit = self._settings.timeout_seconds
        try:
            request = {**self._sink.build_request(event), "timeout_seconds": limit}
            with subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not end the message about it
            ) as process:
                return self._communicate(process, request, limit)
        except (OSError, ValueError) as error:
            return SendOutcome(f"{type(error).__name__}: {error}")

    def _communicate(
        self, process: subprocess.Popen[bytes], request: Mapping[str, Any], limit: float
    ) -> SendOutcome:
        with self._changed:
            self._process = process
        try:
            output, _ = process.communicate(json.dumps(request).encode(), timeout=limit)
        except subprocess.TimeoutExpired:
            return SendOutcome(f"no answer within {limit:g} s")
        finally:
            process.kill()
            with self._changed:
                self._process = None
        if process.returncode:
            return SendOutcome(f"the sending process ended with code {process.returncode}")
        document = parse_object(output)
        return SendOutcome(str(document["problem"]), bool(document["is_permanent"]))

    def _pause(self, seconds: float) -> bool:
        """Pause before a retry, briefly at the end of a command; return whether to retry."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, seconds)
            if self._is_closing:
                limit = min(seconds, LAST_PAUSE_SECONDS)
                self._changed.wait_for(lambda: self._is_abandoned, limit)
            return not self._is_abandoned

    def _report(self, delivery: _Delivery, state: State, reason: str) -> None:
        """Log an event that was not delivered, and write it to the journal."""
        event = delivery.event
        self._journal.write(event, self._sink.name, state, reason, delivery.attempts)
        logger.warning("event '%s' not delivered to %s: %s", event.name, self._sink.name, reason)
