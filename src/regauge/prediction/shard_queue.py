"""Which shard is computed next, and by whom: no files, no processes.

A piece of a source is cut into parts of so many records while it is read, so that nobody knows how
many there are until somebody comes to its end. A worker is given the parts of a piece in their
order, and has it open. Where no piece is left, parts of those that others read are given out, too;
a part that turns out to lie behind the end is no shard.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Shard(NamedTuple):
    """A part of a piece."""

    piece: int
    part: int

    @property
    def name(self) -> str:
        """What its files are called: they sort in the order of the records."""
        return f"{self.piece:06d}-{self.part:05d}"


@dataclass
class _Piece:
    """What is known of a piece."""

    done: set[int] = field(default_factory=set)
    next: int = 0
    """The first part that nobody has had yet."""
    end: int | None = None
    """How many parts it has, once somebody came to its end."""

    @property
    def finished(self) -> bool:
        return self.end is not None and len(self.done) >= self.end

    @property
    def open(self) -> bool:
        """Whether there may be a part that nobody has had."""
        return self.end is None or self.next < self.end

    def pass_done(self) -> None:
        while self.next in self.done:
            self.next += 1


class Tickets:
    """The shards of some pieces."""

    def __init__(self, pieces: Iterable[int], done: Mapping[Shard, bool]) -> None:
        """Begin where `done` has the finished shards, and of each whether its piece ends there."""
        self._pieces = {piece: _Piece() for piece in pieces}
        for shard, last in done.items():
            if shard.piece in self._pieces:
                piece = self._pieces[shard.piece]
                piece.done.add(shard.part)
                piece.end = shard.part + 1 if last else piece.end
        self._left = {number for number, piece in self._pieces.items() if not piece.finished}
        for number in self._left:
            self._pieces[number].pass_done()
        self._fresh = deque(sorted(self._left))
        self._begun: dict[int, None] = {}
        self._reads: dict[int, int] = {}
        self._given: dict[Shard, int] = {}
        self._back: deque[Shard] = deque()

    @property
    def left(self) -> int:
        """How many pieces are not finished."""
        return len(self._left)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The pieces of which something is left, in their order."""
        return tuple(sorted(self._left))

    def done(self, piece: int) -> frozenset[int]:
        """Return the parts of a piece that are finished."""
        return frozenset(self._pieces[piece].done)

    def take(self, worker: int) -> Shard | None:
        """Return a shard that nobody has and let a worker have it, or None where there is none."""
        shard = self._back.popleft() if self._back else self._new(worker)
        if shard is not None:
            self._given[shard] = worker
        return shard

    def finish(self, shard: Shard, *, last: bool) -> None:
        """Say that a shard is committed, and whether its piece ends with it."""
        self._given.pop(shard, None)
        self._pieces[shard.piece].done.add(shard.part)
        if last:
            self._pieces[shard.piece].end = shard.part + 1
        self._close(shard.piece)

    def beyond(self, shard: Shard) -> None:
        """Say that a piece ends before a shard, or with the one before it."""
        self._given.pop(shard, None)
        piece = self._pieces[shard.piece]
        piece.end = shard.part if piece.end is None else min(piece.end, shard.part)
        self._close(shard.piece)

    def give_back(self, worker: int) -> list[Shard]:
        """Take from a worker what it has; return it, in the order in which it was given."""
        shards = [shard for shard, who in self._given.items() if who == worker]
        for shard in shards:
            del self._given[shard]
        self._back.extend(shards)
        self._reads.pop(worker, None)
        return shards

    def _new(self, worker: int) -> Shard | None:
        """Return the next part of the piece that a worker reads, of a new one, or of another's."""
        own = self._reads.get(worker)
        if own is None or own not in self._begun:
            if self._fresh:
                own = self._fresh.popleft()
                self._begun[own] = None
            else:
                own = next(iter(self._begun), None)
            if own is None:
                return None
            self._reads[worker] = own
        piece = self._pieces[own]
        shard = Shard(own, piece.next)
        piece.next += 1
        piece.pass_done()
        self._close(own)
        return shard

    def _close(self, number: int) -> None:
        """Forget a piece of which there is nothing more to give out, or nothing more to do."""
        piece = self._pieces[number]
        if not piece.open:
            self._begun.pop(number, None)
        if piece.finished:
            self._left.discard(number)
