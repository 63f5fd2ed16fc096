"""Setting names in other training systems, and the Regauge settings that replace them.

Used by messages about unknown keys and by `regauge explain`. The names are in `peer_names.toml`.
Choices list their own peer names as `peer_names` in their class.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from regauge.system.wording import normalize_key


class PeerSetting(NamedTuple):
    """Another system's setting and its Regauge replacements."""

    peer: str
    """The other system; empty if several use the name."""
    name: str
    settings: tuple[str, ...]
    """Keys, or keys with values such as `execution.precision=fp16`."""


def list_settings() -> tuple[PeerSetting, ...]:
    """Return all peer settings that have a counterpart."""
    return tuple(
        PeerSetting(peer, name, tuple(settings.split()))
        for peer, names in _read_names()["peers"].items()
        for name, settings in names.items()
    )


def find_settings(word: str) -> tuple[str, ...]:
    """Return the settings that replace another system's setting; empty if unknown.

    A flag such as `--num-train-epochs` stands for its key. The last part of a dotted name is
    enough.
    """
    name = normalize_key(word)
    matches = [item for item in list_settings() if name in (item.name, item.name.split(".")[-1])]
    return tuple(dict.fromkeys(setting for item in matches for setting in item.settings))


def list_absences() -> dict[str, str]:
    """Return setting without a counterpart -> reason."""
    absences: dict[str, str] = _read_names()["absent"]
    return absences


def find_absence(word: str) -> str | None:
    """Return why another system's setting lacks a counterpart; None if unknown."""
    return list_absences().get(normalize_key(word))


@cache
def _read_names() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
