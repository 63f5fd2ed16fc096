"""Sources: readers of records. One choice per file; a source lists pieces and reads a piece.

A source does not depend on rows, tokenizers or processes. Input that it cannot use is yielded as
`Rejected`, with the location and the reason, so nothing is dropped silently.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple

from regauge.config import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.values import FieldKind, Value


class Piece(NamedTuple):
    """A unit of work that any process can read independently."""

    name: str
    bytes: int
    """Number of bytes to read, for progress reports."""
    text_bytes: int
    """Estimated number of bytes of text, for the check of the disk."""
    stamp: str
    """Identifies the version of the input; it changes when the input changes."""
    files: tuple[str, ...]
    """Names of the files, or of the one file that the piece is a part of."""
    start: int = 0
    """First byte, row group or batch of a part of a file."""
    stop: int | None = None
    """End of the part, exclusive; None for the end of the file."""
    source: int = 0
    """Index of the source, if several sources are combined."""
    unit: str = ""
    """The unit that becomes a record, if the files decide it."""


class Record(NamedTuple):
    """One document: values by field. Fields without a value are left out."""

    file: str
    location: str
    """Human-readable location in the file: "line 12", "byte 4096", "module.Class"."""
    fields: dict[str, Value]


class Rejected(NamedTuple):
    """Input that could not be used; it is counted by reason and written to `rejected.jsonl`."""

    file: str
    location: str
    """Human-readable location in the file."""
    reason: str
    """A short reason from a small set, because reasons are counted."""
    detail: str = ""

    def to_document(self) -> dict[str, str]:
        """Return the form that is stored in files, JSON-ready."""
        return {
            "file": self.file,
            "location": self.location,
            "reason": self.reason,
            "detail": self.detail,
        }


class Skipped(NamedTuple):
    """A record that the settings exclude; it is counted by reason but not written anywhere."""

    reason: str
    fields: dict[str, Value]


UNDECODABLE = "undecodable bytes"
"""The reason of a rejection if a record is not UTF-8."""
SourceItem = Record | Rejected | Skipped
"""The items that a source or a filter yields."""


def reject_undecodable(item: SourceItem) -> SourceItem:
    """Return an item, or a rejection if a field name or a text of it has a lone surrogate."""
    if isinstance(item, Record) and not all(
        is_unicode(name) and is_unicode(value) for name, value in item.fields.items()
    ):
        return Rejected(item.file, item.location, UNDECODABLE, "lone surrogate")
    return item


def is_unicode(value: Value) -> bool:
    """Return whether the texts of a value can be encoded as UTF-8."""
    if isinstance(value, int | float):
        return True
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Source(Choice):
    """An input, as a deterministic list of pieces."""

    duplicates: Literal["keep", "drop"] = "keep"
    """Whether to keep or to drop a record if all that rows read from it equals an earlier one."""

    @abstractmethod
    def list_pieces(self) -> tuple[Piece, ...]:
        """Return the pieces in a fixed order; raises DataError if there is nothing to read."""

    @abstractmethod
    def read(self, piece: Piece) -> Iterator[SourceItem]:
        """Yield the items of a piece, in a fixed order."""

    def division_remedy(self) -> str:
        """Return the remedy for a source with a single record, which cannot be split."""
        return "divide it into documents"

    def remote_location(self) -> str:
        """Return the remote location that is needed to list the pieces; empty for local files."""
        return ""

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the fields, or nothing if they are only known after reading."""
        return ()

    def field_kinds(self, piece: Piece) -> dict[str, FieldKind]:
        """Return the kind of each field of a piece, if it is known before reading."""
        del piece
        return {}

    def class_names(self, piece: Piece) -> dict[str, tuple[str, ...]]:
        """Return the names of the classes 0, 1, … by field, if the input declares them."""
        del piece
        return {}
