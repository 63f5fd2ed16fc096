"""Which records are left out because of how long their texts are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.data.sources import Record, Skipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from regauge.data.settings import Limits
    from regauge.data.sources import Found


def filtered(found: Iterable[Found], limits: Mapping[str, Limits]) -> Iterator[Found]:
    """Yield what was found, with records skipped whose texts are outside of the limits."""
    for item in found:
        reason = _reason(item, limits) if isinstance(item, Record) else ""
        yield Skipped(reason, item.fields) if reason and isinstance(item, Record) else item


def _reason(record: Record, limits: Mapping[str, Limits]) -> str:
    """Return the first limit that a record breaks; a field that it lacks is no text."""
    for name, limit in limits.items():
        text = record.fields.get(name)
        if isinstance(text, str) and (why := _broken(text, limit)):
            return f"'{name}' {why}"
    return ""


def _broken(text: str, limit: Limits) -> str:
    if len(text) < limit.fewest_characters:
        return f"under {limit.fewest_characters} characters"
    if limit.most_characters is not None and len(text) > limit.most_characters:
        return f"over {limit.most_characters} characters"
    if limit.fewest_words or limit.most_words is not None:
        words = len(text.split())
        if words < limit.fewest_words:
            return f"under {limit.fewest_words} words"
        if limit.most_words is not None and words > limit.most_words:
            return f"over {limit.most_words} words"
    return ""
