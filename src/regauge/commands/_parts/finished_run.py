"""Completes the result of a finished `train` run, and records the run for later plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.system import processes

if TYPE_CHECKING:
    from regauge.training.settings import TrainSettings


def complete_result(result: dict[str, Any], settings: TrainSettings) -> dict[str, Any]:
    """Return a run's result with goodput, model and next command."""
    from regauge.run_folders.goodput import read_goodput

    folder = Path(settings.output.folder)
    goodput = read_goodput(folder)
    command = settings.find_next_command(str(folder))
    return {
        **result,
        **({"goodput": round(goodput.fraction, 4)} if goodput else {}),
        "model": str(folder / "model"),
        **({"next": command} if command else {}),
    }


def record_result(result: dict[str, Any]) -> dict[str, Any]:
    """Record a finished run for later plans, once per machine, and return the result."""
    if not processes.is_supervised() and processes.detect_world().local_rank == 0:
        from regauge.planner.run_plans.run_recorder import record_finished

        record_finished(Path(result["output"]))
    return result
