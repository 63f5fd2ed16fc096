"""Evaluate models of one number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regauge import config


class Output(config.Settings):
    """The output of the verb."""

    folder: str
    """Folder of the evaluation."""


class Score(config.Settings):
    """Settings of the verb."""

    models: dict[str, str]
    """Folders of models by name."""
    rows: str = "rows-1"
    """Fingerprint of the held-out rows."""
    output: Output


ROOT = Score
OUTPUT = "output.folder"


def run(settings: Score) -> dict[str, Any]:
    """Write the values of the models as a table."""
    rows = [
        {"name": name, "accuracy": json.loads(Path(folder, "config.json").read_text())["value"]}
        for name, folder in settings.models.items()
    ]
    document = {
        "rows": rows,
        "identity": {"data_fingerprint": settings.rows, "heldout_rows": 100},
        "settings": config.dump(settings),
    }
    folder = Path(settings.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / "evaluation.json", document)
    return {"rows": rows}
