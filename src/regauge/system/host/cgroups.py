"""CPU limits of control groups: a container may use fewer cores than it sees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""One line per hierarchy: id, controllers and path; version 2 has the id 0 and no controllers."""
UNLIMITED = "max"


def read_cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many cores' time this process may use, or None without a limit.

    The limit is the smallest quota / period in its control group and the groups above it, for
    versions 1 and 2 (kernel documentation, "Control Group v2" and "CFS Bandwidth Control").
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    quotas = [quota for line in lines for quota in _read_hierarchy(root, line)]
    return min(quotas, default=None)


def _read_hierarchy(root: Path, line: str) -> Iterator[float]:
    """Yield the quotas in one hierarchy, in cores."""
    hierarchy, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if hierarchy == "0":
        for folder in _list_groups((root, root / "unified"), path):
            yield from _parse_quota(*_read_words(folder / "cpu.max"))
    elif "cpu" in controllers.split(","):
        for folder in _list_groups((root / "cpu", root / controllers), path):
            quota, period = (
                _read_words(folder / f"cpu.cfs_{name}_us")[:1] for name in ("quota", "period")
            )
            yield from _parse_quota(*quota, *period)


def _list_groups(mounts: tuple[Path, ...], path: str) -> Iterator[Path]:
    """Yield the folders of a control group and the groups above it.

    In a container the path may belong to the host. The group is then the root of the mount.
    """
    relative = Path(path.lstrip("/"))
    for mount in mounts:
        yield from (mount / group for group in (relative, *relative.parents))


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _parse_quota(quota: str = UNLIMITED, period: str = "") -> Iterator[float]:
    """Yield quota / period, unless unlimited."""
    if quota != UNLIMITED and period and int(quota) > 0:
        yield int(quota) / int(period)
