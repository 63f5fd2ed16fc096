"""Plain text files (.gz and .zst too): a document per file, per paragraph or per line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, _compressed, _files
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


class Text(_files.FileSource):
    """UTF-8 text with one field, `text`."""

    document: Literal["file", "paragraph", "line"] = "file"
    """What is one document; paragraphs are separated by blank lines."""
    piece_mib: int = Field(default=8, ge=1)
    """Bytes that one process reads at a time."""

    def fields(self) -> tuple[str, ...]:
        """Return the one field."""
        return ("text",)

    def divide(self, found: list[_files.File]) -> tuple[Piece, ...]:
        """Return small files together; a large one in parts where a document is a line."""
        return _files.group(found, self.piece_mib * MIB, divisible=self.document == "line")

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield the documents of a piece."""
        if self.document == "file":
            for name in piece.files:
                yield _whole_file(name)
            return
        gathered: list[_files.Line] = []
        current = ""
        for name, line in _files.lines(piece):
            between = isinstance(line, Rejected) or not line.data.strip()
            if gathered and (between or name != current or self.document == "line"):
                yield _document(current, gathered)
                gathered = []
            current = name
            if isinstance(line, Rejected):
                yield line
            elif not between:
                gathered.append(line)
        if gathered:
            yield _document(current, gathered)


def _whole_file(name: str) -> Record | Rejected:
    try:
        with _files.open_bytes(name) as file:
            data = file.read().removeprefix(_files.BYTE_ORDER_MARK)
    except _compressed.damage() as error:
        return Rejected(name, "the whole file", "damaged compressed file", str(error))
    return _decoded(name, "the whole file", data.replace(b"\r\n", b"\n"))


def _document(name: str, lines: list[_files.Line]) -> Record | Rejected:
    return _decoded(name, lines[0].place, b"\n".join(line.data for line in lines))


def _decoded(name: str, place: str, data: bytes) -> Record | Rejected:
    try:
        return Record(name, place, {"text": data.decode()})
    except UnicodeDecodeError as error:
        return Rejected(name, place, "undecodable bytes", str(error))
