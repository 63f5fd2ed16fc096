"""The queue of the shards of a job: which shard a worker computes next. It does no I/O.

A piece of a source is cut into parts while it is read. So the number of its parts is unknown until
a worker reaches its end. A worker claims the parts of a piece in their order, because it has the
piece open. If no unclaimed piece is left, workers share the parts of open pieces. A claimed part
may turn out to be past the end of its piece; it is then not a shard.
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
        """The stem of its file names; names sort in the order of the records."""
        return f"{self.piece:06d}-{self.part:05d}"


@dataclass
class _PieceState:
    """The parts of a piece that are finished or claimed."""

    finished_parts: set[int] = field(default_factory=set)
    next_part: int = 0
    """The first part that no worker has claimed."""
    num_parts: int | None = None
    """Number of parts; None until a worker reaches the end."""

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
    """The shards of some pieces that are not finished yet."""

    def __init__(self, pieces: Iterable[int], finished: Mapping[ShardId, bool]) -> None:
        """Start from the finished shards; a value is whether the shard is the last of its piece."""
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
        """Claimed shards with their workers."""
        self._requeued: deque[ShardId] = deque()

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished pieces."""
        return len(self._unfinished)

    @property
    def num_claimed(self) -> int:
        """Number of shards that workers have."""
        return len(self._claimed)

    @property
    def num_requeued(self) -> int:
        """Number of shards of lost workers that no worker has claimed again."""
        return len(self._requeued)

    @property
    def unfinished_pieces(self) -> tuple[int, ...]:
        """The numbers of unfinished pieces, in ascending order."""
        return tuple(sorted(self._unfinished))

    def finished_parts(self, piece: int) -> frozenset[int]:
        """Return the finished parts of a piece."""
        return frozenset(self._pieces[piece].finished_parts)

    def claim(self, worker: int) -> ShardId | None:
        """Return the next shard for a worker, or None if there is none."""
        shard = self._requeued.popleft() if self._requeued else self._claim_next_part(worker)
        if shard is not None:
            self._claimed[shard] = worker
        return shard

    def finish(self, shard: ShardId, *, is_last: bool) -> None:
        """Mark a shard as committed; `is_last` if it is the last of its piece."""
        self._claimed.pop(shard, None)
        self._pieces[shard.piece].finished_parts.add(shard.part)
        if is_last:
            self._pieces[shard.piece].num_parts = shard.part + 1
        self._update_piece(shard.piece)

    def mark_past_end(self, shard: ShardId) -> None:
        """Mark a part as past the end of its piece."""
        self._claimed.pop(shard, None)
        piece = self._pieces[shard.piece]
        known = piece.num_parts
        piece.num_parts = shard.part if known is None else min(known, shard.part)
        self._update_piece(shard.piece)

    def requeue(self, worker: int) -> list[ShardId]:
        """Return the claims of a lost worker to the queue; return them in the order of claiming."""
        shards = [shard for shard, claimer in self._claimed.items() if claimer == worker]
        for shard in shards:
            del self._claimed[shard]
        self._requeued.extend(shards)
        self._piece_of_worker.pop(worker, None)
        return shards

    def _claim_next_part(self, worker: int) -> ShardId | None:
        """Return the next part of the worker's piece, of an unopened piece, or of any open one."""
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
        """Close a piece whose parts are all claimed; remove a piece that is finished."""
        piece = self._pieces[number]
        if not piece.may_have_unclaimed_parts:
            self._open.pop(number, None)
        if piece.is_finished:
            self._unfinished.discard(number)
