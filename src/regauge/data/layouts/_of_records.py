"""What the layouts share whose rows are records: named texts, each cut at its limit, and values."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

from regauge.data.columns import Kind
from regauge.data.layouts import Layout
from regauge.data.settings import SHORTEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.data.layouts import Encoded
    from regauge.data.settings import RowLayout

KEYS = ("fields", "numbers", "reals", "categories")
"""The settings that they read."""


class OfRecords(Layout, ABC):
    """Texts and values of a record, side by side."""

    @classmethod
    def check(cls, settings: RowLayout) -> None:
        if not settings.fields:
            raise ValueError(f"layout '{cls.kind}' needs fields, such as {{summary = 32}}")
        for name, limit in settings.fields.items():
            if limit < SHORTEST:
                raise ValueError(f"the limit of '{name}' is below {SHORTEST} tokens")
        names = [*settings.fields, *settings.numbers, *settings.reals, *settings.categories]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"'{name}' is named twice: a field is of one kind")

    def reads(self) -> tuple[str, ...]:
        return tuple(self.settings.fields)

    def values(self) -> dict[str, Kind]:
        settings = self.settings
        kinds: dict[Kind, tuple[str, ...]] = {
            "number": settings.numbers,
            "real": settings.reals,
            "category": settings.categories,
        }
        return {name: kind for kind, names in kinds.items() for name in names}

    def limits(self) -> dict[str, int]:
        return dict(self.settings.fields)

    def rows(self, encoded: Encoded) -> Iterator[list[Any]]:
        """Yield the one row of a record."""
        cells: list[Any] = []
        for (name, limit), tokens in zip(self.limits().items(), encoded.ids, strict=True):
            room = limit - encoded.encoder.overhead
            if len(tokens) > room:
                encoded.truncated[name] += 1
            cells.append(encoded.encoder.wrap(tokens[:room]))
        yield [*cells, *self.cells(encoded.record)]
