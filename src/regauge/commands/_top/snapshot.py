"""A run, job or server snapshot: named values, one table and events, without a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = float | int | str | None
"""A number in the unit at the end of its key, or a text; None if unknown."""


class TableRow(NamedTuple):
    values: Mapping[str, Value]
    is_problem: bool = False
    """Whether the row needs attention; such rows are shown if there is no space for all."""


class ViewEvent(NamedTuple):
    at: float
    """Seconds since the epoch."""
    text: str
    is_problem: bool = False


class ViewProgress(NamedTuple):
    unit: str
    """Plural noun, such as `steps`."""
    done: float
    total: float | None
    """None if it is unknown."""
    eta_seconds: float | None = None


@dataclass(frozen=True)
class Snapshot:
    name: str
    verb: str
    state: str
    """One word, such as `running`."""
    read_at: float
    """Seconds since the epoch."""
    groups: Mapping[str, Mapping[str, Value]]
    """Values by topic and key."""
    table: str
    """Table name, such as `ranks`."""
    rows: tuple[TableRow, ...]
    reason: str = ""
    """Why the state is not `running`, as one line."""
    facts: tuple[str, ...] = ()
    """Short facts for the headline, such as the attempt and the host."""
    progress: ViewProgress | None = None
    events: tuple[ViewEvent, ...] = ()
    """Oldest first."""

    @property
    def document(self) -> dict[str, Any]:
        """The snapshot as one JSON document; unknown values are null."""
        return {
            "name": self.name,
            "verb": self.verb,
            "state": self.state,
            "reason": self.reason,
            "read_at": round(self.read_at, 3),
            "facts": list(self.facts),
            "progress": None if self.progress is None else self.progress._asdict(),
            **self.groups,
            self.table: [row.values for row in self.rows],
            "events": [{"at": round(event.at, 3), "text": event.text} for event in self.events],
        }


class SnapshotReader(Protocol):
    poll_seconds: float
    """Minimum pause between two reads."""

    def read(self) -> Snapshot:
        """Return the present state; raises RegaugeError if the target cannot be read."""
        ...
