"""Plain text files (.txt, .gz, .zst): one document per file, per paragraph or per line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from regauge.data.sources import UNDECODABLE, Piece, Record, Rejected, _compressed, _files
from regauge.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator


class Text(_files.FileSource):
    """UTF-8 text with one field, `text`."""

    peer_names: ClassVar[tuple[str, ...]] = ("txt",)

    document: Literal["auto", "file", "paragraph", "line"] = "auto"
    """The unit that becomes a record; paragraphs are separated by blank lines. `auto`: the
    paragraphs of a single file, or else the files."""
    chunk_mib: int = Field(default=8, ge=1)
    """Piece size in MiB."""

    def division_remedy(self) -> str:
        return 'set source.document = "line" to divide it'

    def field_names(self) -> tuple[str, ...]:
        return ("text",)

    def divide_files(self, files: list[_files.InputFile]) -> tuple[Piece, ...]:
        """Group small files; divide large ones if each line is a document."""
        is_divisible = self.document == "line"
        pieces = _files.group_files(files, self.chunk_mib * MIB, is_divisible=is_divisible)
        unit = self.document
        if unit == "auto":
            unit = "paragraph" if len(files) == 1 else "file"
        return tuple(piece._replace(unit=unit) for piece in pieces)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        if piece.unit == "file":
            for name in piece.files:
                yield _read_file(name)
            return
        pending: list[_files.TextLine] = []
        file_name = ""
        for name, line in _files.read_lines(piece):
            is_separator = isinstance(line, Rejected) or not line.data.strip()
            if pending and (is_separator or name != file_name or piece.unit == "line"):
                yield _join_lines(file_name, pending)
                pending = []
            file_name = name
            if isinstance(line, Rejected):
                yield line
            elif not is_separator:
                pending.append(line)
        if pending:
            yield _join_lines(file_name, pending)


def _read_file(name: str) -> Record | Rejected:
    try:
        with _files.open_bytes(name) as file:
            data = file.read().removeprefix(_files.BYTE_ORDER_MARK)
    except _compressed.list_damage_errors() as error:
        return Rejected(name, "the whole file", "damaged compressed file", str(error))
    return _decode(name, "the whole file", data.replace(b"\r\n", b"\n"))


def _join_lines(name: str, lines: list[_files.TextLine]) -> Record | Rejected:
    return _decode(name, lines[0].location, b"\n".join(line.data for line in lines))


def _decode(name: str, location: str, data: bytes) -> Record | Rejected:
    try:
        return Record(name, location, {"text": data.decode()})
    except UnicodeDecodeError as error:
        return Rejected(name, location, UNDECODABLE, str(error))
