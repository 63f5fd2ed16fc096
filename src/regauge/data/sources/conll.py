"""CoNLL files (.conll, .conllu, .gz, .zst): one word with its tags per line.

A blank line ends a sentence, which is a record.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, _files
from regauge.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.values import Value

FIELDS = {"tokens": 0, "tags": -1}
"""Words in the first column, tags in the last one, as in CoNLL-2003."""
CONLLU_FIELDS = {"tokens": 1, "tags": 3}
"""Words and universal parts of speech: https://universaldependencies.org/format.html"""
_CONLLU_WIDTH = 10
_CONLLU_RANGE = re.compile(r"\d+[-.]\d+")
"""Number of a CoNLL-U line that is not a word: several words, or an empty node."""
_DOCUMENT_START = "-DOCSTART-"


class Conll(_files.FileSource):
    """Sentences; each field is the list of values in one column."""

    peer_names: ClassVar[tuple[str, ...]] = ("conll2003", "conllu", "iob", "bio", "ner")

    fields: dict[str, int] = {}
    """Field -> column from 0, or from -1 at the end; by default {tokens = 0, tags = -1}, in .conllu
    files {tokens = 1, tags = 3}."""
    chunk_mib: int = Field(default=8, ge=1)
    """Piece size in MiB; a file is never divided."""

    def field_names(self) -> tuple[str, ...]:
        return tuple(self.fields or FIELDS)

    def divide_files(self, files: list[_files.InputFile]) -> tuple[Piece, ...]:
        """Group small files."""
        return _files.group_files(files, self.chunk_mib * MIB)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each sentence."""
        for name in piece.files:
            is_conllu = ".conllu" in Path(name).suffixes
            fields = self.fields or (CONLLU_FIELDS if is_conllu else FIELDS)
            rows: list[list[str]] = []
            location, width = "", 0
            for line in _files.read_file_lines(name):
                if isinstance(line, Rejected):
                    yield line
                    continue
                row, is_comment = line.split_columns(), line.data.startswith(b"#")
                if is_comment and not rows and (len(row) != width or b"=" in line.data):
                    continue
                if not any(map(str.strip, row)) or row[0] == _DOCUMENT_START:
                    if rows:
                        yield _build_record(name, location, rows, fields)
                    rows = []
                    continue
                location, width = location if rows else line.location, len(row)
                if not (width == _CONLLU_WIDTH and _CONLLU_RANGE.fullmatch(row[0])):
                    rows.append(row)
            if rows:
                yield _build_record(name, location, rows, fields)


def _build_record(
    name: str, location: str, rows: list[list[str]], fields: dict[str, int]
) -> Record | Rejected:
    widths = {len(row) for row in rows}
    needed = max(index + 1 if index >= 0 else -index for index in fields.values())
    if len(widths) > 1 or min(widths) < max(needed, len(fields)):
        detail = f"{' and '.join(map(str, sorted(widths)))} for {', '.join(fields)}"
        return Rejected(name, location, "wrong number of columns", detail)
    columns: dict[str, Value] = {
        field: [row[index].strip() for row in rows] for field, index in fields.items()
    }
    return Record(name, location, columns)
