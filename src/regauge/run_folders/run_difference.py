"""The differences of two runs: settings, data, weights, code and environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regauge.config import flatten
from regauge.run_folders.run_folder import read_run_folder

if TYPE_CHECKING:
    from pathlib import Path

    from regauge.run_folders.run_folder import RunFolder

CODE_PACKAGE = "regauge"
IGNORED_SETTINGS = ("output.folder",)
"""Settings that differ between any two runs."""
DATA_FIELDS = ("data_fingerprint",)
WEIGHT_FIELDS = ("weights_checksum",)

Difference = dict[str, Any]
"""A row: the name, and the value in each run; None if a run has none."""


def find_differences(first: Path, second: Path) -> dict[str, list[Difference]]:
    """Return the differences of two output folders by topic; equal topics have no rows.

    Raises SettingsError if a folder contains no run, DataError if a newer Regauge wrote it.
    """
    runs = read_run_folder(first), read_run_folder(second)
    settings = [
        {key: value for key, value in flatten(run.settings) if key not in IGNORED_SETTINGS}
        for run in runs
    ]
    environments = [dict(flatten(run.environment)) for run in runs]
    code = f"packages.{CODE_PACKAGE}"
    return {
        "settings": _compare(*settings),
        "data": _compare(*(_select(run, DATA_FIELDS) for run in runs)),
        "weights": _compare(*(_select(run, WEIGHT_FIELDS) for run in runs)),
        "code": _compare(
            *(
                {CODE_PACKAGE: document[code]} if code in document else {}
                for document in environments
            )
        ),
        "environment": _compare(
            *(
                {key: value for key, value in document.items() if key != code and value != {}}
                for document in environments
            )
        ),
    }


def _select(run: RunFolder, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: run.identity[name] for name in names if name in run.identity}


def _compare(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    return [
        {"name": key, "first": first.get(key), "second": second.get(key)}
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key)
    ]
