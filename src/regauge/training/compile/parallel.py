"""The shapes of a run compiled in several processes at once; no torch here.

Each process keeps its graphs under a root of its own, so that none sees what another has half
written. Then all of them are put together.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from regauge import processes
from regauge.config import dump, merge
from regauge.errors import ChildError, SettingsError
from regauge.training.compile import cache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.accelerators import Accelerator
    from regauge.training.settings import Training

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One share of the declared shapes."""

    number: int = 1
    """From 1."""
    count: int = 1

    @classmethod
    def parsed(cls, text: str) -> Part:
        """Return the part that is written as `2/4`; raises SettingsError for anything else."""
        number, _, count = text.partition("/")
        if number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise SettingsError(f"'{text}' is no part of a whole", "write --part 2/4 or the like")

    def of(self, shapes: tuple[T, ...]) -> tuple[T, ...]:
        """Return this part's shapes; the larger ones are spread over all parts."""
        return shapes[self.number - 1 :: self.count]


def compile_apart(settings: Training, accelerator: Accelerator, jobs: int) -> None:
    """Compile the shapes of a run in `jobs` processes, and put their graphs into its cache.

    Where the device's own tool compiles what a trial has collected, it does. Raises ChildError with
    the code of the first process that failed.
    """
    if jobs > 1 and not accelerator.shared:
        raise SettingsError(
            f"one process at a time can use a device of '{accelerator.kind}'", "leave --jobs out"
        )
    if settings.batch.microbatch_rows == "auto":
        problem = "parts are compiled apart for one size, and batch.microbatch_rows is auto"
        raise SettingsError(problem, "set it to a number, or leave --jobs out")
    with tempfile.TemporaryDirectory(prefix="regauge-parts-") as scratch:
        roots = [Path(scratch) / f"graphs-{number}" for number in range(1, jobs + 1)]
        trials = [
            _trial(settings, root, f"{number}/{jobs}") for number, root in enumerate(roots, start=1)
        ]
        tool = accelerator.collecting()
        before = tool.collect if tool else ()
        _start([[*before, *trial] for trial in trials], Path(scratch), processes.NOTHING)
        for root, trial in zip(roots, trials, strict=True):
            if tool:
                (entry,) = cache.entries(root)
                place = {tool.folder: str(entry.graphs)}
                _start([[*tool.compile, *trial]], Path(scratch), place)
                entry.seal(0.0)
            cache.copy(str(root), str(settings.execution.compile_cache))


def _trial(settings: Training, root: Path, part: str) -> list[str]:
    root.mkdir()
    request = root / "run.json"
    own = {"execution": {"compile_cache": str(root)}, "output": {"folder": str(root / "run")}}
    request.write_text(json.dumps(merge(dump(settings), own)))
    return [sys.executable, "-m", "regauge", "compile", str(request), "--part", part]


def _start(commands: list[list[str]], logs: Path, variables: Mapping[str, str]) -> None:
    code = processes.start_beside(commands, logs, variables)
    if code:
        said = [text for log in sorted(logs.glob("*.log")) if (text := log.read_text().strip())]
        line = said[0].splitlines()[-1] if said else f"a process ended with code {code}"
        raise ChildError(code, line.removeprefix("regauge: "))
