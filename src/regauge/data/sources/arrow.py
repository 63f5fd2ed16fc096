"""Arrow files, Feather files and Arrow streams: one record per row."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.data.sources import Piece, _files, _remote, _tables
from regauge.system.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"ARROW1"
"""The first bytes of a file with an index of its batches; a stream lacks one."""


class Arrow(_tables.TableSource):
    """Arrow tables, read by record batch."""

    chunk_mib: int = Field(default=16, ge=1)
    """Size of a piece in MiB; a batch is never divided."""

    format_name = "Arrow"
    part_name = "batch"

    def divide_file(self, file: _files.InputFile) -> Iterator[Piece]:
        """Yield pieces with as many batches as fit into `chunk_mib`."""
        with _open(file.name) as reader:
            self.check_columns(file.name, reader.schema)
            num_batches = _count_batches(reader, file.name)
        num_pieces = min(-(-file.bytes // (self.chunk_mib * MIB)), num_batches)
        if num_pieces <= 1:
            yield _files.build_piece(file)
            return
        version, piece_bytes = _files.hash_stats([file]), file.bytes // num_pieces
        for index in range(num_pieces):
            start, end = (num_batches * boundary // num_pieces for boundary in (index, index + 1))
            label = f"{file.name} from batch {start}"
            stop = end if index + 1 < num_pieces else None
            yield Piece(label, piece_bytes, piece_bytes, version, (file.name,), start, stop)

    def read_schema(self, name: str) -> Any:
        with _open(name) as reader:
            return reader.schema

    def read_batches(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a piece with their indices."""
        with _open(piece.files[0]) as reader:
            columns = self.select_columns(reader.schema)
            for index, batch in _number_batches(reader, piece.start, piece.stop):
                yield index, batch.select(columns)


@contextmanager
def _open(name: str) -> Iterator[Any]:
    import pyarrow as pa

    with ExitStack() as stack:
        location = stack.enter_context(_files.open_seekable(name))
        is_local = isinstance(location, str)
        file = stack.enter_context(pa.memory_map(location) if is_local else pa.PythonFile(location))
        if file.read(len(MAGIC)) == MAGIC:
            yield pa.ipc.open_file(file)
            return
        if is_local:
            file.seek(0)
        else:
            file = stack.enter_context(_files.open_bytes(name))
        yield pa.ipc.open_stream(file)


def _number_batches(reader: Any, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    if hasattr(reader, "num_record_batches"):
        end = reader.num_record_batches if stop is None else stop
        yield from ((index, reader.get_batch(index)) for index in range(start, end))
        return
    yield from islice(enumerate(reader), start, stop)


def _count_batches(reader: Any, name: str) -> int:
    """Return the number of batches; a damaged stream counts up to the damage.

    A remote stream counts as one batch, because counting would download all of it.
    """
    import pyarrow as pa

    if hasattr(reader, "num_record_batches"):
        return int(reader.num_record_batches)
    if _remote.is_url(name):
        return 1
    num_batches = 0
    with suppress(pa.ArrowInvalid, OSError):
        for _ in reader:
            num_batches += 1
    return num_batches
