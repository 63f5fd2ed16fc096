"""Small verbs for fast pipelines, and the threads of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from regauge import commands
from regauge.commands import gate, pipeline, promote, report
from regauge.system import choices
from unit.stage_verbs import fit, join, score, write

VERBS: dict[str, ModuleType] = {"join": join, "pipeline": pipeline, "write": write}
REPEATED_VERBS: dict[str, ModuleType] = {
    "fit": fit,
    "gate": gate,
    "pipeline": pipeline,
    "promote": promote,
    "report": report,
    "score": score,
}


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Restore the number of threads of torch, which a run sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def two_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the verbs of Regauge by `write` and `join`."""
    replace_verbs(monkeypatch, VERBS)


@pytest.fixture
def repeated_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the verbs by `fit`, `score`, and the real `gate`, `promote` and `report`."""
    replace_verbs(monkeypatch, REPEATED_VERBS)


def replace_verbs(monkeypatch: pytest.MonkeyPatch, modules: dict[str, ModuleType]) -> None:
    """Replace the verbs of Regauge by other modules."""
    names = choices.names
    monkeypatch.setattr(commands, "import_verb", modules.__getitem__)
    monkeypatch.setattr(
        choices,
        "names",
        lambda folder: tuple(modules) if folder == "verbs" else names(folder),
    )


@pytest.fixture
def no_user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the catalog and the measured runs of the user."""
    monkeypatch.setenv("REGAUGE_CATALOG", str(tmp_path / "catalog"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
