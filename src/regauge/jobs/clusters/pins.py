"""Package versions for an image, as pip constraints."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from regauge.system.errors import SettingsError

CONSTRAINTS = "constraints.txt"
PACKAGE = "regauge"


class Pins(NamedTuple):
    text: str
    """Constraints file text, a `name==version` per line."""
    unpinned: tuple[str, ...]
    """Packages whose version is not fixed."""


def find_pins(constraints: str | None, extras: Iterable[str]) -> Pins:
    """Return the pins in a constraints file, or else the versions installed here.

    Raises SettingsError for a missing file.
    """
    return _pin_installed(extras) if constraints is None else _read_pins(Path(constraints))


def _read_pins(path: Path) -> Pins:
    if not path.is_file():
        raise SettingsError(f"no file {path}", "correct image.constraints")
    text = path.read_text(encoding="utf-8")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return Pins(text, tuple(line for line in lines if line and "==" not in line))


def _pin_installed(extras: Iterable[str]) -> Pins:
    """Pin Regauge's installed dependencies, and their dependencies.

    Local versions such as `2.13.0+cpu` lose their label, so a GPU image gets the same version.
    """
    versions: dict[str, str] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    pending = [(PACKAGE, extra) for extra in ("", *extras)]
    while pending:
        name, extra = pending.pop()
        if name in missing or (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        versions[name] = package.version.partition("+")[0]
        for requirement in map(Requirement, package.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                key = canonicalize_name(requirement.name)
                pending += [(key, item) for item in ("", *requirement.extras)]
    versions.pop(PACKAGE, None)
    text = "".join(f"{name}=={versions[name]}\n" for name in sorted(versions))
    return Pins(text, tuple(sorted(missing)))
