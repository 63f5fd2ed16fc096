"""A job's shard queue: which shard a worker computes next. It does no I/O.

A source piece is cut into parts while it is read, so the number of parts is unknown until a worker
reaches the end. A worker claims a piece's parts in order, because it has the piece open. If no
unclaimed piece is left, workers share the parts of open pieces. A claimed part may turn out to be
past the end of the piece; it is then not a shard.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class ShardId(NamedTuple):
    """A part of a piece, by their numbers."""

    piece: int
    part: int

    @property
    def name(self) -> str:
        """File name stem; names sort in record order."""
        return f"{self.piece:06d}-{self.part:05d}"


@dataclass
class _PieceState:
    finished_parts: set[int] = field(default_factory=set)
    next_part: int = 0
    """First unclaimed part."""
    num_parts: int | None = None
    """How many parts there are; None until a worker reaches the end."""

    @property
    def is_finished(self) -> bool:
        return self.num_parts is not None and len(self.finished_parts) >= self.num_parts

    @property
    def may_have_unclaimed_parts(self) -> bool:
        return self.num_parts is None or self.next_part < self.num_parts

    def skip_finished(self) -> None:
        while self.next_part in self.finished_parts:
            self.next_part += 1


class ShardQueue:
    """Unfinished shards in some pieces."""

    def __init__(self, pieces: Iterable[int], finished: Mapping[ShardId, bool]) -> None:
        """Start from the finished shards; a value is whether the shard is the last in its piece."""
        self._pieces = {piece: _PieceState() for piece in pieces}
        for shard, is_last in finished.items():
            if shard.piece in self._pieces:
                piece = self._pieces[shard.piece]
                piece.finished_parts.add(shard.part)
                piece.num_parts = shard.part + 1 if is_last else piece.num_parts
        self._unfinished = {
            number for number, piece in self._pieces.items() if not piece.is_finished
        }
        for number in self._unfinished:
            self._pieces[number].skip_finished()
        self._unopened = deque(sorted(self._unfinished))
        self._open: dict[int, None] = {}
        """Pieces that a worker reads, in the order of their start."""
        self._piece_of_worker: dict[int, int] = {}
        self._claimed: dict[ShardId, int] = {}
        """Claimed shard -> worker."""
        self._requeued: deque[ShardId] = deque()

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    @property
    def num_claimed(self) -> int:
        """How many shards workers have."""
        return len(self._claimed)

    @property
    def num_requeued(self) -> int:
        """How many lost workers' shards no worker has claimed again."""
        return len(self._requeued)

    @property
    def unfinished_pieces(self) -> tuple[int, ...]:
        """Numbers of unfinished pieces, ascending."""
        return tuple(sorted(self._unfinished))

    def finished_parts(self, piece: int) -> frozenset[int]:
        return frozenset(self._pieces[piece].finished_parts)

    def claim(self, worker: int) -> ShardId | None:
        """Return the next shard for a worker, or None if there is none."""
        shard = self._requeued.popleft() if self._requeued else self._claim_next_part(worker)
        if shard is not None:
            self._claimed[shard] = worker
        return shard

    def finish(self, shard: ShardId, *, is_last: bool) -> None:
        """Mark a shard as committed; `is_last` if it is the last in the piece."""
        self._claimed.pop(shard, None)
        self._pieces[shard.piece].finished_parts.add(shard.part)
        if is_last:
            self._pieces[shard.piece].num_parts = shard.part + 1
        self._update_piece(shard.piece)

    def mark_past_end(self, shard: ShardId) -> None:
        """Mark a part as past the end of the piece."""
        self._claimed.pop(shard, None)
        piece = self._pieces[shard.piece]
        known = piece.num_parts
        piece.num_parts = shard.part if known is None else min(known, shard.part)
        self._update_piece(shard.piece)

    def requeue(self, worker: int) -> list[ShardId]:
        """Return a lost worker's claims to the queue; return them in the order of claiming."""
        shards = [shard for shard, claimer in self._claimed.items() if claimer == worker]
        for shard in shards:
            del self._claimed[shard]
        self._requeued.extend(shards)
        self._piece_of_worker.pop(worker, None)
        return shards

    def _claim_next_part(self, worker: int) -> ShardId | None:
        """Return the next part of the worker's piece, an unopened piece, or any open one."""
        number = self._piece_of_worker.get(worker)
        if number is None or number not in self._open:
            if self._unopened:
                number = self._unopened.popleft()
                self._open[number] = None
            else:
                number = next(iter(self._open), None)
            if number is None:
                return None
            self._piece_of_worker[worker] = number
        piece = self._pieces[number]
        shard = ShardId(number, piece.next_part)
        piece.next_part += 1
        piece.skip_finished()
        self._update_piece(number)
        return shard

    def _update_piece(self, number: int) -> None:
        """Close a piece whose parts are all claimed; remove a finished piece."""
        piece = self._pieces[number]
        if not piece.may_have_unclaimed_parts:
            self._open.pop(number, None)
        if piece.is_finished:
            self._unfinished.discard(number)
