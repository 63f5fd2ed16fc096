"""The lines that the driver of a Ray job prints: its events, and the output of its nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

EVENT_PREFIX = "[event] "
_LINE = re.compile(r"\[(\d+)/(\d+)\] (.*)", re.DOTALL)


class NodeLine(NamedTuple):
    """A line of output of a node."""

    attempt: int
    node: int
    text: str


def format_event(document: dict[str, Any]) -> str:
    """Return the line of an event."""
    return EVENT_PREFIX + json.dumps(document)


def format_line(attempt: int, node: int, text: str) -> str:
    """Return a line of a node with its attempt and its number."""
    return f"[{attempt}/{node}] {text}"


def read_events(log: str) -> list[dict[str, Any]]:
    """Return the events of a log, oldest first; damaged lines are skipped."""
    events = []
    for line in log.splitlines():
        if line.startswith(EVENT_PREFIX):
            try:
                document = json.loads(line.removeprefix(EVENT_PREFIX))
            except ValueError:
                continue
            if isinstance(document, dict):
                events.append(document)
    return events


def read_lines(log: str) -> Iterator[NodeLine]:
    """Yield the lines of nodes in a log."""
    for line in log.splitlines():
        if match := _LINE.fullmatch(line):
            yield NodeLine(int(match[1]), int(match[2]), match[3])
