"""JSON lines (.jsonl, .gz, .zst): one object per line, its texts and integers are the fields."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import Field

from regauge.data.sources import Piece, Record, Rejected, Source, _files

if TYPE_CHECKING:
    from collections.abc import Iterator


class JsonLines(Source):
    """Files with one JSON object per line."""

    files: tuple[str, ...] = Field(min_length=1)
    """Globs; `**` crosses folders."""
    columns: tuple[str, ...] = ()
    """Keys to read; none given means every text and integer."""
    piece_mib: int = Field(default=16, ge=1)
    """Bytes that one process reads at a time."""

    def fields(self) -> tuple[str, ...]:
        """Return the named columns, if any."""
        return self.columns

    def pieces(self) -> tuple[Piece, ...]:
        """Return small files together and large plain ones in parts."""
        return _files.group(_files.find(self.files), self.piece_mib * 2**20, divisible=True)

    def read(self, piece: Piece) -> Iterator[Record | Rejected]:
        """Yield a record or a rejection for each line that is not blank."""
        for file, line in _files.lines(piece):
            if isinstance(line, Rejected):
                yield line
            elif line.data.strip():
                yield self._parse(file, line)

    def _parse(self, file: str, line: _files.Line) -> Record | Rejected:
        try:
            document = json.loads(line.data.decode())
        except UnicodeDecodeError as error:
            return Rejected(file, line.place, "undecodable bytes", str(error))
        except (ValueError, RecursionError) as error:
            return Rejected(file, line.place, "malformed JSON", str(error))
        if not isinstance(document, dict):
            return Rejected(file, line.place, "no JSON object", type(document).__name__)
        return Record(file, line.place, _files.usable(document, self.columns))
