"""Packing: rows of one length, filled with whole documents or with chunks of long ones.

A row starts with the chunk that has waited longest. It then takes the longest waiting chunk that
still fits, until none does. The number of waiting chunks is bounded. Memory is therefore bounded,
and rows stay close to the order of the source.

This module handles lengths and integers; it reads no files and needs no tokenizer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_WAITING_CHUNKS = 2048
"""Maximum number of waiting chunks; a higher number fills rows better but changes the order
more."""


class _WaitingChunk(NamedTuple):
    number: int
    chunk: np.ndarray


def pack_chunks(
    chunks: Iterable[np.ndarray],  # each [1 <= tokens <= length]
    length: int,
    max_waiting: int = MAX_WAITING_CHUNKS,
) -> Iterator[list[np.ndarray]]:
    """Yield rows as lists of chunks of at most `length` tokens in total; each chunk occurs once."""
    queue = _ChunkQueue(length)
    for chunk in chunks:
        queue.add(chunk)
        if queue.count > max_waiting:
            yield queue.take_row()
    while queue.count:
        yield queue.take_row()


def assemble_rows(
    rows: list[list[np.ndarray]],  # of chunks [tokens, columns]
    length: int,
    pads: list[int],
) -> tuple[np.ndarray, np.ndarray]:  # [columns, rows, length] and [rows, length], int32
    """Return the columns of rows, and their segments: 1, 2, … by chunk, and 0 for padding."""
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


class _ChunkQueue:
    """The waiting chunks: a queue per length, and a bit mask of the lengths that are not empty."""

    def __init__(self, length: int) -> None:
        self.count = 0
        self._length = length
        self._queues: list[deque[_WaitingChunk]] = [deque() for _ in range(length + 1)]
        self._present = 0  # bit n is set if chunks of length n are waiting
        self._order: deque[tuple[int, int]] = deque()
        self._num_added = 0

    def add(self, chunk: np.ndarray) -> None:
        length = len(chunk)
        self._queues[length].append(_WaitingChunk(self._num_added, chunk))
        self._order.append((self._num_added, length))
        self._present |= 1 << length
        self._num_added += 1
        self.count += 1

    def take_row(self) -> list[np.ndarray]:
        chunks = [self._take(self._find_oldest())]
        space = self._length - len(chunks[0])
        while fitting_lengths := self._present & ((2 << space) - 1):
            chunks.append(self._take(fitting_lengths.bit_length() - 1))
            space -= len(chunks[-1])
        return chunks

    def _find_oldest(self) -> int:
        """Return the length of the chunk that has waited longest; it is the first of its queue."""
        while True:
            number, length = self._order.popleft()
            queue = self._queues[length]
            if queue and queue[0].number == number:
                return length

    def _take(self, length: int) -> np.ndarray:
        queue = self._queues[length]
        chunk = queue.popleft().chunk
        if not queue:
            self._present &= ~(1 << length)
        self.count -= 1
        return chunk
