"""Wikipedia articles as WikiExtractor writes them: `<doc>` blocks or JSON lines.

https://github.com/attardi/wikiextractor writes folders such as `AA/wiki_00`. The first line of a
file shows which of the two formats it has.
"""

from __future__ import annotations

import html
import re
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from regauge.data.sources import UNDECODABLE, Piece, Record, Rejected, _files
from regauge.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELDS = ("title", "text")
BEGIN = re.compile(rb'<doc id="[^"]*" .*?title="(.*?)"(?: \w+="[^"]*")*>')
"""The start tag. A title may have quotes; in some versions other attributes follow it."""
END = b"</doc>"
"""The end tag."""


class Wikipedia(_files.FileSource):
    """Articles with the fields `title` and `text`; the text does not repeat the title."""

    entities: Literal["keep", "decode"] = "keep"
    """"decode" converts HTML entities such as &lt;, which WikiExtractor writes by default."""
    chunk_mib: int = Field(default=16, ge=1)
    """Size of a piece in MiB; a file is never divided."""

    def field_names(self) -> tuple[str, ...]:
        return FIELDS

    def divide_files(self, files: list[_files.InputFile]) -> tuple[Piece, ...]:
        """Group small files."""
        return _files.group_files(files, self.chunk_mib * MIB)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the articles of a piece, and rejections for incomplete ones."""
        for name in piece.files:
            lines = _files.read_file_lines(name)
            first = next(lines, None)
            if first is None:
                continue
            all_lines = chain([first], lines)
            is_json = not isinstance(first, Rejected) and first.data.startswith(b"{")
            if is_json:
                items = _files.read_json_lines(name, all_lines, FIELDS)
            else:
                items = _parse_blocks(name, all_lines)
            yield from items if self.entities == "keep" else map(_decode_entities, items)


def _decode_entities(item: Record | Rejected) -> Record | Rejected:
    if isinstance(item, Rejected):
        return item
    fields = {name: html.unescape(str(text)) for name, text in item.fields.items()}
    return item._replace(fields=dict(fields))


def _parse_blocks(
    name: str, lines: Iterator[_files.TextLine | Rejected]
) -> Iterator[Record | Rejected]:
    """Yield the articles between start and end tags; an article that lacks one is rejected."""
    article: _Article | None = None
    is_outside = False
    for line in lines:
        if isinstance(line, Rejected):
            yield line
            article = article and article._replace(is_complete=False)
        elif start := BEGIN.fullmatch(line.data):
            if article:
                yield article.reject_unfinished()
            article, is_outside = _Article(name, line.location, start[1], []), False
        elif article and line.data == END:
            yield article.finish()
            article = None
        elif article:
            article.lines.append(line.data)
        elif line.data.strip() and not is_outside:
            yield Rejected(name, line.location, "text outside of a document")
            is_outside = True
    if article:
        yield article.reject_unfinished()


class _Article(NamedTuple):
    file: str
    location: str
    title: bytes
    lines: list[bytes]
    is_complete: bool = True

    def finish(self) -> Record | Rejected:
        """Return the record of an article whose end tag was read."""
        lines = self.lines[1:] if self.lines[:1] == [self.title] else self.lines
        try:
            title, text = self.title.decode(), b"\n".join(lines).strip(b"\n").decode()
        except UnicodeDecodeError as error:
            return Rejected(self.file, self.location, UNDECODABLE, str(error))
        if not self.is_complete:
            return Rejected(self.file, self.location, "document with unreadable lines", title)
        return Record(self.file, self.location, {"title": title, "text": text})

    def reject_unfinished(self) -> Rejected:
        """Return the rejection of an article without an end tag."""
        title = self.title.decode(errors="replace")
        return Rejected(self.file, self.location, "document without an end tag", title)
