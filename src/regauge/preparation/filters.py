"""Filters records by the length of their texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.data.sources import Record, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from regauge.data.settings import TextLimits
    from regauge.data.sources import SourceItem


def apply_limits(
    items: Iterable[SourceItem], limits: Mapping[str, TextLimits]
) -> Iterator[SourceItem]:
    """Yield the items, with records skipped if a text is outside of its limits."""
    for item in items:
        reason = _find_reason(item, limits) if isinstance(item, Record) else ""
        yield Skipped(reason, item.fields) if reason and isinstance(item, Record) else item


def _find_reason(record: Record, limits: Mapping[str, TextLimits]) -> str:
    """Return the first limit that a record violates, or an empty string."""
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
