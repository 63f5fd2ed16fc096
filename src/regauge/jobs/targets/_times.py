"""Job and event times, as ISO 8601 in UTC."""

from __future__ import annotations

import datetime as dt


def format_time(moment: dt.datetime) -> str:
    """Return a time in whole seconds, such as `2026-11-26T16:37:55Z`."""
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_now() -> str:
    """Return the current time in milliseconds, such as `2026-11-26T16:37:55.042+00:00`."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def format_epoch(milliseconds: int | None, precision: str = "milliseconds") -> str | None:
    """Return a time in milliseconds since 1970; None if it is None or 0.

    `precision` is a `timespec` of `datetime.isoformat`.
    """
    if not milliseconds:
        return None
    return dt.datetime.fromtimestamp(milliseconds / 1000, dt.UTC).isoformat(timespec=precision)
