"""Packing: rows of one length, filled with whole documents or with chunks of long ones.

A row starts with the chunk that has waited longest. It then takes the longest waiting chunk that
still fits, until none does. The number of waiting chunks is bounded, so memory is too, and rows
stay close to the source order.

Short texts in a batch are packed the same way, so that a model computes few padding tokens.

This module handles lengths and integers; it reads no files and needs no tokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np

Chunk = TypeVar("Chunk", bound=Sized)
MAX_WAITING_CHUNKS = 2048
"""Maximum waiting chunks; a higher number fills rows better but changes the order more."""


MIN_TEXT_ROW = 64
"""Tokens per row, or fewer, when short batch texts are packed."""
LONG_ROW, MAX_LONG_ROW = 3, 512
"""A long row has space for this many longest texts, but at most for this many tokens: attention
computes the whole row for each token."""
LENGTH_MULTIPLE = 8
"""Padded lengths are multiples of this number; matrix units compute these fastest."""
MAX_PACKED_SHARE = 0.9
"""Packing must save a tenth of the tokens; otherwise it is not worth moving them. Long rows must
fill what shorter ones leave empty."""


class _WaitingChunk(NamedTuple, Generic[Chunk]):
    """A chunk not yet in a row."""

    number: int
    """Position in the chunk order."""
    chunk: Chunk
    """The chunk."""


def pack_chunks(
    chunks: Iterable[Chunk],  # each [1 <= tokens <= length]
    length: int,
    max_waiting: int = MAX_WAITING_CHUNKS,
) -> Iterator[list[Chunk]]:
    """Yield rows as chunk lists with at most `length` tokens in total; each chunk occurs once."""
    queue = _ChunkQueue[Chunk](length)
    for chunk in chunks:
        queue.add(chunk)
        if queue.count > max_waiting:
            yield queue.take_row()
    while queue.count:
        yield queue.take_row()


class PackedTexts(NamedTuple):
    """Where a batch's tokens are in packed rows."""

    length: int
    """Tokens per row."""
    rows: list[list[range]]
    """Each row's texts, as token ranges in the flattened batch."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, padding included."""
        return self.length * len(self.rows)


def pack_texts(lengths: Sequence[int], padded_length: int) -> PackedTexts | None:
    """Pack batch texts, padded to one length, into as few rows as possible.

    Longer texts are placed first, each row taking the longest text that fits. A row has space for
    the longest text, or for three of them if more than a tenth of the shorter rows is padding. Rows
    are then as short as their number allows. Returns None if packing saves too little.

    >>> pack_texts([40, 20, 30], 64)
    PackedTexts(length=96, rows=[[range(0, 40), range(128, 158), range(64, 84)]])
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    starts = ((padded_length * number, lengths[number]) for number in order)
    texts = [range(start, start + count) for start, count in starts if count]
    if not texts:
        return None
    longest = len(texts[0])
    row, long_row = max(longest, MIN_TEXT_ROW), min(LONG_ROW * longest, MAX_LONG_ROW)
    packed = _fill_rows(texts, row)
    if row < long_row and sum(lengths) < MAX_PACKED_SHARE * packed.num_tokens:
        packed = min(packed, _fill_rows(texts, long_row), key=lambda rows: rows.num_tokens)
    is_smaller = packed.num_tokens <= MAX_PACKED_SHARE * padded_length * len(lengths)
    return packed if is_smaller else None


def _fill_rows(texts: list[range], length: int) -> PackedTexts:
    """Fill as few rows of at most `length` tokens as possible, rounded up, and shorten them."""
    length = _round_up(length)
    rows = list(pack_chunks(texts, length, len(texts)))
    shortest = max(len(texts[0]), -(-sum(map(len, texts)) // len(rows)))
    for shorter in range(_round_up(shortest), length, LENGTH_MULTIPLE):
        shorter_rows = list(pack_chunks(texts, shorter, len(texts)))
        if len(shorter_rows) == len(rows):
            return PackedTexts(shorter, shorter_rows)
    return PackedTexts(length, rows)


def _round_up(length: int) -> int:
    return LENGTH_MULTIPLE * -(-length // LENGTH_MULTIPLE)


def assemble_rows(
    rows: list[list[np.ndarray]],  # of chunks [tokens, columns]
    length: int,
    pads: list[int],
) -> tuple[np.ndarray, np.ndarray]:  # [columns, rows, length] and [rows, length], int32
    """Return row columns, and their segments: 1, 2, … by chunk, and 0 for padding."""
    import numpy as np

    values = np.empty((len(pads), len(rows), length), dtype=np.int32)
    segments = np.zeros((len(rows), length), dtype=np.int32)
    for column, pad in zip(values, pads, strict=True):
        column.fill(pad)
    for row, chunks in enumerate(rows):
        start = 0
        for number, chunk in enumerate(chunks, 1):
            stop = start + len(chunk)
            values[:, row, start:stop] = chunk.T
            segments[row, start:stop] = number
            start = stop
    return values, segments


class _ChunkQueue(Generic[Chunk]):
    """Waiting chunks: one queue per length, and a bit mask of non-empty lengths."""

    def __init__(self, length: int) -> None:
        self.count = 0
        self._length = length
        self._queues: list[deque[_WaitingChunk[Chunk]]] = [deque() for _ in range(length + 1)]
        self._present = 0  # bit n is set if chunks of length n are waiting
        self._order: deque[tuple[int, int]] = deque()
        self._num_added = 0

    def add(self, chunk: Chunk) -> None:
        length = len(chunk)
        self._queues[length].append(_WaitingChunk(self._num_added, chunk))
        self._order.append((self._num_added, length))
        self._present |= 1 << length
        self._num_added += 1
        self.count += 1

    def take_row(self) -> list[Chunk]:
        chunks = [self._take(self._find_oldest())]
        space = self._length - len(chunks[0])
        while fitting_lengths := self._present & ((2 << space) - 1):
            chunks.append(self._take(fitting_lengths.bit_length() - 1))
            space -= len(chunks[-1])
        return chunks

    def _find_oldest(self) -> int:
        """Return the length of the longest-waiting chunk, the first in its queue."""
        while True:
            number, length = self._order.popleft()
            queue = self._queues[length]
            if queue and queue[0].number == number:
                return length

    def _take(self, length: int) -> Chunk:
        queue = self._queues[length]
        chunk = queue.popleft().chunk
        if not queue:
            self._present &= ~(1 << length)
        self.count -= 1
        return chunk
