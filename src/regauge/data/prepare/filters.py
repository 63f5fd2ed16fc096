"""Filters records by text length, and by a required field."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from regauge.data.sources import Record, Rejected, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from regauge.data.settings import TextLimits
    from regauge.data.sources import SourceItem


class RecordFilter(NamedTuple):
    """Conditions for a record to be prepared."""

    limits: Mapping[str, TextLimits]
    """Text field -> length limits; a record with a text outside its field's limits is skipped."""
    group_by: str | None = None
    """Field with a required value, because it decides the split; other records are rejected."""

    def apply(self, items: Iterable[SourceItem]) -> Iterator[SourceItem]:
        """Yield the items, skipping or rejecting records that do not meet the conditions."""
        for item in items:
            if not isinstance(item, Record):
                yield item
            elif reason := _find_reason(item, self.limits):
                yield Skipped(reason, item.fields)
            elif self.group_by is not None and self.group_by not in item.fields:
                yield Rejected(item.file, item.location, f"no group in '{self.group_by}'")
            else:
                yield item


def _find_reason(record: Record, limits: Mapping[str, TextLimits]) -> str:
    """Return the first limit violated by a record, or an empty string."""
    for name, limit in limits.items():
        text = record.fields.get(name)
        if isinstance(text, str) and (problem := _check_text(text, limit)):
            return f"'{name}' {problem}"
    return ""


def _check_text(text: str, limit: TextLimits) -> str:
    if len(text) < limit.min_characters:
        return f"under {limit.min_characters} characters"
    if limit.max_characters is not None and len(text) > limit.max_characters:
        return f"over {limit.max_characters} characters"
    if limit.min_words or limit.max_words is not None:
        words = len(text.split())
        if words < limit.min_words:
            return f"under {limit.min_words} words"
        if limit.max_words is not None and words > limit.max_words:
            return f"over {limit.max_words} words"
    return ""
