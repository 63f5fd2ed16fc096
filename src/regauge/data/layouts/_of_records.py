"""Base for layouts with one row per record: texts with token limits, and values."""

from __future__ import annotations

from abc import ABC
from itertools import chain
from typing import TYPE_CHECKING, Any

from regauge.data.columns import ValueKind
from regauge.data.layouts import Layout
from regauge.data.settings import MIN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import EncodedRecord
    from regauge.data.settings import RowLayout

RECORD_SETTINGS = ("fields", "labels", "label_spelling", "integers", "floats", "categories")
"""Keys of `rows` read by these layouts."""


class RecordLayout(Layout, ABC):
    """A record's texts and values; each text is truncated at its token limit."""

    @classmethod
    def check_settings(cls, settings: RowLayout) -> None:
        if not settings.fields:
            raise ValueError(f"layout '{cls.kind}' needs fields; set for example {{summary = 32}}")
        for name, limit in settings.fields.items():
            if limit < MIN_TOKENS:
                raise ValueError(f"the limit of '{name}' is below {MIN_TOKENS} tokens; increase it")
        values = (
            settings.labels,
            settings.integers,
            settings.floats,
            settings.categories,
            settings.vectors,
        )
        names = [*settings.fields, *chain.from_iterable(values)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"'{name}' is listed twice in rows; keep one kind")

    def text_fields(self) -> tuple[str, ...]:
        return tuple(self.settings.fields)

    def value_kinds(self) -> dict[str, ValueKind]:
        settings = self.settings
        kinds: dict[ValueKind, tuple[str, ...]] = {
            "label": tuple(settings.labels),
            "integer": settings.integers,
            "float": settings.floats,
            "category": settings.categories,
            "vector": settings.vectors,
        }
        return {name: kind for kind, names in kinds.items() for name in names}

    def token_limits(self) -> dict[str, int]:
        return dict(self.settings.fields)

    def build_cells(self, encoded: EncodedRecord) -> Iterator[list[Any]]:
        cells: list[Any] = []
        for (name, limit), tokens in zip(self.token_limits().items(), encoded.ids, strict=True):
            max_tokens = limit - encoded.tokenizer.num_special_tokens
            if len(tokens) > max_tokens:
                encoded.truncated[name] += 1
                tokens = encoded.tokenizer.truncate(tokens, max_tokens)  # noqa: PLW2901
            cells.append(encoded.tokenizer.add_special_tokens(tokens))
        yield [*cells, *self.encode_values(encoded.record)]
