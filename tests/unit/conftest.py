"""A small house with two verbs, `write` and `join`, in which pipelines are quick."""

from __future__ import annotations

from types import ModuleType

import pytest

from regauge import choices, verbs
from regauge.verbs import pipeline
from unit.stage_verbs import join, write

VERBS: dict[str, ModuleType] = {"join": join, "pipeline": pipeline, "write": write}


@pytest.fixture
def two_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the verbs be these ones, for one test."""
    names = choices.names
    monkeypatch.setattr(verbs, "module", VERBS.__getitem__)
    monkeypatch.setattr(
        choices,
        "names",
        lambda folder: tuple(VERBS) if folder == "verbs" else names(folder),
    )
