"""Files as lines of bytes: globs, and large files in parts.

A part of a file owns the lines that begin in it, so that parts can be read by different processes
and together yield every line once.
"""

from __future__ import annotations

import glob
import hashlib
import io
from abc import abstractmethod
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from pydantic import Field

from regauge.data.sources import Piece, Rejected, Source, _compressed, _remote
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LONGEST_LINE = 64 * 2**20
LARGEST_GROUP = 1000
"""Files in one piece at most."""
FIRST_LINE = "line 1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class FileSource(Source):
    """A source of files."""

    files: tuple[str, ...] = Field(min_length=1)
    """Globs of paths, or of addresses such as s3://bucket/*.txt; `**` crosses folders."""

    def elsewhere(self) -> str:
        """Return the first address, if any."""
        return next(filter(_remote.is_address, self.files), "")

    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of all files."""
        return self.divide(find(self.files))

    @abstractmethod
    def divide(self, found: list[File]) -> tuple[Piece, ...]:
        """Return pieces of files that were found."""


class File(NamedTuple):
    """A file as it was found."""

    name: str
    bytes: int
    mark: str
    """Another one, or another size, means that the file has changed."""


class Line(NamedTuple):
    """A line without its end, and where it is for people."""

    place: str
    data: bytes


def find(patterns: tuple[str, ...]) -> list[File]:
    """Return the files that match, sorted, each once; raises DataError where none does."""
    found: dict[str, File] = {}
    for pattern in patterns:
        matches = list(_matching(pattern))
        if not matches:
            raise DataError(f"no file matches '{pattern}'", "correct source.files")
        found.update((file.name, file) for file in matches)
    return [found[name] for name in sorted(found)]


def _matching(pattern: str) -> Iterator[File]:
    """Yield the files that match a pattern, in any order."""
    pattern = pattern.removeprefix("file://")
    if _remote.is_address(pattern):
        yield from (File(*facts) for facts in _remote.listed(pattern))
        return
    every = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob refuses /absolute/*)
    if Path(pattern).is_dir():
        raise DataError(f"{pattern} is a folder", f"name files: {pattern}/**/*")
    yield from (local(path) for path in map(Path, every) if path.is_file())


def local(path: Path) -> File:
    """Return what is known of a file of this machine."""
    facts = path.stat()
    return File(str(path), facts.st_size, str(facts.st_mtime_ns))


def stamp(files: Iterable[File]) -> str:
    """Return a hash of sizes and times of change: cheap, and different after a change."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.bytes}\0{file.mark}\n".encode())
    return digest.hexdigest()[:32]


def group(
    files: list[File], limit_bytes: int, *, divisible: bool = False, text_share: float = 1.0
) -> tuple[Piece, ...]:
    """Return pieces of about `limit_bytes`: small files together, divisible ones in equal parts."""
    pieces: list[Piece] = []
    together: list[File] = []
    total = 0
    for file in files:
        if together and (total + file.bytes > limit_bytes or len(together) == LARGEST_GROUP):
            pieces.append(whole(*together, text_share=text_share))
            together, total = [], 0
        if divisible and file.bytes > limit_bytes and _is_divisible(file):
            pieces.extend(_parts(file, limit_bytes))
        else:
            together.append(file)
            total += file.bytes
    return (*pieces, whole(*together, text_share=text_share)) if together else tuple(pieces)


def whole(*files: File, text_share: float = 1.0) -> Piece:
    """Return a piece of whole files."""
    grown = (
        file.bytes * (_compressed.EXPANSION if _is_compressed(file) else text_share)
        for file in files
    )
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    names = tuple(file.name for file in files)
    size = sum(file.bytes for file in files)
    return Piece(f"{names[0]}{more}", size, int(sum(grown)), stamp(files), names)


def _is_compressed(file: File) -> bool:
    return _compressed.suffix(file.name) in _compressed.SUFFIXES


def _is_divisible(file: File) -> bool:
    if _is_compressed(file):
        return False
    return not _remote.is_address(file.name) or _remote.serves_parts(file.name)


def _parts(file: File, limit_bytes: int) -> Iterator[Piece]:
    mark, parts = stamp([file]), -(-file.bytes // limit_bytes)
    cuts = [file.bytes * number // parts for number in range(parts + 1)]
    for start, stop in pairwise(cuts):
        count = stop - start
        label = f"{file.name} from byte {start}"
        yield Piece(label, count, count, mark, (file.name,), start, stop)


def lines(piece: Piece) -> Iterator[tuple[str, Line | Rejected]]:
    """Yield (file, line) of a piece; a damaged compressed file yields one rejection in the end."""
    for name in piece.files:
        for line in lines_of(name, piece.start, piece.stop):
            yield name, line


def lines_of(name: str, start: int = 0, stop: int | None = None) -> Iterator[Line | Rejected]:
    """Yield the lines of a file that begin in a part of it, and in the end what damage it has."""
    place = "its beginning"
    try:
        with open_bytes(name) as file:
            for line in _lines_of(file, name, start, stop):
                place = line.place
                yield line
    except _compressed.damage() as error:
        yield Rejected(name, f"after {place}", "damaged compressed file", str(error))


@contextmanager
def open_bytes(name: str) -> Iterator[BinaryIO]:
    """Open a plain, .gz or .zst file for reading its contents as bytes."""
    with _opened(name) as file, _compressed.inside(file, name) as contents:
        yield contents


@contextmanager
def open_anywhere(name: str) -> Iterator[str | BinaryIO]:
    """Give what can be read from any place on: a path of this machine, or a file elsewhere."""
    if not _remote.is_address(name):
        yield name
        return
    with _remote.Remote(name, ahead=False) as file:
        yield cast("BinaryIO", file)


def _opened(name: str) -> BinaryIO:
    if not _remote.is_address(name):
        return Path(name).open("rb")
    return io.BufferedReader(_remote.Remote(name, ahead=True), _compressed.BUFFER_BYTES)


def _lines_of(file: BinaryIO, name: str, start: int, stop: int | None) -> Iterator[Line | Rejected]:
    at = start
    if start:
        file.seek(start - 1)
        at += _skip_line(file) - 1
    number = 0
    while stop is None or at < stop:
        data = file.readline(LONGEST_LINE)
        if not data:
            return
        number += 1
        place = f"byte {at}" if start else f"line {number}"
        at += len(data)
        if len(data) == LONGEST_LINE and not data.endswith(b"\n"):
            at += _skip_line(file)
            yield Rejected(name, place, f"line longer than {LONGEST_LINE >> 20} MiB")
            continue
        if number == 1 and not start:
            data = data.removeprefix(BYTE_ORDER_MARK)
        yield Line(place, data.rstrip(b"\r\n"))


def _skip_line(file: BinaryIO) -> int:
    """Go to the next line and return the number of bytes passed over."""
    skipped = 0
    while data := file.readline(2**20):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped
