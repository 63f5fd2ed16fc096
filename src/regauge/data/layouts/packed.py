"""Rows of one length, filled with documents: whole ones, or parts of those that are longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from regauge.data.layouts import Unfit
from regauge.data.layouts._filled import Filled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import Encoded


class Packed(Filled):
    """One text field; a document has the special tokens of its tokenizer around it."""

    kind: ClassVar[str] = "packed"
    keys: ClassVar[tuple[str, ...]] = ("text", "length", "too_long")

    def reads(self) -> tuple[str, ...]:
        return (self.settings.text,)

    def rows(self, encoded: Encoded) -> Iterator[list[Any]]:
        """Yield the chunks of a document."""
        settings, (tokens,), encoder = self.settings, encoded.ids, encoded.encoder
        room = settings.length - encoder.overhead
        if len(tokens) > room and settings.too_long == "reject":
            detail = f"{len(tokens) + encoder.overhead} tokens"
            raise Unfit(f"longer than {settings.length} tokens", detail)
        if len(tokens) > room and settings.too_long == "truncate":
            encoded.truncated[settings.text] += 1
            tokens = tokens[:room]
        if not len(tokens):
            raise Unfit("no token", bad=False)
        for at in range(0, len(tokens), room):
            yield [encoder.wrap(tokens[at : at + room])]
