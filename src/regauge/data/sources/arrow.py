"""Arrow files, Feather files and Arrow streams: one record per row, as for Parquet."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import Field

from regauge.data.sources import Piece, _files, _remote, _tables
from regauge.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"ARROW1"
"""The first bytes of a file that has an index of its batches; a stream has none."""


class Arrow(_tables.TableSource):
    """Arrow tables, read by record batch."""

    piece_mib: int = Field(default=16, ge=1)
    """Bytes that one process reads at a time; a batch is never divided."""

    form = "Arrow"
    part = "batch"

    def cut(self, file: _files.File) -> Iterator[Piece]:
        """Yield pieces of as many batches as have about `piece_mib`."""
        with _opened(file.name) as reader:
            self.chosen(file.name, reader.schema)
            count = _count(reader, file.name)
        pieces = min(-(-file.bytes // (self.piece_mib * MIB)), count)
        if pieces <= 1:
            yield _files.whole(file)
            return
        mark, size = _files.stamp([file]), file.bytes // pieces
        for number in range(pieces):
            start, stop = (count * place // pieces for place in (number, number + 1))
            label = f"{file.name} from batch {start}"
            end = stop if number + 1 < pieces else None
            yield Piece(label, size, size, mark, (file.name,), start, end)

    def batches(self, piece: Piece) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a piece with their numbers."""
        with _opened(piece.files[0]) as reader:
            columns = self.chosen(piece.files[0], reader.schema)
            for number, batch in _numbered(reader, piece.start, piece.stop):
                yield number, batch.select(columns)


@contextmanager
def _opened(name: str) -> Iterator[Any]:
    """Open a file or a stream."""
    import pyarrow as pa

    with ExitStack() as stack:
        where = stack.enter_context(_files.open_anywhere(name))
        here = isinstance(where, str)
        file = stack.enter_context(pa.memory_map(where) if here else pa.PythonFile(where))
        if file.read(len(MAGIC)) == MAGIC:
            yield pa.ipc.open_file(file)
            return
        if here:
            file.seek(0)
        else:
            file = stack.enter_context(_files.open_bytes(name))
        yield pa.ipc.open_stream(file)


def _numbered(reader: Any, start: int, stop: int | None) -> Iterator[tuple[int, Any]]:
    if hasattr(reader, "num_record_batches"):
        last = reader.num_record_batches if stop is None else stop
        yield from ((number, reader.get_batch(number)) for number in range(start, last))
        return
    yield from islice(enumerate(reader), start, stop)


def _count(reader: Any, name: str) -> int:
    """Return the number of batches, of a stream up to where it is damaged.

    To count those of a stream elsewhere all of it would have to come over: it counts as one.
    """
    import pyarrow as pa

    if hasattr(reader, "num_record_batches"):
        return int(reader.num_record_batches)
    if _remote.is_address(name):
        return 1
    count = 0
    with suppress(pa.ArrowInvalid, OSError):
        for _ in reader:
            count += 1
    return count
