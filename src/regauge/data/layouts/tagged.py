"""One row per sentence of words, each with a tag: for named entities and parts of speech."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from regauge.data.classes import format_class
from regauge.data.columns import TOKENS_TYPE, VALUE_TYPES, ValueKind
from regauge.data.layouts import Layout, UnusableRecord
from regauge.data.settings import MIN_TOKENS
from regauge.data.tokenizer import find_first_tokens
from regauge.data.values import is_word_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import EncodedRecord
    from regauge.data.settings import RowLayout
    from regauge.data.tokenizer import LoadedTokenizer
    from regauge.data.values import Value


class TaggedLayout(Layout):
    """Word tokens, joined by spaces, and a tag at each word's first token.

    Other tokens do not have a tag, as in transformers' examples. A long sentence is truncated.
    """

    kind: ClassVar[str] = "tagged"
    setting_names: ClassVar[tuple[str, ...]] = ("fields", "labels", "label_spelling")
    defaults: ClassVar[dict[str, Any]] = {"fields": {"tokens": 128}, "labels": {"tags": ()}}

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        if len(settings.fields) != 1 or len(settings.labels) != 1:
            raise ValueError(
                "layout 'tagged' needs one field of words and one of tags; set for example"
                ' fields = {tokens = 128} and labels = ["tags"]'
            )
        ((name, limit),) = settings.fields.items()
        if limit < MIN_TOKENS:
            raise ValueError(f"the limit of '{name}' is below {MIN_TOKENS} tokens; increase it")
        if name in settings.labels:
            raise ValueError(f"'{name}' is listed twice in rows; keep one kind")

    def text_fields(self) -> tuple[str, ...]:
        return tuple(self.settings.fields)

    def value_kinds(self) -> dict[str, ValueKind]:
        return dict.fromkeys(self.settings.labels, "label")

    def token_limits(self) -> dict[str, int]:
        return dict(self.settings.fields)

    def encoded_columns(self) -> list[pa.Field]:
        """Return the columns for token ids and tags; a token without a tag has null."""
        (words,), (tags,) = self.settings.fields, self.settings.labels
        return [pa.field(words, TOKENS_TYPE), pa.field(tags, VALUE_TYPES["label"])]

    def select_texts(self, record: dict[str, Value], tokenizer: LoadedTokenizer) -> list[str]:
        """Return the words, joined by spaces; raises UnusableRecord if words and tags differ."""
        del tokenizer
        (words_field,), (tags_field,) = self.settings.fields, self.settings.labels
        words, tags = (_read_list(record, name) for name in (words_field, tags_field))
        if not words:
            raise UnusableRecord(f"empty '{words_field}'", is_rejected=False)
        if not is_word_list(words):
            raise UnusableRecord(f"a word in '{words_field}' is empty or not a text")
        if len(words) != len(tags):
            detail = f"{len(words)} words, {len(tags)} tags"
            raise UnusableRecord("words and tags differ in number", detail)
        return [" ".join(words)]

    def encode_texts(self, texts: list[str], tokenizer: LoadedTokenizer) -> list[np.ndarray]:
        """Return each text's ids and character offsets, [tokens, 3]."""
        return [
            np.column_stack([encoded.ids, encoded.offsets])
            for encoded in tokenizer.encode_with_offsets(texts)
        ]

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        ((words_field, limit),), (tags_field,) = self.settings.fields.items(), self.settings.labels
        words = _read_list(encoded.record, words_field)
        try:
            tags = [format_class(tag) for tag in _read_list(encoded.record, tags_field)]
        except TypeError as error:
            raise UnusableRecord(f"no class in '{tags_field}'", str(error)) from None
        tokenizer, (tokens,) = encoded.tokenizer, encoded.ids
        by_token: list[str | None] = [None] * len(tokens)
        for tag, token in zip(tags, find_first_tokens(words, tokens[:, 1:]), strict=True):
            if token is not None:
                by_token[token] = tag
        max_tokens = limit - tokenizer.num_special_tokens
        if len(tokens) > max_tokens:
            encoded.truncated[words_field] += 1
        positions = tokenizer.truncate(np.arange(len(tokens)), max_tokens)
        before, after = [None] * len(tokenizer.prefix), [None] * len(tokenizer.suffix)
        yield [
            tokenizer.add_special_tokens(tokens[positions, 0].astype(np.int32)),
            [*before, *(by_token[position] for position in positions.tolist()), *after],
        ]


def _read_list(record: dict[str, Value], name: str) -> list[Any]:
    """Return a list from a record; raises UnusableRecord for another value."""
    value = record.get(name)
    if not isinstance(value, list):
        raise UnusableRecord(f"no list in '{name}'", type(value).__name__)
    return value
