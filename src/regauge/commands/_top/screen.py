"""Draws a snapshot as text lines of a given size, from 60 columns and 16 lines on."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from regauge.commands._top.snapshot import Column, Figure, FigureGroup, Snapshot, TableRow, Value
from regauge.run_folders import formatting
from regauge.system.units import GIGA, SECONDS_PER_HOUR, SECONDS_PER_MINUTE

if TYPE_CHECKING:
    from rich.console import RenderableType

    from regauge.commands._top.snapshot import ValueKind, ViewEvent, ViewProgress

STATE_STYLES = {
    "running": "bold green",
    "ready": "bold green",
    "finished": "bold cyan",
    "succeeded": "bold cyan",
    "failed": "bold red",
    "unreachable": "bold red",
    "preempted": "bold yellow",
}
PROBLEM_STYLE = "bold yellow"
"""Style of rows and events that need attention; their words say the same."""
EMPTY = "-"
"""Text of a value that is unknown."""
GROUP_LINES = 1
"""Lines of the heading of a group, a table or the events."""
MIN_TABLE_ROWS = 3
WIDE_COLUMNS = 130
"""Width from which the events are beside the table."""
KEYS = "q quit"


def render(snapshot: Snapshot, width: int, height: int | None, note: str = "") -> RenderableType:
    """Return a snapshot for a terminal; without a height all rows and events are shown.

    `note` is shown in the last line, next to the keys.
    """
    head = [_draw_headline(snapshot, width)]
    if snapshot.reason:
        head.append(_draw_line(snapshot.reason, width))
    if snapshot.progress is not None:
        head.append(_draw_progress(snapshot.progress, width))
    groups = _draw_groups(snapshot.groups, width)
    blank = [Text("")]
    foot = [_draw_foot(snapshot, note, width)] if height is not None else []
    used = len(head) + (1 + _count_group_lines(snapshot.groups)) + len(foot)
    lines_left = None if height is None else max(0, height - used)
    body = _draw_body(snapshot, width, lines_left)
    return Group(*head, *blank, groups, *body, *foot)


def _draw_line(text: str, width: int, style: str = "") -> Text:
    line = Text(text, style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _draw_headline(snapshot: Snapshot, width: int) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    verb = f"  {snapshot.verb}  "
    name_width = max(1, width - len(verb) - len(snapshot.state) - len(" …"))
    line.append(_draw_line(snapshot.name, name_width, "bold")).append(verb)
    line.append(snapshot.state, style=STATE_STYLES.get(snapshot.state, "bold"))
    if snapshot.facts:
        line.append("  " + " · ".join(snapshot.facts), style="dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _draw_progress(progress: ViewProgress, width: int) -> Text:
    done = f"{progress.done:,.0f}"
    total = "" if progress.total is None else f"/{progress.total:,.0f}"
    label = f"{done}{total} {progress.unit}"
    eta = progress.eta_seconds
    right = f"  ETA {format_clock(eta)}" if eta else ""
    fraction = progress.fraction
    if fraction is None:
        return _draw_line(label + right, width)
    right = f" {fraction:>6.1%}{right}"
    size = max(4, width - len(label) - len(right) - 1)
    filled = round(fraction * size)
    line = Text(f"{label} ", no_wrap=True)
    line.append("█" * filled, style="green").append("░" * (size - filled), style="dim")
    line.append(right)
    line.truncate(width)
    return line


def _count_group_lines(groups: Sequence[FigureGroup]) -> int:
    return GROUP_LINES + max((len(group.figures) for group in groups), default=0)


def _draw_groups(groups: Sequence[FigureGroup], width: int) -> Table:
    """Draw groups side by side; every column has the same width."""
    table = Table.grid(padding=0, expand=False)
    size = min(44, width // max(1, len(groups)))
    for _ in groups:
        table.add_column(width=size, no_wrap=True)
    table.add_row(*(Text(group.name.upper(), style="bold") for group in groups))
    for row in zip_longest(*(group.figures for group in groups)):
        table.add_row(*(_draw_figure(figure, size - 2) for figure in row))
    return table


def _draw_figure(figure: Figure | None, size: int) -> Text:
    """Draw a label at the left and its value at the right; a long label is shortened."""
    if figure is None:
        return Text("")
    value = format_value(figure.value, figure.kind)
    label = _draw_line(figure.label, max(1, size - len(value) - 1), "dim")
    gap = size - label.cell_len - len(value)
    return Text.assemble(label, " " * max(1, gap), value)


def _draw_body(snapshot: Snapshot, width: int, lines_left: int | None) -> Sequence[RenderableType]:
    """Draw the table and the events, beside each other on a wide terminal."""
    rows, events = snapshot.table.rows, snapshot.events
    is_wide = width >= WIDE_COLUMNS and bool(rows)
    num_rows, num_events = len(rows), len(events)
    if lines_left is not None:
        heading_lines = 2 * (GROUP_LINES + 1)  # the heading and the blank line before
        if is_wide:
            space = max(0, lines_left - GROUP_LINES - 1)
            num_rows, num_events = min(num_rows, space), min(num_events, space)
        else:
            space = max(0, lines_left - heading_lines)
            num_rows = min(len(rows), max(MIN_TABLE_ROWS, space - min(num_events, space // 2)))
            num_rows = min(num_rows, space)
            num_events = min(num_events, space - num_rows)
    if is_wide:
        half = width // 2
        table = Table.grid(padding=0)
        table.add_column(width=half)
        table.add_column(width=width - half)
        left = Group(*_draw_table(snapshot, half - 2, num_rows))
        table.add_row(left, Group(*_draw_events(events, width - half, num_events)))
        return _fill([Text(""), table], lines_left, 1 + GROUP_LINES + max(num_rows, num_events))
    lines: list[Text] = []
    if rows and num_rows:
        lines += [Text(""), *_draw_table(snapshot, width, num_rows)]
    if events and num_events:
        lines += [Text(""), *_draw_events(events, width, num_events)]
    return _fill(lines, lines_left, len(lines))


def _fill(
    lines: Sequence[RenderableType], lines_left: int | None, num_lines: int
) -> Sequence[RenderableType]:
    """Add blank lines, so that the keys are in the last line of the screen."""
    return [*lines, *[Text("")] * max(0, (lines_left or 0) - num_lines)]


def _draw_table(snapshot: Snapshot, width: int, max_rows: int) -> list[Text]:
    """Draw the rows of the table; if not all fit, those with problems are among them."""
    columns, rows = snapshot.table.columns, list(snapshot.table.rows)
    hidden = 0
    if len(rows) > max_rows:
        hidden = len(rows) - max_rows + 1
        problems = [row for row in rows if row.is_problem]
        others = [row for row in rows if not row.is_problem]
        kept = [*problems, *others][: max(0, max_rows - 1)]
        rows = [row for row in rows if row in kept]
    cells = [[format_value(row.values.get(column.key), column.kind) for column in columns]
             for row in rows]  # fmt: skip
    sizes = [
        max(len(column.label), *(len(line[index]) for line in cells), 0)
        for index, column in enumerate(columns)
    ]
    lines = [_draw_line(_join([column.label for column in columns], columns, sizes), width, "bold")]
    for row, line in zip(rows, cells, strict=True):
        style = PROBLEM_STYLE if row.is_problem else ""
        lines.append(_draw_line(_join(line, columns, sizes), width, style))
    if hidden:
        lines.append(_draw_line(_summarize_hidden(snapshot.table.rows, rows), width, "dim"))
    return lines


def _summarize_hidden(rows: Sequence[TableRow], shown: Sequence[TableRow]) -> str:
    """Return how many rows are not shown, and how many of them have a problem."""
    hidden = [row for row in rows if row not in shown]
    problems = sum(row.is_problem for row in hidden)
    return f"… {len(hidden)} more, {problems or 'none'} with a problem"


def _join(cells: Sequence[str], columns: Sequence[Column], sizes: Sequence[int]) -> str:
    """Return the cells of a row as one line: texts to the left, numbers to the right."""
    parts = [
        cell.ljust(size) if column.kind == "text" else cell.rjust(size)
        for cell, column, size in zip(cells, columns, sizes, strict=True)
    ]
    return "  ".join(parts).rstrip()


def _draw_events(events: Sequence[ViewEvent], width: int, max_events: int) -> list[Text]:
    lines = [_draw_line("EVENTS" if events else "EVENTS  none yet", width, "bold")]
    for event in events[len(events) - min(len(events), max_events) :]:
        at = dt.datetime.fromtimestamp(event.at).astimezone()
        style = PROBLEM_STYLE if event.is_problem else ""
        lines.append(_draw_line(f"{at:%H:%M:%S}  {event.text}", width, style))
    return lines


def _draw_foot(snapshot: Snapshot, note: str, width: int) -> Text:
    at = dt.datetime.fromtimestamp(snapshot.read_at).astimezone()
    text = f"{KEYS}   {at:%Y-%m-%d %H:%M:%S}"
    return _draw_line(f"{text}   {note}" if note else text, width, "dim")


def format_value(value: Value, kind: ValueKind) -> str:
    """Return a value as text; `-` if it is unknown."""
    if value is None:
        return EMPTY
    if isinstance(value, str) or kind == "text":
        return str(value)
    if kind == "bytes":
        return f"{value / GIGA:.2f} GB"
    if kind == "seconds":
        return formatting.duration(value)
    formats = {
        "percent": formatting.percent,
        "dollars": formatting.dollars,
        "count": formatting.count,
        "number": formatting.number,
    }
    return formats[kind](value)


def format_clock(seconds: float) -> str:
    """Return a duration as `h:mm:ss`."""
    minutes, whole_seconds = divmod(round(seconds), SECONDS_PER_MINUTE)
    hours, minutes = divmod(minutes, SECONDS_PER_HOUR // SECONDS_PER_MINUTE)
    return f"{hours}:{minutes:02}:{whole_seconds:02}"
