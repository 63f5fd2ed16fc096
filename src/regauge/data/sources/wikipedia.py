"""Wikipedia as WikiExtractor leaves it: files of `<doc>` blocks, or of JSON lines.

https://github.com/attardi/wikiextractor writes folders such as `AA/wiki_00`; which of its two forms
a file has is seen from its first line.
"""

from __future__ import annotations

import html
import re
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, _files, _values
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELDS = ("title", "text")
BEGIN = re.compile(rb'<doc id="[^"]*" .*?title="(.*?)"(?: \w+="[^"]*")*>')
"""A title may hold quotes; in some versions other attributes follow it."""
END = b"</doc>"


class Wikipedia(_files.FileSource):
    """Articles with two fields, `title` and `text`; the text does not begin with the title."""

    entities: Literal["keep", "decode"] = "keep"
    """"decode" makes < of &lt;, as WikiExtractor writes it unless it is told not to."""
    piece_mib: int = Field(default=16, ge=1)
    """Bytes that one process reads at a time; a file is never divided."""

    def fields(self) -> tuple[str, ...]:
        """Return the two fields."""
        return FIELDS

    def divide(self, found: list[_files.File]) -> tuple[Piece, ...]:
        """Return files together."""
        return _files.group(found, self.piece_mib * MIB)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the articles of a piece, and what is no whole article."""
        for name in piece.files:
            lines = _files.lines_of(name)
            first = next(lines, None)
            if first is None:
                continue
            whole = chain([first], lines)
            json = not isinstance(first, Rejected) and first.data.startswith(b"{")
            for found in _objects(name, whole) if json else _blocks(name, whole):
                yield self._decoded(found) if isinstance(found, Record) else found

    def _decoded(self, record: Record) -> Record:
        if self.entities == "keep":
            return record
        fields = {name: html.unescape(str(text)) for name, text in record.fields.items()}
        return record._replace(fields=dict(fields))


def _objects(name: str, lines: Iterator[_files.Line | Rejected]) -> Iterator[Record | Rejected]:
    for line in lines:
        if isinstance(line, Rejected):
            yield line
        elif line.data.strip():
            yield _values.parsed(name, line.place, line.data, FIELDS)


def _blocks(name: str, lines: Iterator[_files.Line | Rejected]) -> Iterator[Record | Rejected]:
    """Yield what is between the marks of a document; what lacks one of them is rejected."""
    article: _Article | None = None
    outside = False
    for line in lines:
        if isinstance(line, Rejected):
            yield line
            article = article and article._replace(whole=False)
        elif begun := BEGIN.fullmatch(line.data):
            if article:
                yield article.without_end()
            article, outside = _Article(name, line.place, begun[1], []), False
        elif article and line.data == END:
            yield article.ended()
            article = None
        elif article:
            article.lines.append(line.data)
        elif line.data.strip() and not outside:
            yield Rejected(name, line.place, "text outside of a document")
            outside = True
    if article:
        yield article.without_end()


class _Article(NamedTuple):
    """A document as far as it was read."""

    file: str
    place: str
    title: bytes
    lines: list[bytes]
    whole: bool = True

    def ended(self) -> Record | Rejected:
        """Return the record of a document that came to its end."""
        lines = self.lines[1:] if self.lines[:1] == [self.title] else self.lines
        try:
            title, text = self.title.decode(), b"\n".join(lines).strip(b"\n").decode()
        except UnicodeDecodeError as error:
            return Rejected(self.file, self.place, "undecodable bytes", str(error))
        if not self.whole:
            return Rejected(self.file, self.place, "document without all of its lines", title)
        return Record(self.file, self.place, {"title": title, "text": text})

    def without_end(self) -> Rejected:
        """Return what is said of a document that is cut off."""
        title = self.title.decode(errors="replace")
        return Rejected(self.file, self.place, "document without its end", title)
