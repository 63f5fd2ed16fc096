"""A snapshot of a run, a job or a server: named figures, one table and events, without a layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ValueKind = Literal["number", "count", "percent", "dollars", "seconds", "bytes", "text"]
"""How a value is shown; `count` has three significant digits."""
Value = float | int | str | None


@dataclass(frozen=True)
class Figure:
    """One named value."""

    key: str
    """Key in the JSON document, with its unit."""
    label: str
    value: Value
    kind: ValueKind = "number"


@dataclass(frozen=True)
class FigureGroup:
    """Figures of one topic."""

    name: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Column:
    """A column of the table of a snapshot."""

    key: str
    label: str
    kind: ValueKind = "number"


@dataclass(frozen=True)
class TableRow:
    """A row of the table of a snapshot."""

    values: dict[str, Value]
    """Values by the key of their column."""
    is_problem: bool = False
    """Whether the row needs attention; such rows are shown if there is no space for all."""


@dataclass(frozen=True)
class ViewTable:
    """The processes of a run, or the models of a server."""

    name: str
    columns: tuple[Column, ...] = ()
    rows: tuple[TableRow, ...] = ()


@dataclass(frozen=True)
class ViewEvent:
    """Something that happened to a run."""

    at: float
    """Seconds since the epoch."""
    text: str
    is_problem: bool = False


@dataclass(frozen=True)
class ViewProgress:
    """How much of a run is done."""

    unit: str
    """Plural noun, such as `steps`."""
    done: float
    total: float | None
    """None if it is unknown."""
    eta_seconds: float | None = None

    @property
    def fraction(self) -> float | None:
        """The share that is done, between 0 and 1; None if the total is unknown."""
        return min(1.0, self.done / self.total) if self.total else None


@dataclass(frozen=True)
class Snapshot:
    """The state of a target at one moment."""

    name: str
    verb: str
    state: str
    """One word, such as `running`."""
    read_at: float
    """Seconds since the epoch."""
    reason: str = ""
    """Why the state is not `running`, as one line."""
    facts: tuple[str, ...] = ()
    """Short facts of the headline, such as the attempt and the host."""
    progress: ViewProgress | None = None
    groups: tuple[FigureGroup, ...] = ()
    table: ViewTable = field(default_factory=lambda: ViewTable("processes"))
    events: tuple[ViewEvent, ...] = ()
    """Oldest first."""

    @property
    def document(self) -> dict[str, Any]:
        """The snapshot as one JSON document; unknown values are null."""
        progress = self.progress
        return {
            "name": self.name,
            "verb": self.verb,
            "state": self.state,
            "reason": self.reason,
            "read_at": round(self.read_at, 3),
            "facts": list(self.facts),
            "progress": None
            if progress is None
            else {
                "unit": progress.unit,
                "done": progress.done,
                "total": progress.total,
                "eta_seconds": progress.eta_seconds,
            },
            **{
                group.name.lower(): {figure.key: figure.value for figure in group.figures}
                for group in self.groups
            },
            self.table.name.lower(): [row.values for row in self.table.rows],
            "events": [{"at": round(event.at, 3), "text": event.text} for event in self.events],
        }


class SnapshotReader(Protocol):
    """Reads the snapshots of one target."""

    poll_seconds: float
    """Minimum pause between two reads."""

    def read(self) -> Snapshot:
        """Return the present state; raises RegaugeError if the target cannot be read."""
        ...
