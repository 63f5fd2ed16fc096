"""A run event as sent to people: one JSON document, one line, one subject.

All texts consist of single-line fields without control characters. So a failed program's message
cannot add a header to an e-mail, or a mention to a chat.
"""

from __future__ import annotations

import datetime as dt
import re
import socket
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from regauge.config import FORMAT

EventName = Literal[
    "failed",
    "stuck",
    "recovered",
    "finished",
    "over_budget",
    "preempted",
    "deadline_at_risk",
    "gate_refused",
]
EVENTS: tuple[EventName, ...] = get_args(EventName)
"""All event names.

`failed`: an attempt, or the command, failed. `stuck`: a run hangs or does not make steps.
`recovered`: a run makes steps again. `over_budget`: a time, token or dollar limit was reached.
`preempted`: a stop signal arrived. `deadline_at_risk`, `gate_refused`: pipeline events.
"""
TITLES: dict[EventName, str] = {
    "failed": "failed",
    "stuck": "is stuck",
    "recovered": "recovered",
    "finished": "finished",
    "over_budget": "reached its limit",
    "preempted": "was preempted",
    "deadline_at_risk": "may miss its deadline",
    "gate_refused": "refused the new model",
}
MAX_TEXT_LENGTH = 1000
"""Maximum characters in a problem or next action; longer texts are cut."""
CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@")
"""User and password in an address."""


@dataclass(frozen=True)
class EventSource:
    verb: str
    run: str
    folder: str
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Event:
    """One run event; unknown fields are None or empty."""

    name: EventName
    source: EventSource
    time: float
    """Seconds since the epoch."""
    problem: str = ""
    """One line."""
    next_action: str = ""
    """What a person, or Regauge, does next."""
    failure_kind: str = ""
    """Failure kind, such as `hang`."""
    step: int | None = None
    attempt: int | None = None
    usd: float | None = None
    is_final: bool = False
    """Whether the command ends with this event."""
    repeats: dict[str, int] = field(default_factory=dict)
    """Event name -> earlier events left out as repeats."""

    @property
    def utc_time(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.time, dt.UTC)

    @property
    def document(self) -> dict[str, Any]:
        """The event as a JSON document."""
        return {
            "format": FORMAT,
            "event": self.name,
            "time": self.utc_time.isoformat(timespec="seconds"),
            "verb": self.source.verb,
            "run": clean_text(self.source.run),
            "host": self.source.host,
            "step": self.step,
            "attempt": self.attempt,
            "failure_kind": self.failure_kind or None,
            "problem": clean_text(self.problem) or None,
            "usd": None if self.usd is None else round(self.usd, 4),
            "folder": clean_text(self.source.folder),
            "next_action": clean_text(self.next_action) or None,
            "is_final": self.is_final,
            "repeats": self.repeats,
            "text": self.text,
        }

    @property
    def subject(self) -> str:
        """The headline, as `train pairs failed on node-1`."""
        run = clean_text(self.source.run)
        return f"{self.source.verb} {run} {TITLES[self.name]} on {self.source.host}"

    @property
    def facts(self) -> dict[str, str]:
        """Label for people -> known field as text."""
        kind = f" ({self.failure_kind})" if self.failure_kind else ""
        problem = clean_text(self.problem)
        facts = {
            "Problem": f"{problem}{kind}" if problem else "",
            "Step": "" if self.step is None else f"{self.step:,}",
            "Attempt": "" if self.attempt is None else str(self.attempt),
            "Cost": "" if self.usd is None else f"${self.usd:,.4f}",
            "Folder": clean_text(self.source.folder),
            "Next": clean_text(self.next_action),
            "Not sent": ", ".join(f"{count} x {name}" for name, count in self.repeats.items()),
        }
        return {label: text for label, text in facts.items() if text}

    @property
    def text(self) -> str:
        """The event as one line."""
        facts = [f"{label.lower()} {text}" for label, text in self.facts.items()]
        return f"{self.subject}: {'; '.join(facts)}"


def clean_text(text: str) -> str:
    """Return a text as one line of limited length, without control characters and passwords."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    line = CREDENTIALS.sub("***@", " ".join(printable.split()))
    return line if len(line) <= MAX_TEXT_LENGTH else line[: MAX_TEXT_LENGTH - 1] + "…"
