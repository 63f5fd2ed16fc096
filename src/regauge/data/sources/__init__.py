"""Where records come from: one choice per file, each listing pieces and reading one.

A source knows nothing of rows, tokenizers or processes. What it cannot use it yields as
`Rejected`, with the place and the reason: nothing is dropped in silence.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

Value = str | int | float
"""A text, or a finite number."""


class Piece(NamedTuple):
    """A unit of work that any process can read alone."""

    name: str
    bytes: int
    """What has to be read, for the progress."""
    text_bytes: int
    """An estimate of the text within, for the disk."""
    stamp: str
    """Another one means that the input has changed."""
    files: tuple[str, ...]
    start: int = 0
    """First byte, or first row group, of a part of a single file."""
    stop: int | None = None
    """Where the part ends, exclusive; None is the end of the file."""
    source: int = 0
    """Of which of several sources it is."""


class Record(NamedTuple):
    """One document: named texts and numbers. What is missing has no name in it."""

    file: str
    place: str
    """Where in the file, for people: "line 12", "byte 4096", "module.Class"."""
    fields: dict[str, Value]


class Rejected(NamedTuple):
    """What could not be used, and why."""

    file: str
    place: str
    reason: str
    """One of few, because they are counted."""
    detail: str = ""


class Skipped(NamedTuple):
    """What was left out because that was asked for: it is counted and not written down."""

    reason: str
    fields: dict[str, Value]


Found = Record | Rejected | Skipped
"""What a source or a filter comes to."""


def legible(found: Found) -> Found:
    """Return what was found, rejected where a text of it is no Unicode: half a character."""
    if isinstance(found, Record) and not all(map(is_unicode, found.fields.values())):
        return Rejected(found.file, found.place, "undecodable bytes", "lone surrogate")
    return found


def is_unicode(value: Value) -> bool:
    """Return whether a text holds whole characters alone, as everything but a text does."""
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True


class Source(Choice):
    """Real input, as a deterministic list of pieces."""

    duplicates: Literal["keep", "drop"] = "keep"
    """What becomes of a record that equals an earlier one in every field."""

    @abstractmethod
    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces in a fixed order; raises DataError where there is nothing to read."""

    @abstractmethod
    def read(self, piece: Piece) -> Iterator[Found]:
        """Yield what a piece holds, in a fixed order."""

    def elsewhere(self) -> str:
        """Return what has to be asked, outside of this machine, before the pieces are known."""
        return ""

    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields, or none where only reading tells."""
        return ()

    def kinds(self, piece: Piece) -> dict[str, str]:
        """Return which fields of a piece are "text", "integer" or "real", as far as it says so."""
        del piece
        return {}
