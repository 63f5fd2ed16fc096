"""The descendants of a process, from /proc."""

from __future__ import annotations

from pathlib import Path

from regauge.supervision.channel import read_text


def list_descendants(pid: int) -> list[int]:
    """Return the children of a process, and all their descendants."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        if (
            fields := read_text(path).rpartition(")")[2].split()
        ):  # empty if the process has just ended
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    family = [pid]
    for member in family:
        family += parents.get(member, [])
    return family[1:]


def list_ranks(pid: int) -> list[int]:
    """Return the descendants that are ranks of a run, by their process name."""
    names = {child: read_text(Path(f"/proc/{child}/comm")) for child in list_descendants(pid)}
    return [child for child, name in names.items() if name.startswith("rank ")]
