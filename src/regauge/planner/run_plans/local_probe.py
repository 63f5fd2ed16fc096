"""Measures a few steps of a run on this machine, in a separate process that may use torch.

The probe is a short training benchmark, `regauge benchmark --training`, with the run's settings.
Its step time and memory become a measured run, which corrects the plan.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.data.dataset import MANIFEST
from regauge.planner.run_history import OFF, VARIABLE
from regauge.planner.run_plans.run_recorder import measure_run
from regauge.system.children import run_tool
from regauge.system.errors import ChildError, SettingsError
from regauge.system.files import write_json
from regauge.system.log import logger
from regauge.system.wording import format_count
from regauge.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.planner.anchors import Anchor

PROBE_STEPS, WARMUP_STEPS = 20, 5
"""Steps that a probe measures, and steps before them."""
LOG_LINES = 20
"""How many log lines to show from a failed probe."""
GRAPHS_PER_SHAPE, MIN_SECONDS_PER_GRAPH = 2, 30.0
"""A run that is shorter than this time for each graph is not compiled, as in `train`."""


class ProbedRun(NamedTuple):
    """A probe's run: a run file's tables, and its steps."""

    tables: Mapping[str, Any]
    steps: int | None
    num_shapes: int
    """Batch shape count."""


def probe_run(run: ProbedRun) -> list[Anchor]:
    """Return the measured run on 1 process, and on the run file's process count.

    Raises SettingsError if the data is not prepared, and ChildError if the run fails.
    """
    path = Path((run.tables.get("data") or {}).get("path", "")).expanduser()
    if not (path / MANIFEST).is_file():
        problem = f"a probe trains on real rows, and {path} is not prepared"
        raise SettingsError(problem, "run 'regauge prepare', or the pipeline of the run file")
    requested = (run.tables.get("execution") or {}).get("processes", 1)
    counts = {1, requested} if isinstance(requested, int) else {1}
    # The larger number is measured first, because the run may be refused on it.
    return [_probe_processes(run, count) for count in sorted(counts, reverse=True)][::-1]


def _probe_processes(run: ProbedRun, processes: int) -> Anchor:
    """Return the measured run on a process count, compiled if the run would be."""
    execution = run.tables.get("execution") or {}
    is_open = execution.get("compile", "auto") == "auto"
    eager = _measure(run.tables, processes, "off" if is_open else str(execution["compile"]))
    seconds = eager.measured_seconds or 0.0
    limit = MIN_SECONDS_PER_GRAPH * GRAPHS_PER_SHAPE * run.num_shapes
    if not is_open or run.steps is None or seconds * run.steps < limit:
        return eager
    compiled = _measure(run.tables, processes, "blocks")
    return min(eager, compiled, key=lambda anchor: anchor.measured_seconds or 0.0)


def _measure(tables: Mapping[str, Any], processes: int, compilation: str) -> Anchor:
    count = format_count(processes, "process")
    logger.info("measuring %d steps on %s, torch.compile %s", PROBE_STEPS, count, compilation)
    with tempfile.TemporaryDirectory(prefix="regauge-probe-") as name:
        folder = Path(name)
        _run_benchmark(_write_run_file(folder, tables, processes, compilation))
        anchor = measure_run(folder / "run" / f"{processes}-processes-1")
    if anchor is None:
        raise SettingsError("the probe has too few steps", "plan with --on, without --probe")
    shape = anchor.name.partition(": ")[2]
    return replace(anchor, name=f"probe: {shape}", planned_seconds=None, planned_bytes=None)


def _write_run_file(
    folder: Path, tables: Mapping[str, Any], processes: int, compilation: str
) -> Path:
    known = {name: table for name, table in tables.items() if name in TrainSettings.model_fields}
    known.pop("monitoring", None)
    execution = {**known.get("execution", {}), "processes": processes, "compile": compilation}
    execution.pop("price", None)
    document = {
        **known,
        "execution": execution,
        "output": {"folder": str(folder / "run")},
        "stop": {"steps": PROBE_STEPS},
        "benchmark": {
            "processes": [processes],
            "scaling": "strong",
            "steps": PROBE_STEPS,
            "warmup_steps": WARMUP_STEPS,
            "repeats": 1,
        },
    }
    path = folder / "probe.json"
    write_json(path, document)
    return path


def _run_benchmark(run_file: Path) -> None:
    """Run the benchmark in a separate process; raises ChildError with its last line."""
    command = [sys.executable, "-m", "regauge", "benchmark", "--training", str(run_file), "--json"]
    result = run_tool(command, env={**os.environ, VARIABLE: OFF})
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        line = lines[-1] if lines else json.dumps(command)
        if str(run_file.parent) in line:  # the folder with the logs does not outlive the probe
            line = f"{line.rpartition('; ')[0]}; see the lines above"
            logger.error("the probe failed:\n%s", "\n".join(lines[-LOG_LINES:]))
        raise ChildError(result.returncode, line)
