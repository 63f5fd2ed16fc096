"""The documentation of the Python that is installed: real text with no download.

Docstrings of the standard library and of the installed packages, and the topics of `help()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from regauge.data.sources import Piece, Record, Rejected, Value, _files
from regauge.data.sources._docstrings import TEXT_SHARE, Documentation, documents

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 4 * 2**20


class PythonDocs(Documentation):
    """Fields: `text` (a whole docstring), and `summary` and `body` (the rest) where both are."""

    duplicates: Literal["keep", "drop"] = "drop"
    """What becomes of a record that equals an earlier one: vendored copies, by default dropped."""

    def fields(self) -> tuple[str, ...]:
        """Return the three fields that every record has."""
        return ("text", "summary", "body")

    def pieces(self) -> tuple[Piece, ...]:
        """Return the Python files of every root in groups of about 4 MiB."""
        grouped = (
            _files.group(files, PIECE_BYTES, text_share=TEXT_SHARE) for files in self.files()
        )
        return tuple(piece for pieces in grouped for piece in pieces)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record for every documented object and every topic."""
        for name in piece.files:
            for found in documents(name):
                if isinstance(found, Rejected):
                    yield found
                    continue
                summary, body = self.pair(found.text) or ("", "")
                fields: dict[str, Value] = {"text": found.text, "summary": summary, "body": body}
                yield Record(name, found.place, fields)
