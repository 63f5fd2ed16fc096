"""Compiles shapes in several processes at once; this module imports no torch.

Each process writes to a separate cache, so none reads a graph that another is writing. The
caches are merged afterwards.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from regauge.config import dump, merge
from regauge.config.output_files import SAVED_RUN
from regauge.system import children, processes
from regauge.system.errors import ChildError, SettingsError
from regauge.system.line_tail import read_last_lines
from regauge.training.compile import cache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.accelerators import Accelerator
    from regauge.training.settings import TrainSettings

T = TypeVar("T")


@dataclass(frozen=True)
class ShapeSubset:
    """One of `count` parts of the declared shapes."""

    number: int = 1
    """Part number, from 1."""
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> ShapeSubset:
        """Parse text such as `2/4`; raises SettingsError for other text."""
        number, _, count = text.partition("/")
        if number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
            return cls(int(number), int(count))
        raise SettingsError(f"--part '{text}' is invalid", "write it as <number>/<count>: 2/4")

    def select(self, shapes: tuple[T, ...]) -> tuple[T, ...]:
        """Return this part's shapes; consecutive shapes are in different parts."""
        return shapes[self.number - 1 :: self.count]


def compile_in_parallel(settings: TrainSettings, accelerator: Accelerator, jobs: int) -> None:
    """Compile a run's shapes in `jobs` processes, and copy the graphs to the run's cache.

    If the vendor has a tool that compiles the graphs collected by a trial, it is used. Raises
    ChildError with the exit code of the first process that failed.
    """
    if jobs > 1 and not accelerator.is_shareable:
        raise SettingsError(
            f"only one process at a time can use a device of '{accelerator.kind}'",
            "leave --jobs out",
        )
    if settings.batch.microbatch_rows == "auto":
        problem = "--jobs needs a fixed microbatch size, and batch.microbatch_rows is auto"
        raise SettingsError(problem, "set it to a number, or leave --jobs out")
    with tempfile.TemporaryDirectory(prefix="regauge-parts-") as scratch:
        roots = [Path(scratch) / f"graphs-{number}" for number in range(1, jobs + 1)]
        commands = [
            _build_command(settings, root, f"{number}/{jobs}")
            for number, root in enumerate(roots, start=1)
        ]
        tool = accelerator.graph_collector()
        prefix = tool.collect_prefix if tool else ()
        _run_commands(
            [[*prefix, *command] for command in commands], Path(scratch), processes.NO_VARIABLES
        )
        for root, command in zip(roots, commands, strict=True):
            if tool:
                (entry,) = cache.find_entries(root)
                variables = {tool.folder_variable: str(entry.graphs_folder)}
                _run_commands([[*tool.compile_prefix, *command]], Path(scratch), variables)
                entry.seal(0.0)
            cache.copy_entries(str(root), str(settings.execution.compile_cache))


def _build_command(settings: TrainSettings, root: Path, part: str) -> list[str]:
    """Write a run file with a separate cache; return the command that compiles one part."""
    root.mkdir()
    run_file = root / SAVED_RUN
    changes = {"execution": {"compile_cache": str(root)}, "output": {"folder": str(root / "run")}}
    run_file.write_text(json.dumps(merge(dump(settings), changes)), encoding="utf-8")
    return [sys.executable, "-m", "regauge", "compile", str(run_file), "--part", part]


def _run_commands(commands: list[list[str]], logs: Path, variables: Mapping[str, str]) -> None:
    code = children.run_commands(commands, logs, variables)
    if code:
        lines = [line for log in sorted(logs.glob("*.log")) for line in read_last_lines(log, 1)]
        raise ChildError(code, lines[0] if lines else f"a process exited with code {code}")
