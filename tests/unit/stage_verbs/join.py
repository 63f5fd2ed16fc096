"""Join the texts of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge import config
from regauge.system.errors import DataError


class Output(config.Settings):
    """The output of the verb."""

    folder: str
    """Folder of the joined text."""
    separator: str = ""
    """Separator between two texts."""


class Join(config.Settings):
    """Settings of the verb."""

    inputs: tuple[str, ...]
    """Files to join."""
    output: Output


ROOT = Join
OUTPUT = "output.folder"


def plan(settings: Join) -> dict[str, Any]:
    """Return the length of the joined text."""
    return {"length": len(_join(settings))}


def run(settings: Join) -> dict[str, Any]:
    """Join the texts into one file."""
    folder = Path(settings.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "joined.txt").write_text(_join(settings))
    return {"length": len(_join(settings)), "report": str(folder / "joined.txt")}


def _join(settings: Join) -> str:
    try:
        return settings.output.separator.join(Path(file).read_text() for file in settings.inputs)
    except FileNotFoundError as error:
        raise DataError(f"no file {error.filename}", "write it first") from None
