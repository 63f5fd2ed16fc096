"""Source bytes that a `predict` job has read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class PieceBytes:
    """Adds up finished pieces, and estimates those in progress from their shards."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._done = [0] * len(sizes)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a finished shard's ledger line."""
        piece = line["piece"]
        if piece < len(self._sizes):
            done = self._done[piece] + line.get("source_bytes", 0)
            self._done[piece] = self._sizes[piece] if line["is_last"] else done

    @property
    def total(self) -> int:
        return sum(map(min, self._done, self._sizes))
