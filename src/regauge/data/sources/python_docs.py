"""The documentation of the installed Python: real text without a download.

Docstrings of the standard library and of installed packages, and the topics of `help()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from regauge.data.sources import Piece, Record, Rejected, _files
from regauge.data.sources._docstrings import (
    TEXT_SHARE,
    DocumentationSource,
    qualify_name,
    read_documentation,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.values import Value

PIECE_BYTES = 4 * 2**20


class PythonDocs(DocumentationSource):
    """Fields: `text` (a docstring), and its `summary` and `body`, which may be empty."""

    qualified_names: bool = False
    """Whether records have a `name` field, such as `json.dumps`. If rows read it, copies of a
    docstring differ, and are not dropped as duplicates."""
    duplicates: Literal["keep", "drop"] = "drop"
    """Whether to keep or to drop repeated records, such as vendored copies; "drop" by default."""

    def field_names(self) -> tuple[str, ...]:
        return ("text", "summary", "body", *(("name",) if self.qualified_names else ()))

    def list_pieces(self) -> tuple[Piece, ...]:
        """Group the Python files of every root into pieces of about 4 MiB."""
        grouped = (
            _files.group_files(files, PIECE_BYTES, text_share=TEXT_SHARE)
            for files in self.list_files()
        )
        return tuple(piece for pieces in grouped for piece in pieces)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record for every documented object and every topic."""
        for name in piece.files:
            for item in read_documentation(name):
                if isinstance(item, Rejected):
                    yield item
                    continue
                summary, body = self.split_pair(item.text) or ("", "")
                fields: dict[str, Value] = {"text": item.text, "summary": summary, "body": body}
                if self.qualified_names:
                    fields["name"] = qualify_name(name, item.location)
                yield Record(name, item.location, fields)
