"""Reads files as lines of bytes or of JSON: expands globs, and divides large files into parts.

A part of a file has the lines that start in it. Parts can be read by different processes, and
together they yield every line once.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import math
import re
from abc import abstractmethod
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from pydantic import Field

from regauge.data.sources import (
    UNDECODABLE,
    Piece,
    Record,
    Rejected,
    Source,
    _compressed,
    _remote,
)
from regauge.data.values import Value, convert_value
from regauge.system.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_LINE_BYTES = 64 * 2**20
"""Maximum length of a line; longer ones are rejected."""
MAX_FILES_PER_PIECE = 1000
"""Maximum number of files in one piece."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class FileSource(Source):
    """A source that reads files."""

    files: tuple[str, ...] = Field(min_length=1)
    """Paths, path globs, or URL globs such as s3://bucket/*.txt. `**` matches any number of
    folders. A path that exists as written is not a glob."""

    def remote_location(self) -> str:
        return next(filter(_remote.is_url, self.files), "")

    def list_pieces(self) -> tuple[Piece, ...]:
        return self.divide_files(find_files(self.files))

    @abstractmethod
    def divide_files(self, files: list[InputFile]) -> tuple[Piece, ...]:
        """Return the pieces of files."""


class InputFile(NamedTuple):
    """A file with its size and its version."""

    name: str
    bytes: int
    version: str
    """Version of the content; together with the size it identifies a change."""


class TextLine(NamedTuple):
    """A line without its line break."""

    location: str
    """Human-readable location: "line 12" or "byte 4096"."""
    data: bytes

    def split_columns(self) -> list[str]:
        """Return the values between tabs, or without tabs between white space."""
        text = self.data.decode(errors="surrogateescape")
        return text.split("\t") if "\t" in text else text.split()


def find_files(patterns: tuple[str, ...]) -> list[InputFile]:
    """Return the files that match, sorted and without repetition; raises DataError if none does."""
    by_name: dict[str, InputFile] = {}
    for pattern in patterns:
        matches = list(_match(pattern))
        if not matches:
            raise DataError(f"no file matches '{pattern}'", "correct source.files")
        by_name.update((file.name, file) for file in matches)
    return [by_name[name] for name in sorted(by_name)]


def _match(pattern: str) -> Iterator[InputFile]:
    pattern = pattern.removeprefix("file://")
    if _remote.is_url(pattern):
        yield from (InputFile(*match) for match in _remote.list_matches(pattern))
        return
    if Path(pattern).is_dir():
        raise DataError(f"{pattern} is a folder", f"set source.files to {pattern}/**/*")
    names = glob.glob(_escape_existing(pattern), recursive=True)  # noqa: PTH207 (Path.glob refuses /absolute/*)
    yield from (stat_file(path) for path in map(Path, names) if path.is_file())


def _escape_existing(pattern: str) -> str:
    """Return a pattern whose leading components match only themselves if they exist as written.

    A folder `run[1]` is thus not a pattern for `run1`.
    """
    existing, escaped = "", ""
    for component in re.split(r"(/+)", pattern):
        is_literal = component.startswith("/") or Path(existing + component).exists()
        escaped += glob.escape(component) if is_literal else component
        existing += component
    return escaped


def stat_file(path: Path) -> InputFile:
    """Return the size and the modification time of a local file."""
    stat = path.stat()
    return InputFile(str(path), stat.st_size, str(stat.st_mtime_ns))


def hash_stats(files: Iterable[InputFile]) -> str:
    """Return a hash of names, sizes and versions: cheap, and different after a change."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.bytes}\0{file.version}\n".encode())
    return digest.hexdigest()[:32]


def group_files(
    files: list[InputFile], piece_bytes: int, *, is_divisible: bool = False, text_share: float = 1.0
) -> tuple[Piece, ...]:
    """Group files into pieces of about `piece_bytes`; large divisible files become equal parts."""
    pieces: list[Piece] = []
    group: list[InputFile] = []
    total = 0
    for file in files:
        if group and (total + file.bytes > piece_bytes or len(group) == MAX_FILES_PER_PIECE):
            pieces.append(build_piece(*group, text_share=text_share))
            group, total = [], 0
        if is_divisible and file.bytes > piece_bytes and _supports_ranges(file):
            pieces.extend(_divide_file(file, piece_bytes))
        else:
            group.append(file)
            total += file.bytes
    return (*pieces, build_piece(*group, text_share=text_share)) if group else tuple(pieces)


def build_piece(*files: InputFile, text_share: float = 1.0) -> Piece:
    """Return a piece of whole files."""
    text_bytes = (
        file.bytes * (_compressed.EXPANSION_FACTOR if _is_compressed(file) else text_share)
        for file in files
    )
    suffix = f" and {len(files) - 1} more" if len(files) > 1 else ""
    names = tuple(file.name for file in files)
    num_bytes = sum(file.bytes for file in files)
    return Piece(f"{names[0]}{suffix}", num_bytes, int(sum(text_bytes)), hash_stats(files), names)


def _is_compressed(file: InputFile) -> bool:
    return _compressed.find_suffix(file.name) in _compressed.SUFFIXES


def _supports_ranges(file: InputFile) -> bool:
    if _is_compressed(file):
        return False
    return not _remote.is_url(file.name) or _remote.supports_ranges(file.name)


def _divide_file(file: InputFile, piece_bytes: int) -> Iterator[Piece]:
    version, num_parts = hash_stats([file]), -(-file.bytes // piece_bytes)
    boundaries = [file.bytes * index // num_parts for index in range(num_parts + 1)]
    for start, stop in pairwise(boundaries):
        num_bytes = stop - start
        label = f"{file.name} from byte {start}"
        yield Piece(label, num_bytes, num_bytes, version, (file.name,), start, stop)


def read_lines(piece: Piece) -> Iterator[tuple[str, TextLine | Rejected]]:
    """Yield (file, line) of a piece; a damaged compressed file yields a rejection at its end."""
    for name in piece.files:
        for line in read_file_lines(name, piece.start, piece.stop):
            yield name, line


def read_file_lines(
    name: str, start: int = 0, stop: int | None = None
) -> Iterator[TextLine | Rejected]:
    """Yield the lines that start in a part of a file; damage yields a rejection at its end."""
    location = "the start of the file"
    try:
        with open_bytes(name) as file:
            for line in _read_lines(file, name, start, stop):
                location = line.location
                yield line
    except _compressed.list_damage_errors() as error:
        yield Rejected(name, f"after {location}", "damaged compressed file", str(error))


@contextmanager
def open_bytes(name: str) -> Iterator[BinaryIO]:
    """Open a plain, .gz or .zst file to read its contents as bytes."""
    with _open_raw(name) as file, _compressed.open_decompressed(file, name) as contents:
        yield contents


@contextmanager
def open_seekable(name: str) -> Iterator[str | BinaryIO]:
    """Yield an argument for readers that seek: a local path, or an open remote file."""
    if not _remote.is_url(name):
        yield name
        return
    with _remote.RemoteFile(name, read_ahead=False) as file:
        yield cast("BinaryIO", file)


def _open_raw(name: str) -> BinaryIO:
    if not _remote.is_url(name):
        return Path(name).open("rb")
    return io.BufferedReader(_remote.RemoteFile(name, read_ahead=True), _compressed.BUFFER_BYTES)


def _read_lines(
    file: BinaryIO, name: str, start: int, stop: int | None
) -> Iterator[TextLine | Rejected]:
    offset = start
    if start:
        file.seek(start - 1)
        offset += _skip_line(file) - 1
    line_number = 0
    while stop is None or offset < stop:
        data = file.readline(MAX_LINE_BYTES)
        if not data:
            return
        line_number += 1
        location = f"byte {offset}" if start else f"line {line_number}"
        offset += len(data)
        if len(data) == MAX_LINE_BYTES and not data.endswith(b"\n"):
            offset += _skip_line(file)
            yield Rejected(name, location, f"line longer than {MAX_LINE_BYTES >> 20} MiB")
            continue
        if line_number == 1 and not start:
            data = data.removeprefix(BYTE_ORDER_MARK)
        yield TextLine(location, data.rstrip(b"\r\n"))


def _skip_line(file: BinaryIO) -> int:
    """Move to the next line and return the number of skipped bytes."""
    num_skipped = 0
    while data := file.readline(2**20):
        num_skipped += len(data)
        if data.endswith(b"\n"):
            break
    return num_skipped


def read_json_lines(
    name: str, lines: Iterable[TextLine | Rejected], columns: tuple[str, ...]
) -> Iterator[Record | Rejected]:
    """Yield a record or a rejection for each line of a file that is not blank.

    Raises DataError if the file is one JSON array.
    """
    for line in lines:
        if isinstance(line, Rejected):
            yield line
        elif line.location == "line 1" and _starts_array(line.data.strip()):
            problem = f"{name} is a JSON array, not one object per line"
            raise DataError(problem, f"convert it with: jq -c '.[]' {name}")
        elif line.data.strip():
            yield _parse_record(name, line.location, line.data, columns)


def _starts_array(line: bytes) -> bool:
    return line.startswith(b"[") and line[1:].lstrip()[:1] in (b"", b"{")


def _parse_record(
    file: str, location: str, data: bytes, columns: tuple[str, ...]
) -> Record | Rejected:
    try:
        document = json.loads(data.decode())
    except UnicodeDecodeError as error:
        return Rejected(file, location, UNDECODABLE, str(error))
    except (ValueError, RecursionError) as error:
        return Rejected(file, location, "malformed JSON", str(error))
    if not isinstance(document, dict):
        return Rejected(file, location, "not a JSON object", type(document).__name__)
    for name, value in document.items():
        # A number that is too large for a float is read as infinity.
        if isinstance(value, float) and math.isinf(value) and (name in columns or not columns):
            return Rejected(file, location, "a number out of range", f"'{name}'")
    return build_record(file, location, document, columns)


def build_record(
    file: str, location: str, document: dict[str, object], columns: tuple[str, ...]
) -> Record | Rejected:
    """Return the record of a document with the given columns, or with all.

    A record with a value that cannot be kept exactly is rejected.
    """
    fields: dict[str, Value] = {}
    for name in columns or document:
        try:
            value = convert_value(document.get(name))
        except ValueError as error:
            return Rejected(file, location, "a value that cannot be kept", f"'{name}': {error}")
        if value is not None:
            fields[name] = value
    return Record(file, location, fields)
