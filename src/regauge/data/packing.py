"""Rows of one length, filled with whole documents or with parts of long ones.

A row starts with the chunk that waited longest, and takes the longest waiting one that still
fits until none does. The wait is bounded, so memory is, and rows stay near the source's order.
This module knows lengths and integers, no files and no tokenizer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WAITING = 2048
"""Chunks that wait at most; more of them fill rows better and stray farther from the order."""


class _Ticket(NamedTuple):
    number: int
    chunk: np.ndarray


def pack(
    chunks: Iterable[np.ndarray],  # each [1 <= tokens <= length]
    length: int,
    waiting: int = WAITING,
) -> Iterator[list[np.ndarray]]:
    """Yield rows as lists of chunks whose lengths sum to at most `length`; each chunk once."""
    hall = _Hall(length)
    for chunk in chunks:
        hall.enter(chunk)
        if hall.count > waiting:
            yield hall.row()
    while hall.count:
        yield hall.row()


def laid_out(
    rows: list[list[np.ndarray]],  # of chunks [tokens, columns]
    length: int,
    pads: list[int],
) -> tuple[np.ndarray, np.ndarray]:  # [columns, rows, length] and [rows, length], int32
    """Return the columns of rows, and their segments: 1, 2, … by chunk, 0 for padding."""
    values = np.empty((len(pads), len(rows), length), dtype=np.int32)
    segments = np.zeros((len(rows), length), dtype=np.int32)
    for column, pad in zip(values, pads, strict=True):
        column.fill(pad)
    for row, chunks in enumerate(rows):
        at = 0
        for number, chunk in enumerate(chunks, 1):
            end = at + len(chunk)
            values[:, row, at:end] = chunk.T
            segments[row, at:end] = number
            at = end
    return values, segments


class _Hall:
    """The waiting chunks, in a queue for each length; a bit of `_present` says which have any."""

    def __init__(self, length: int) -> None:
        self.count = 0
        self._length = length
        self._queues: list[deque[_Ticket]] = [deque() for _ in range(length + 1)]
        self._present = 0
        self._arrivals: deque[tuple[int, int]] = deque()
        self._entered = 0

    def enter(self, chunk: np.ndarray) -> None:
        size = len(chunk)
        self._queues[size].append(_Ticket(self._entered, chunk))
        self._arrivals.append((self._entered, size))
        self._present |= 1 << size
        self._entered += 1
        self.count += 1

    def row(self) -> list[np.ndarray]:
        chunks = [self._take(self._oldest())]
        space = self._length - len(chunks[0])
        while fitting := self._present & ((2 << space) - 1):
            chunks.append(self._take(fitting.bit_length() - 1))
            space -= len(chunks[-1])
        return chunks

    def _oldest(self) -> int:
        """Return the length of the chunk that waited longest; it is the first of its queue."""
        while True:
            number, size = self._arrivals.popleft()
            queue = self._queues[size]
            if queue and queue[0].number == number:
                return size

    def _take(self, size: int) -> np.ndarray:
        queue = self._queues[size]
        chunk = queue.popleft().chunk
        if not queue:
            self._present &= ~(1 << size)
        self.count -= 1
        return chunk
