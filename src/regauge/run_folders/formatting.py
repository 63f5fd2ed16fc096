"""Number formatting for reports. An unknown value is the word `unknown`, never a zero."""

from __future__ import annotations

from regauge.system.units import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from regauge.system.wording import format_number

UNKNOWN = "unknown"

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def number(value: object) -> str:
    """Return a metric as log lines do, an unknown one as `unknown`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return UNKNOWN if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def count(value: float | None) -> str:
    """Return a count with three significant digits: 812, 12.3k, 4.56M."""
    if value is None:
        return UNKNOWN
    value = float(f"{value:.3g}")
    for scale, suffix in _SCALES:
        if abs(value) >= scale:
            num_digits = len(str(int(abs(value) / scale)))
            return f"{value / scale:.{3 - num_digits}f}{suffix}"
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
    """Return an amount in dollars and cents, or with four decimals below one dollar."""
    if value is None:
        return UNKNOWN
    return f"${value:,.2f}" if value >= 1 else f"${value:.4f}"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage with one decimal."""
    return UNKNOWN if value is None else f"{value:.1%}"


def change(first: float, last: float) -> str:
    """Describe a value's change in words: from 9.210 to 2.314."""
    return f"from {number(first)} to {number(last)}"
