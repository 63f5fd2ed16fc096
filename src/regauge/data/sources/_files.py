"""Files as lines of bytes: globs, compression, and large files in parts.

A part of a file owns the lines that begin in it, so that parts can be read by different processes
and together yield every line once.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import zlib
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from regauge.data.sources import Piece, Rejected
from regauge.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _typeshed import WriteableBuffer

COMPRESSED = (".gz", ".zst")
EXPANSION = 5
"""Text bytes per compressed byte, as an estimate for the disk."""
LONGEST_LINE = 64 * 2**20
LARGEST_GROUP = 1000
"""Files in one piece at most."""
BUFFER_BYTES = 2**17
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
INTEGERS = range(-(2**63), 2**63)


class Line(NamedTuple):
    """A line without its end, and where it is for people."""

    place: str
    data: bytes


def find(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that match, sorted, each once; raises DataError where none does."""
    found: set[str] = set()
    for pattern in patterns:
        every = glob.glob(pattern, recursive=True)  # noqa: PTH207 (Path.glob refuses /absolute/*)
        matches = [name for name in every if Path(name).is_file()]
        if not matches:
            if Path(pattern).is_dir():
                raise DataError(f"{pattern} is a folder", f"name files: {pattern}/**/*")
            raise DataError(f"no file matches '{pattern}'", "correct source.files")
        found.update(matches)
    return [Path(name) for name in sorted(found)]


def stamp(paths: Iterable[Path]) -> str:
    """Return a hash of sizes and times of change: cheap, and different after a change."""
    digest = hashlib.sha256()
    for path in paths:
        facts = path.stat()
        digest.update(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def group(
    paths: list[Path], limit_bytes: int, *, divisible: bool = False, text_share: float = 1.0
) -> tuple[Piece, ...]:
    """Return pieces of about `limit_bytes`: small files together, divisible ones in parts."""
    pieces: list[Piece] = []
    together: list[Path] = []
    total = 0
    for path in paths:
        size = path.stat().st_size
        if together and (total + size > limit_bytes or len(together) == LARGEST_GROUP):
            pieces.append(_whole(together, text_share))
            together, total = [], 0
        if divisible and size > limit_bytes and path.suffix not in COMPRESSED:
            pieces.extend(_parts(path, size, limit_bytes))
        else:
            together.append(path)
            total += size
    return (*pieces, _whole(together, text_share)) if together else tuple(pieces)


def _whole(paths: list[Path], text_share: float) -> Piece:
    sizes = [path.stat().st_size for path in paths]
    grown = (
        size * (EXPANSION if path.suffix in COMPRESSED else text_share)
        for path, size in zip(paths, sizes, strict=True)
    )
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    files = tuple(str(path) for path in paths)
    return Piece(f"{paths[0]}{more}", sum(sizes), int(sum(grown)), stamp(paths), files)


def lines(piece: Piece) -> Iterator[tuple[str, Line | Rejected]]:
    """Yield (file, line) of a piece; a damaged compressed file yields one rejection in the end."""
    for name in piece.files:
        place = "its beginning"
        try:
            with open_bytes(Path(name)) as file:
                for line in _lines_of(file, name, piece.start, piece.stop):
                    place = line.place
                    yield name, line
        except damage() as error:
            yield name, Rejected(name, f"after {place}", "damaged compressed file", str(error))


def damage() -> tuple[type[Exception], ...]:
    """Return what reading a damaged compressed file raises."""
    return (EOFError, zlib.error, gzip.BadGzipFile, *_zstd_errors())


def open_bytes(path: Path) -> BinaryIO:
    """Open a plain, .gz or .zst file for reading its contents as bytes."""
    if path.suffix == ".gz":
        return cast("BinaryIO", gzip.open(path, "rb"))
    if path.suffix == ".zst":
        return io.BufferedReader(_Zstandard(path), BUFFER_BYTES)
    return path.open("rb")


def usable(document: dict[str, object], columns: tuple[str, ...]) -> dict[str, str | int]:
    """Return the texts and the 64-bit integers of a document, of these columns or of all."""
    names = columns or tuple(str(name) for name in document)
    found = {name: document.get(name) for name in names}
    return {
        name: int(value) if isinstance(value, int) else value
        for name, value in found.items()
        if isinstance(value, str) or (isinstance(value, int) and value in INTEGERS)
    }


class _Zstandard(io.RawIOBase):
    """A .zst file of any number of frames; raises EOFError where the last one is cut off."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("rb")
        self._frame = self._new_frame()
        self._ready = memoryview(b"")
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._inside = self._new_frame(), False
            data = data or self._file.read(BUFFER_BYTES)
            if not data:
                if self._inside:
                    raise EOFError("the file ends inside of a compressed frame")
                return 0
            self._inside = True
            self._ready = memoryview(self._frame.decompress(data))
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    @staticmethod
    def _new_frame() -> Any:
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj()


def _parts(path: Path, size: int, limit_bytes: int) -> Iterator[Piece]:
    mark = stamp([path])
    cuts = [*range(0, size, limit_bytes), size]
    for start, stop in pairwise(cuts):
        count = stop - start
        yield Piece(f"{path} from byte {start}", count, count, mark, (str(path),), start, stop)


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


def _zstd_errors() -> tuple[type[Exception], ...]:
    try:
        import zstandard
    except ImportError:
        return ()
    return (zstandard.ZstdError,)
