"""Where a run begins: with weights, moments and a schedule of an earlier one; no torch here.

What is taken over is copied before the first step, so that the earlier run may go on, or go.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.checkpoint import layout as checkpoints
from regauge.errors import SettingsError, TransientError
from regauge.models.hub import CONFIG, final

if TYPE_CHECKING:
    from regauge.models.settings import Origin
    from regauge.processes import World
    from regauge.supervision.channel import WorkerReporter
    from regauge.training.settings import Training

START = "start"
"""Folder of a run with the weights of the moment that it begins from."""


def check(origin: Origin) -> None:
    """Raise SettingsError where there is nothing to begin from."""
    if origin.step != "final":
        checkpoint(origin)
        if not (final(origin.path) / CONFIG).is_file():
            problem = f"{origin.path} has no final model, whose configuration is needed"
            raise SettingsError(problem, "let that run finish first")
    elif origin.optimizer == "kept" or origin.schedule == "continue":
        checkpoint(origin)


def checkpoint(origin: Origin) -> Path:
    """Return the checkpoint that a run begins from; that of a final model is the latest one."""
    root = Path(origin.path) / "checkpoints"
    kept = checkpoints.steps(root)
    if origin.step == "best":
        best = checkpoints.best(root)
        step = checkpoints.number_of(best["name"]) if best else None
    else:
        step = origin.step if isinstance(origin.step, int) else max(kept, default=None)
    if step is None or step not in kept:
        told = ", ".join(map(str, sorted(kept))) or "none"
        raise SettingsError(f"{origin.path} has no checkpoint '{origin.step}'", f"kept: {told}")
    return root / checkpoints.name_of(step)


def steps_before(origin: Origin | None) -> int:
    """Return how many steps of the schedule an earlier run has done."""
    if origin is None or origin.schedule == "restart":
        return 0
    state = checkpoints.read_state(checkpoint(origin))
    return int(state["step"]) + int(state.get("steps_before", 0))


def use_copied_weights(settings: Training) -> Training:
    """Return settings whose model is the moment that the run begins from, where it is copied."""
    origin, target = settings.model.init_from, Path(settings.output.folder) / START
    if origin is None or origin.step == "final" or not (target / CONFIG).is_file():
        return settings
    model = settings.model.model_copy(update={"path": str(target)})
    return settings.model_copy(update={"model": model})


def resolve_warm_start(settings: Training, world: World, report: WorkerReporter) -> Training:
    """Return settings whose model is the moment that the run begins from, copied to its folder.

    The first process of each machine copies, and the others wait for it.
    """
    origin, seconds = settings.model.init_from, settings.execution.timeout_seconds
    if origin is None or origin.step == "final":
        return settings
    target = Path(settings.output.folder) / START
    if world.local_rank == 0:
        if not (target / CONFIG).is_file():
            _copy(origin, target, world.rank)
    elif not report.wait_for((target / CONFIG).is_file, seconds):
        problem = f"{target} was not copied within {seconds} s"
        raise TransientError(problem, "see the log of the first process")
    return use_copied_weights(settings)


def _copy(origin: Origin, target: Path, rank: int) -> None:
    """Write the moment's model as `target`; the adapters of the earlier run are left out of it."""
    from regauge.checkpoint.export_weights import moment

    step = checkpoints.number_of(checkpoint(origin).name)
    if step is None:
        raise AssertionError(target)
    aside = target.with_name(f".{target.name}.{rank}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    written = moment(Path(origin.path), step, aside / "model")
    try:
        written.replace(target)
    except OSError:  # another machine was faster
        if not (target / CONFIG).is_file():
            raise
    shutil.rmtree(aside)
