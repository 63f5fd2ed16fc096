"""Two small verbs, `write` and `join`, for fast pipelines."""

from __future__ import annotations

from types import ModuleType

import pytest

from regauge import choices, verbs
from regauge.verbs import pipeline
from unit.stage_verbs import join, write

VERBS: dict[str, ModuleType] = {"join": join, "pipeline": pipeline, "write": write}


@pytest.fixture
def two_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the verbs of Regauge by the two small ones."""
    names = choices.names
    monkeypatch.setattr(verbs, "import_verb", VERBS.__getitem__)
    monkeypatch.setattr(
        choices,
        "names",
        lambda folder: tuple(VERBS) if folder == "verbs" else names(folder),
    )
