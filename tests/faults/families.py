"""The processes that come of one, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

from regauge.supervision.channel import text


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if fields := text(path).rpartition(")")[2].split():  # none where it has just ended
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found[1:]


def ranks(pid: int) -> list[int]:
    """Return those of them that are processes of a run, by the name that they take."""
    return [one for one in descendants(pid) if text(Path(f"/proc/{one}/comm")).startswith("rank ")]
