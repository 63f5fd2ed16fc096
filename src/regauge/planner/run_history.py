"""The user's measured runs, which correct later plans, in one bounded file.

Each finished run writes its measured step time and peak memory beside the planner's prediction.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regauge.machines.machine_rates import MachineRates
from regauge.planner.anchors import Anchor, Features
from regauge.system import jsonl
from regauge.system.errors import SettingsError
from regauge.system.files import LOCK, find_state_folder, hold_lock, write_atomic
from regauge.system.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regauge.planner.training_job import PrecisionPlan

VARIABLE = "REGAUGE_PLANNER_RUNS"
"""Environment variable with the file path, or `off`."""
OFF = "off"
FORMULA_VERSION = 2
"""Version of the formulas for step time and memory; raise it whenever a prediction changes.

Runs that another version predicted are ignored: their errors say nothing about this one.
"""
MAX_RUNS = 200
"""How many of the latest runs the file keeps."""
LOCK_SECONDS = 5.0
"""Longest wait for another run that writes the file."""
LOCAL = "local"
"""Machine name for runs measured outside the catalog."""


def find_history() -> Path | None:
    """Return the file with the user's measured runs; None if `REGAUGE_PLANNER_RUNS` is `off`.

    The default is `planner_runs.jsonl` in the user's state folder.
    """
    if path := os.environ.get(VARIABLE):
        return None if path == OFF else Path(path).expanduser()
    return find_state_folder() / "planner_runs.jsonl"


def record_run(anchor: Anchor, path: Path | None = None) -> None:
    """Add a measured run to the user's history, and remove the oldest one beyond `MAX_RUNS`.

    An earlier record of the same run is replaced. Nothing is written if the history is off. Raises
    OSError if the file cannot be written.
    """
    path = path or find_history()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.parent / LOCK, LOCK_SECONDS):
        runs = [
            run for run in load_history(path) if not anchor.run_id or run.run_id != anchor.run_id
        ]
        documents = [{**asdict(run), "formula": FORMULA_VERSION} for run in (*runs, anchor)]
        lines = [json.dumps(document, allow_nan=False) for document in documents]
        write_atomic(path, "\n".join(lines[-MAX_RUNS:]) + "\n")


def load_history(path: Path | None = None) -> tuple[Anchor, ...]:
    """Return the user's measured runs, oldest first; a damaged line is skipped with a warning."""
    path = path or find_history()
    if path is None or not path.exists():
        return ()
    runs = [_parse_document(line) for line in jsonl.read_lines(path)]
    if damaged := runs.count(None):
        logger.warning("%s: %d runs of another version are ignored", path, damaged)
    return tuple(run for run in runs if run is not None)


def _parse_document(document: dict[str, Any]) -> Anchor | None:
    """Return a run; None if its values or its formulas do not match this version."""
    if document.get("formula") != FORMULA_VERSION:
        return None
    try:
        values = {
            item.name: document[item.name] for item in fields(Anchor) if item.name in document
        }
        features = Features(**values.pop("features"))
        machine = values.pop("machine", None)
        return Anchor(
            features=features, machine=MachineRates(**machine) if machine else None, **values
        )
    except (KeyError, TypeError):
        return None


def find_local_precision(runs: Sequence[Anchor]) -> PrecisionPlan:
    """Return the precision that `auto` selected in the latest run on this machine."""
    names = [run.features.precision for run in runs if run.machine is not None]
    return cast("PrecisionPlan", names[-1]) if names else "autocast"


def find_local_machine(runs: Sequence[Anchor], devices: int, precision: str) -> MachineRates:
    """Return this machine with a device count, from its latest measured run.

    A run with the precision is preferred, then one with the device count. Devices on a CPU share
    its peak. Raises SettingsError if no run was measured here.
    """
    local = [run for run in runs if run.machine is not None]
    if not local:
        problem = f"no run was measured on this machine, so the plan cannot use '{LOCAL}'"
        raise SettingsError(problem, "measure one with: regauge plan RUN.toml --probe")

    def similarity(run: Anchor) -> tuple[bool, bool]:
        return run.features.precision == precision, run.features.devices == devices

    best = max(reversed(local), key=similarity)
    machine, share = best.machine, devices / best.features.devices
    assert machine is not None  # noqa: S101 - filtered above
    if not machine.is_shared:
        return replace(machine, devices=devices)
    return replace(
        machine,
        devices=devices,
        peak_flops=machine.peak_flops / share if machine.peak_flops else None,
        memory_bytes=machine.memory_bytes / share,
        memory_bandwidth=machine.memory_bandwidth / share,
    )
