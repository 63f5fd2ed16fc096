"""Reads compressed files (.gz, .zst)."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SUFFIXES = (".gz", ".zst")
EXPANSION_FACTOR = 5
"""Estimated bytes of text per compressed byte, for the check of the disk."""
BUFFER_BYTES = 2**17


def find_suffix(name: str) -> str:
    """Return the suffix of a path, or of a URL without its query."""
    if name.startswith(("http://", "https://")):
        name = urlsplit(name).path
    return PurePosixPath(name).suffix


def open_decompressed(file: BinaryIO, name: str) -> BinaryIO:
    """Return an open file itself, or its decompressed contents."""
    if find_suffix(name) == ".gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=file, mode="rb"))
    if find_suffix(name) == ".zst":
        return io.BufferedReader(_ZstandardReader(file), BUFFER_BYTES)
    return file


def list_damage_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that reading a damaged compressed file raises."""
    import zstandard

    return (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


class _ZstandardReader(io.RawIOBase):
    """A .zst file with any number of frames; raises EOFError if the last one is truncated."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._frame = self._new_frame()
        self._decompressed = memoryview(b"")
        self._is_in_frame = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._decompressed:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._is_in_frame = self._new_frame(), False
            data = data or self._file.read(BUFFER_BYTES)
            if not data:
                if self._is_in_frame:
                    raise EOFError("the file ends within a compressed frame")
                return 0
            self._is_in_frame = True
            self._decompressed = memoryview(self._frame.decompress(data))
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._decompressed))
        target[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count

    @staticmethod
    def _new_frame() -> Any:
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj()
