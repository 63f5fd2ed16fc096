"""How figures read in a report; what is not known is the word `unknown`, never a zero."""

from __future__ import annotations

import math

from regauge.units import SECONDS_PER_HOUR, SECONDS_PER_MINUTE

UNKNOWN = "unknown"

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def number(value: object) -> str:
    """Return a metric with three decimals, or four digits where that says nothing or too much."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return UNKNOWN if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value) or 0.01 <= abs(value) < 1000:  # noqa: PLR2004
        return f"{value:.3f}"
    return f"{value:,.4g}" if abs(value) < 1 else f"{value:,.0f}"


def count(value: float | None) -> str:
    """Return a count in three digits: 812, 12.3k, 4.56M."""
    if value is None:
        return UNKNOWN
    value = float(f"{value:.3g}")
    for size, letter in _SCALES:
        if abs(value) >= size:
            whole = len(str(int(abs(value) / size)))
            return f"{value / size:.{3 - whole}f}{letter}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Return the two largest units: 3 h 05 min, 4 min 12 s, 8.1 s."""
    if seconds is None:
        return UNKNOWN
    if round(seconds, 1) < SECONDS_PER_MINUTE:
        return f"{seconds:.1f} s"
    if round(seconds) < SECONDS_PER_HOUR:
        return "{} min {:02} s".format(*divmod(round(seconds), SECONDS_PER_MINUTE))
    minutes = round(seconds / SECONDS_PER_MINUTE)
    return "{:,} h {:02} min".format(*divmod(minutes, SECONDS_PER_HOUR // SECONDS_PER_MINUTE))


def dollars(value: float | None) -> str:
    """Return an amount in cents, or with four decimals below a dollar."""
    if value is None:
        return UNKNOWN
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def share(value: float | None) -> str:
    """Return a share in percent with one decimal."""
    return UNKNOWN if value is None else f"{value:.1%}"


def change(first: float, last: float) -> str:
    """Return how a value moved: from 9.210 to 2.314."""
    return f"from {number(first)} to {number(last)}"
