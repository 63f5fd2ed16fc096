"""What the first process of a run decides for all of them, left in a file of the run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.checkpoint.folder import write_json
from regauge.config import FORMAT
from regauge.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from regauge.processes import World
    from regauge.supervision.orders import Report

PROBE = "probe"
"""The folder of a run for such files, and for what was tried."""


@dataclass(frozen=True)
class Agreement:
    """One decision; `key` is a word for what it depends on, and all processes know it alike."""

    file: Path
    key: str

    def reached(
        self,
        find: Callable[[], dict[str, Any]],
        world: World,
        report: Report,
        seconds: float,
    ) -> dict[str, Any]:
        """Return what the first process finds, or has found before; the others wait for it.

        Raises TransientError where they have waited for so many seconds.
        """
        if world.first and self.read() is None:
            self.write(find())
        found = report.awaited(self.read, seconds)
        if found is None:
            name = self.file.name
            problem = f"process {world.rank} did not learn {name} within {seconds:g} s"
            raise TransientError(problem, f"see the log of the first process, and its {PROBE}/")
        return found

    def write(self, decision: dict[str, Any]) -> None:
        """Leave a decision for all processes."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, {"format": FORMAT, "key": self.key, **decision})

    def read(self) -> dict[str, Any] | None:
        """Return what was decided of exactly this; None where nothing was."""
        try:
            document: dict[str, Any] = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return None
        return document if document["key"] == self.key else None


def word(*facts: object) -> str:
    """Return a word that differs where facts differ that JSON can tell."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
