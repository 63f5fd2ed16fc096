"""A custom source: Markdown files, with one record per heading and the text below it."""

import hashlib
import re
from pathlib import Path

from regauge.data.sources import Piece, Record, Source
from regauge.system.errors import DataError


class Sections(Source):
    """The Markdown files of a folder; a record has the fields `title` and `text`."""

    folder: str = str(Path(__file__).resolve().parents[1] / "docs")
    """Folder of the files."""

    def field_names(self):
        return ("title", "text")

    def list_pieces(self):
        paths = sorted(Path(self.folder).rglob("*.md"))
        files = [(str(path), path.read_bytes()) for path in paths]
        if not files:
            raise DataError(f"{self.folder} has no .md file", "correct source.folder")
        return tuple(
            Piece(name, len(data), len(data), hashlib.sha256(data).hexdigest(), files=(name,))
            for name, data in files
        )

    def read(self, piece):
        (name,) = piece.files
        parts = re.split(r"^#+ ", Path(name).read_text(), flags=re.MULTILINE)
        for number, part in enumerate(parts[1:], start=1):
            title, _, text = part.partition("\n")
            yield Record(name, f"heading {number}", {"title": title, "text": text.strip()})
