"""Combines repeated events, so that a run that fails in a loop sends few messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regauge.monitoring.notify.events import Event


class RateLimit:
    """Admits at most one event of a name and kind of failure within `repeat_seconds`.

    The last event that was not admitted is sent when the time is over, because it describes the
    state of the run. The number of the others is sent with the next event. The caller provides the
    time, in seconds of a clock that never jumps.
    """

    def __init__(self, repeat_seconds: float) -> None:
        self._repeat_seconds = repeat_seconds
        self._sent_at: dict[tuple[str, str], float] = {}
        self._repeats: Counter[str] = Counter()
        self._last: Event | None = None
        self._due_at = 0.0

    def admit(self, event: Event, now: float) -> Event | None:
        """Return the event with the number of those before it, or None if it must wait."""
        key = event.name, event.failure_kind
        sent_at = self._sent_at.get(key)
        is_repeat = sent_at is not None and now - sent_at < self._repeat_seconds
        if is_repeat and not event.is_final:
            self._hold_back(event, (sent_at or 0.0) + self._repeat_seconds)
            return None
        self._sent_at[key] = now
        return self._add_repeats(event)

    def take_due(self, now: float) -> Event | None:
        """Return the event whose wait is over, once; None if there is none."""
        if self._last is None or now < self._due_at:
            return None
        event = self._last
        self._sent_at[event.name, event.failure_kind] = now
        self._repeats[event.name] -= 1
        return self._add_repeats(event)

    def _hold_back(self, event: Event, due_at: float) -> None:
        if self._last is None:
            self._due_at = due_at
        self._repeats[event.name] += 1
        self._last = event

    def _add_repeats(self, event: Event) -> Event:
        repeats = {name: count for name, count in self._repeats.items() if count}
        self._repeats.clear()
        self._last = None
        return replace(event, repeats=repeats)
