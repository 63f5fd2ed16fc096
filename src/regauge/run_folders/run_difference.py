"""How two runs differ: settings, data, weights, code and environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.config import flatten
from regauge.run_folders.run_folder import read_run_folder

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.run_folders.run_folder import RunFolder

IGNORED_SETTINGS = ("output.folder",)
"""Settings that differ between any two runs."""
CODE = "packages.regauge"
"""Regauge version in a run's environment."""

Difference = dict[str, Any]
"""A row: the name, and the value in each run; None if a run has none."""


def find_differences(first: Path, second: Path) -> dict[str, list[Difference]]:
    """Return topic -> differences for two output folders; equal topics have empty lists.

    Raises SettingsError if a folder does not contain a run, DataError if a newer Regauge wrote it.
    """
    topics, other_topics = (_list_topics(read_run_folder(folder)) for folder in (first, second))
    return {name: _compare(topics[name], other_topics[name]) for name in topics}


def _list_topics(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Return topic -> key -> compared value; values missing from a run are None."""
    environment = {key: value for key, value in flatten(run.environment) if value != {}}
    settings = dict(flatten(run.settings))
    for key in IGNORED_SETTINGS:
        settings.pop(key, None)
    return {
        "settings": settings,
        "data": {"data_fingerprint": run.identity.get("data_fingerprint")},
        "weights": {"weights_checksum": run.identity.get("weights_checksum")},
        "code": {"regauge": environment.pop(CODE, None)},
        "environment": environment,
    }


def _compare(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    return [
        {"name": key, "first": first.get(key), "second": second.get(key)}
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key)
    ]
