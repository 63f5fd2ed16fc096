"""Write a text into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regauge import config
from regauge.system.errors import DataError


class Text(config.Settings):
    """The text to write."""

    value: str = "hello"
    """The text; `fail` makes the stage fail."""


class Data(config.Settings):
    """The output of the verb."""

    path: str
    """Folder of the text."""


class Write(config.Settings):
    """Settings of the verb."""

    text: Text = Text()
    data: Data


ROOT = Write
OUTPUT = "data.path"


def plan(settings: Write) -> dict[str, Any]:
    """Return the length of the text."""
    return {"characters": len(settings.text.value)}


def run(settings: Write) -> dict[str, Any]:
    """Write the text, and count the runs in another file."""
    folder = Path(settings.data.path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "runs").open("a") as runs:
        runs.write("x")
    if settings.text.value == "fail":
        raise DataError("the text fails", "write another")
    (folder / "text.txt").write_text(settings.text.value)
    return {"characters": len(settings.text.value), "next": f"read {folder}"}
