"""Rows of two consecutive text pieces from one document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from regauge.data.layouts import Layout, UnusableRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import EncodedRecord

FIRST, SECOND = "first", "second"


class SentencePairsLayout(Layout):
    """Splits a document into pairs of about equal size; both halves have special tokens.

    Any second half fits after any first half: together they have at most `length` tokens.
    """

    kind: ClassVar[str] = "sentence-pairs"
    setting_names: ClassVar[tuple[str, ...]] = ("text", "length")

    def text_fields(self) -> tuple[str, ...]:
        return (self.settings.text,)

    def token_limits(self) -> dict[str, int]:
        length = self.settings.length
        return {FIRST: length - length // 2, SECOND: length // 2}

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        """Yield as few document pairs as can hold all of it."""
        (tokens,), tokenizer, limits = encoded.ids, encoded.tokenizer, self.token_limits()
        max_second = limits[SECOND] - len(tokenizer.suffix)
        max_pair = limits[FIRST] - tokenizer.num_special_tokens + max_second
        if len(tokens) < 2:  # noqa: PLR2004 - a token for each half
            raise UnusableRecord("too short for two halves", is_rejected=False)
        for pair in np.array_split(tokens, -(-len(tokens) // max_pair)):
            cut = max(len(pair) - max_second, len(pair) // 2)
            second = np.concatenate([pair[cut:], tokenizer.suffix])
            yield [tokenizer.add_special_tokens(pair[:cut]), second]
