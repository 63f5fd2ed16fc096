"""Fit a model of one number: the mean of the records, and that of the model it starts from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import SerializeAsAny

from regauge import config
from regauge.config import choice_of
from regauge.data.sources import Record, Source


class InitFrom(config.Settings):
    """An earlier model."""

    path: str
    """Its folder."""


class Start(config.Settings):
    """The model that is fitted."""

    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"init_from": ("architecture",)}

    architecture: str | None = None
    """Name of the architecture of a new model."""
    init_from: InitFrom | None = None
    """The model to start from."""


class Output(config.Settings):
    """The output of the verb."""

    folder: str
    """Folder of the model."""


class Fit(config.Settings):
    """Settings of the verb."""

    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")]
    """Records with a value."""
    model: Start
    output: Output


ROOT = Fit
OUTPUT = "output.folder"


def plan(settings: Fit) -> dict[str, Any]:
    """Return the number of pieces."""
    return {"pieces": len(settings.source.list_pieces())}


def run(settings: Fit) -> dict[str, Any]:
    """Write a model whose value is the mean of its records."""
    folder = Path(settings.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "runs").open("a") as runs:
        runs.write("x")
    values = [
        float(str(record.fields["value"]))
        for piece in settings.source.list_pieces()
        for record in settings.source.read(piece)
        if isinstance(record, Record)
    ]
    start = settings.model.init_from
    document = {
        "value": sum(values) / len(values),
        "records": len(values),
        "start": start.path if start else None,
        "architecture": settings.model.architecture,
    }
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "model.safetensors").write_bytes(json.dumps(document).encode())
    return document
