"""Sends one command's events to every configured sink."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.monitoring.notify.delivery import SinkQueue
from regauge.monitoring.notify.events import Event, EventName, EventSource
from regauge.monitoring.notify.sinks import build_sinks
from regauge.system.errors import LimitReachedError, describe_error
from regauge.system.stop_signals import EXIT_CODES, defer_stop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.monitoring.notify.settings import Notifications


class RateLimit:
    """Admits at most one event per name and failure kind within `repeat_seconds`.

    The last event held back is sent when the time is over, because it describes the run's state.
    The number of the others is sent with the next event. `now` is in seconds on a clock that never
    jumps.
    """

    def __init__(self, repeat_seconds: float) -> None:
        self._repeat_seconds = repeat_seconds
        self._sent_at: dict[tuple[str, str], float] = {}
        self._repeats: Counter[str] = Counter()
        self._last: Event | None = None
        self._due_at = 0.0

    def admit(self, event: Event, now: float) -> Event | None:
        """Return the event with the number of those before it, or None if it must wait."""
        sent_at = self._sent_at.get((event.name, event.failure_kind))
        is_first = sent_at is None or now - sent_at >= self._repeat_seconds
        if is_first or event.is_final:
            return self._release(event, now)
        if self._last is None:
            self._due_at = (sent_at or 0.0) + self._repeat_seconds
        self._repeats[event.name] += 1
        self._last = event
        return None

    def take_due(self, now: float) -> Event | None:
        """Return the event whose wait is over, once; None if there is none."""
        if self._last is None or now < self._due_at:
            return None
        self._repeats[self._last.name] -= 1
        return self._release(self._last, now)

    def _release(self, event: Event, now: float) -> Event:
        self._sent_at[event.name, event.failure_kind] = now
        repeats = {name: count for name, count in self._repeats.items() if count}
        self._repeats.clear()
        self._last = None
        return replace(event, repeats=repeats)


class Notifier:
    """Sends events; without a sink it does nothing. `clock` must never jump.

    The delivery journal is written to a folder, by default the source's. Raises SettingsError if a
    sink's secret cannot be read.
    """

    def __init__(
        self,
        settings: Notifications,
        source: EventSource,
        journal_folder: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._source, self._clock = settings, source, clock
        folder = journal_folder or Path(source.folder)
        self._queues = [SinkQueue(sink, settings, folder) for sink in build_sinks(settings)]
        self._rate_limit = RateLimit(settings.repeat_seconds)
        self.read_usd: Callable[[], float | None] = lambda: None
        """Returns the dollars so far, for an error that ends the command."""
        self.may_send: Callable[[], bool] = lambda: True
        """Returns whether this process sends the events; of several nodes only the leader does."""
        self.has_ended = False
        """Whether the command's last event was sent."""

    @property
    def is_active(self) -> bool:
        return bool(self._queues)

    def send(self, name: EventName, **fields: Any) -> None:
        """Queue an event with fields of `Event`, unless the settings leave it out; never waits."""
        self.has_ended |= fields.get("is_final", False)
        if self._queues and name in self._settings.events and self.may_send():
            event = Event(name, self._source, time.time(), **fields)
            self._put(self._rate_limit.admit(event, self._clock()))

    def poll(self) -> None:
        """Queue the event whose wait for a repetition is over."""
        self._put(self._rate_limit.take_due(self._clock()))

    def close(self) -> None:
        """Wait up to `exit_seconds` for unsent events; the others are logged."""
        self._put(self._rate_limit.take_due(float("inf")))
        deadline = time.monotonic() + self._settings.exit_seconds
        with defer_stop(has_limit=False):  # a repeated signal has a limit
            for queue in self._queues:
                queue.begin_close(deadline)
            for queue in self._queues:
                queue.close()

    def _put(self, event: Event | None) -> None:
        if event is not None:
            for queue in self._queues:
                queue.put(event)


@contextmanager
def open_notifier(
    settings: Notifications, source: EventSource, journal_folder: Path | None = None
) -> Iterator[Notifier]:
    """Yield a notifier, and wait for unsent events at the end of the block.

    An error that ends the block is sent, unless a last event was sent before. Raises SettingsError
    if a sink's secret cannot be read.
    """
    notifier = Notifier(settings, source, journal_folder)
    try:
        yield notifier
    except BaseException as error:
        if not notifier.has_ended:
            line, code = describe_error(error)
            problem, remedy = split_remedy(line)
            fields = {"next_action": remedy, "usd": notifier.read_usd(), "is_final": True}
            notifier.send(name_exit(code), problem=problem, **fields)
        raise
    finally:
        notifier.close()


def split_remedy(line: str) -> tuple[str, str]:
    """Split a message into problem and remedy; the remedy may be empty."""
    problem, separator, remedy = line.rpartition("; ")
    return (problem, remedy) if separator else (line, "")


def name_exit(code: int) -> EventName:
    """Return the event for a command's exit code."""
    if code == LimitReachedError.exit_code:
        return "over_budget"
    return "preempted" if code in EXIT_CODES else "failed"
