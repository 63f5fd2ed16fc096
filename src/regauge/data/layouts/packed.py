"""Rows of one length, filled with whole documents and with chunks of longer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from regauge.data.layouts import UnusableRecord
from regauge.data.layouts._filled import FilledLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import EncodedRecord


class PackedLayout(FilledLayout):
    """One text field; a document is enclosed in the tokenizer's special tokens."""

    kind: ClassVar[str] = "packed"
    setting_names: ClassVar[tuple[str, ...]] = ("text", "length", "too_long")

    def text_fields(self) -> tuple[str, ...]:
        return (self.settings.text,)

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        settings, (tokens,), tokenizer = self.settings, encoded.ids, encoded.tokenizer
        max_tokens = settings.length - tokenizer.num_special_tokens
        if len(tokens) > max_tokens and settings.too_long == "reject":
            detail = f"{len(tokens) + tokenizer.num_special_tokens} tokens"
            raise UnusableRecord(f"longer than {settings.length} tokens", detail)
        if len(tokens) > max_tokens and settings.too_long == "truncate":
            encoded.truncated[settings.text] += 1
            tokens = tokenizer.truncate(tokens, max_tokens)
        if not len(tokens):
            raise UnusableRecord("no token", is_rejected=False)
        for start in range(0, len(tokens), max_tokens):
            yield [tokenizer.add_special_tokens(tokens[start : start + max_tokens])]
