"""Compressed files (.gz, .zst) as the bytes within."""

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
EXPANSION = 5
"""Text bytes per compressed byte, as an estimate for the disk."""
BUFFER_BYTES = 2**17


def suffix(name: str) -> str:
    """Return the end of a path, or of an address without its query."""
    if name.startswith(("http://", "https://")):
        name = urlsplit(name).path
    return PurePosixPath(name).suffix


def inside(file: BinaryIO, name: str) -> BinaryIO:
    """Return the contents of an open file: itself, or what is compressed in it."""
    if suffix(name) == ".gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=file, mode="rb"))
    if suffix(name) == ".zst":
        return io.BufferedReader(_Zstandard(file), BUFFER_BYTES)
    return file


def damage() -> tuple[type[Exception], ...]:
    """Return what reading a damaged compressed file raises."""
    return (EOFError, zlib.error, gzip.BadGzipFile, *_zstd_errors())


class _Zstandard(io.RawIOBase):
    """A .zst file of any number of frames; raises EOFError where the last one is cut off."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
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

    @staticmethod
    def _new_frame() -> Any:
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj()


def _zstd_errors() -> tuple[type[Exception], ...]:
    try:
        import zstandard
    except ImportError:
        return ()
    return (zstandard.ZstdError,)
