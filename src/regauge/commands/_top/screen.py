"""Draws a snapshot as text lines with a given size, from 60 columns and 16 lines on."""

from __future__ import annotations

import datetime as dt
import re
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from regauge.run_folders import formatting
from regauge.system.units import GIGA, SECONDS_PER_HOUR, SECONDS_PER_MINUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from regauge.commands._top.snapshot import Snapshot, TableRow, Value, ViewEvent, ViewProgress

STATE_STYLES = {
    "running": "bold green",
    "ready": "bold green",
    "finished": "bold cyan",
    "succeeded": "bold cyan",
    "failed": "bold red",
    "unreachable": "bold red",
    "preempted": "bold yellow",
    "stopped": "bold yellow",
}
PROBLEM_STYLE = "bold yellow"
"""Style for rows and events that need attention; their words say the same."""
GAP = "  "
HEADING_LINES = 2
"""Lines in a table or event heading, with the blank line before it."""
MIN_TABLE_ROWS = 3
MAX_GROUP_COLUMNS = 44
WIDE_COLUMNS = 130
"""Width from which the events are beside the table."""
COUNTED_RATE = 100.0
"""Rate from which three significant digits are shown."""
LABELS = {
    "budget_left_seconds": "lasts for",
    "checkpoint_age_seconds": "its age",
    "checkpoint_step": "checkpoint",
    "failed_requests": "status 5xx",
    "gradient_norm": "grad. norm",
    "learning_rate": "learn. rate",
    "lost_seconds": "lost work",
    "mfu_ratio": "MFU",
    "p50_seconds": "p50 s",
    "p95_seconds": "p95 s",
    "p99_seconds": "p99 s",
    "padded_tokens": "tokens",
    "records_per_batch": "per batch",
    "refused_requests": "status 4xx",
    "requests": "answered",
    "resident_bytes": "all ranks",
    "step_seconds": "s per step",
    "usd": "spent",
    "usd_per_hour": "per hour",
    "usd_per_million_records": "per 1M records",
}
HEADINGS = {"resident_bytes": "memory", "queue_wait_seconds": "wait", "usd": "cost"}
"""Column labels that differ from value labels."""
FORMATS: dict[str, Callable[[float], str]] = {
    "usd": formatting.dollars,
    "ratio": formatting.percent,
    "bytes": lambda value: f"{value / GIGA:.2f} GB",
    "seconds": formatting.duration,
    "tokens": formatting.count,
    "second": lambda rate: (
        formatting.count(rate) if rate >= COUNTED_RATE else formatting.number(rate)
    ),
}
"""Value format by the unit at the end of the key."""
PLAIN_NUMBERS = ("step_seconds", "p50_seconds", "p95_seconds", "p99_seconds")
"""Keys whose label has the unit."""


def format_label(key: str, labels: Mapping[str, str] = LABELS) -> str:
    """Return a value's label: the words in its key without the unit, or a shorter text."""
    if "/" in key:  # the name of a metric
        return key
    words = re.sub("_(ratio|bytes|seconds|usd|records|at)$", "", key)
    return labels.get(key) or words.replace("_per_second", "/s").replace("_", " ")


def format_value(key: str, value: Value) -> str:
    """Return a value as text; `-` if it is unknown."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    unit = "usd" if "usd" in key else key.rpartition("_")[2]
    is_plain = "/" in key or key in PLAIN_NUMBERS
    return formatting.number(value) if is_plain else FORMATS.get(unit, formatting.number)(value)


def render(snapshot: Snapshot, width: int, height: int | None, note: str = "") -> Group:
    """Return a snapshot for a terminal; without a height all rows and events are shown.

    `note` is shown in the last line, next to the keys.
    """
    lines = [_draw_headline(snapshot, width)]
    if snapshot.reason:
        lines.append(Text(snapshot.reason))
    if snapshot.progress is not None:
        lines.append(_draw_progress(snapshot.progress, width))
    size = min(MAX_GROUP_COLUMNS, width // max(1, len(snapshot.groups)))
    groups = [_draw_group(*group, size - len(GAP)) for group in snapshot.groups.items()]
    lines += [Text(), *_join_columns(groups, size)]
    if height is None:
        lines += _draw_body(snapshot, width, None)
    else:
        space = max(0, height - len(lines) - 1)
        body = _draw_body(snapshot, width, space)
        foot = f"q quit   {_find_local_time(snapshot.read_at):%Y-%m-%d %H:%M:%S}"
        foot += f"   {note}" if note else ""
        lines += [*body, *[Text()] * (space - len(body)), Text(foot, style="dim")]
    return Group(*(_fit(line, width) for line in lines))


def _fit(line: Text, width: int, *, pad: bool = False) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis", pad=pad)
    return line


def _join_columns(columns: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Return lines side by side; columns have the same width, with a gap of two spaces."""
    lines = []
    for row in zip_longest(*columns):
        cells = [_fit(line or Text(), width - len(GAP), pad=True) for line in row]
        lines.append(Text(GAP).join(cells))
    return lines


def _find_local_time(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds).astimezone()


def _draw_headline(snapshot: Snapshot, width: int) -> Text:
    name_width = max(1, width - len(snapshot.verb) - len(snapshot.state) - len("     …"))
    state = (snapshot.state, STATE_STYLES.get(snapshot.state, "bold"))
    name = _fit(Text(snapshot.name, style="bold"), name_width)
    facts = GAP + " · ".join(snapshot.facts) if snapshot.facts else ""
    return Text.assemble(name, f"  {snapshot.verb}  ", state, (facts, "dim"))


def _draw_progress(progress: ViewProgress, width: int) -> Text:
    total, eta = progress.total, progress.eta_seconds
    label = f"{progress.done:,.0f}" + (f"/{total:,.0f}" if total is not None else "")
    right = f"  ETA {_format_clock(eta)}" if eta else ""
    if not total:
        return Text(f"{label} {progress.unit}{right}")
    fraction = min(1.0, progress.done / total)
    left, right = f"{label} {progress.unit} ", f" {fraction:>6.1%}{right}"
    size = max(4, width - len(left) - len(right))
    filled = round(fraction * size)
    return Text.assemble(left, ("█" * filled, "green"), ("░" * (size - filled), "dim"), right)


def _format_clock(seconds: float) -> str:
    minutes, whole_seconds = divmod(round(seconds), SECONDS_PER_MINUTE)
    hours, minutes = divmod(minutes, SECONDS_PER_HOUR // SECONDS_PER_MINUTE)
    return f"{hours}:{minutes:02}:{whole_seconds:02}"


def _draw_group(name: str, values: Mapping[str, Value], size: int) -> list[Text]:
    lines = [Text(name.upper(), style="bold")]
    for key, value in values.items():
        text = format_value(key, value)
        label = Text(format_label(key), style="dim")
        label = _fit(label, max(1, size - len(text) - 1), pad=True)
        lines.append(Text.assemble(label, " ", text))
    return lines


def _draw_body(snapshot: Snapshot, width: int, max_lines: int | None) -> list[Text]:
    """Draw the table and the events, beside each other on a wide terminal."""
    num_rows, num_events = len(snapshot.rows), len(snapshot.events)
    is_wide = width >= WIDE_COLUMNS and num_rows > 0
    if max_lines is not None and is_wide:
        space = max(0, max_lines - HEADING_LINES)
        num_rows, num_events = min(num_rows, space), min(num_events, space)
    elif max_lines is not None:
        space = max(0, max_lines - 2 * HEADING_LINES)
        max_rows = max(MIN_TABLE_ROWS, space - min(num_events, space // 2))
        num_rows = min(num_rows, space, max_rows)
        num_events = min(num_events, space - num_rows)
    table = _draw_table(snapshot.rows, num_rows) if num_rows else []
    events = _draw_events(snapshot.events, num_events) if num_events or is_wide else []
    if is_wide:
        return [Text(), *_join_columns((table, events), width // 2)]
    return [line for lines in (table, events) if lines for line in (Text(), *lines)]


def _draw_table(rows: Sequence[TableRow], max_rows: int) -> list[Text]:
    """Draw rows under a heading; if not all fit, those with problems are among them."""
    shown, hidden = _select_rows(rows, max_rows)
    columns = []
    for key in rows[0].values:
        values = [row.values[key] for row in shown]
        cells = [format_label(key, HEADINGS).upper(), *(format_value(key, v) for v in values)]
        size = max(map(len, cells))
        is_text = any(isinstance(value, str) for value in values)
        columns.append([cell.ljust(size) if is_text else cell.rjust(size) for cell in cells])
    styles = ["bold", *(PROBLEM_STYLE if row.is_problem else "" for row in shown)]
    lines = [
        Text(GAP.join(cells).rstrip(), style=style)
        for style, *cells in zip(styles, *columns, strict=True)
    ]
    if hidden:
        problems = sum(row.is_problem for row in hidden) or "none"
        lines.append(Text(f"… {len(hidden)} more, {problems} with a problem", style="dim"))
    return lines


def _select_rows(
    rows: Sequence[TableRow], max_rows: int
) -> tuple[Sequence[TableRow], Sequence[TableRow]]:
    """Return the rows to show, with a line that counts the others, and those others."""
    if len(rows) <= max_rows:
        return rows, ()
    order = sorted(range(len(rows)), key=lambda index: not rows[index].is_problem)
    split = max(0, max_rows - 1)
    return [rows[index] for index in sorted(order[:split])], [rows[i] for i in order[split:]]


def _draw_events(events: Sequence[ViewEvent], max_events: int) -> list[Text]:
    lines = [Text("EVENTS" if events else "EVENTS  none yet", style="bold")]
    for event in events[len(events) - max_events :]:
        style = PROBLEM_STYLE if event.is_problem else ""
        lines.append(Text(f"{_find_local_time(event.at):%H:%M:%S}  {event.text}", style=style))
    return lines
