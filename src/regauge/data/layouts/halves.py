"""Rows of two pieces of text, of which the second follows the first in its document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regauge.data.layouts import Layout, Unfit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import Encoded

FIRST, SECOND = "first", "second"


class Halves(Layout):
    """A document is cut into pairs of about equal size; both halves have their special tokens.

    Any second half fits behind any first one: together they have at most `length` tokens.
    """

    kind: ClassVar[str] = "halves"
    keys: ClassVar[tuple[str, ...]] = ("text", "length")

    def reads(self) -> tuple[str, ...]:
        return (self.settings.text,)

    def limits(self) -> dict[str, int]:
        length = self.settings.length
        return {FIRST: length - length // 2, SECOND: length // 2}

    def rows(self, encoded: Encoded) -> Iterator[list[Any]]:
        """Yield the pairs of a document, as few as hold all of it."""
        (tokens,), encoder, limits = encoded.ids, encoded.encoder, self.limits()
        behind = limits[SECOND] - len(encoder.suffix)
        room = limits[FIRST] - encoder.overhead + behind
        if len(tokens) < 2:  # noqa: PLR2004 - a token for each half
            raise Unfit("too short for two halves", bad=False)
        for pair in np.array_split(tokens, -(-len(tokens) // room)):
            cut = max(len(pair) - behind, len(pair) // 2)
            yield [encoder.wrap(pair[:cut]), np.concatenate([pair[cut:], encoder.suffix])]
