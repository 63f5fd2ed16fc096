"""Warm start: resolves the weights, moments and schedule taken from an earlier run.

The weights are copied to the output folder before the first step. So the earlier run may continue,
or its folder may be deleted. This module imports no torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.run_folders import checkpoint_files
from regauge.system.errors import SettingsError, TransientError
from regauge.system.hub import CONFIG, final_model_dir, read_step

if TYPE_CHECKING:
    from regauge.models.settings import InitFrom
    from regauge.supervision.channel import WorkerReporter
    from regauge.system.processes import World
    from regauge.training.settings import TrainSettings

START_FOLDER = "start"
"""Folder in the run folder with the copied weights."""


def check_source(origin: InitFrom) -> None:
    """Raise SettingsError if the earlier run lacks the checkpoint or the final model."""
    if origin.step != "final":
        find_checkpoint(origin)
        if not (final_model_dir(origin.path) / CONFIG).is_file():
            problem = f"{origin.path} has no final model, whose configuration is needed"
            raise SettingsError(problem, "let that run finish first")
    elif origin.optimizer == "keep" or origin.schedule == "continue":
        find_checkpoint(origin)


def find_checkpoint(origin: InitFrom) -> Path:
    """Return the checkpoint to start from; for a final model its step's, or the latest."""
    root = Path(origin.path) / checkpoint_files.CHECKPOINTS
    steps = checkpoint_files.list_steps(root)
    if origin.step == "best":
        best = checkpoint_files.read_best(root)
        step = checkpoint_files.parse_step(best["checkpoint"]) if best else None
    else:
        final_step = _read_final_step(origin) if origin.step == "final" else None
        latest = final_step if final_step in steps else max(steps, default=None)
        step = origin.step if isinstance(origin.step, int) else latest
    if step is None or step not in steps:
        raise checkpoint_files.build_missing_error(root, origin.step, "model.init_from.step")
    return root / checkpoint_files.checkpoint_name(step)


def _read_final_step(origin: InitFrom) -> int | None:
    folder = final_model_dir(origin.path)
    return read_step(folder) if (folder / CONFIG).is_file() else None


def count_earlier_steps(origin: InitFrom | None) -> int:
    """Return the learning rate schedule steps done by earlier runs."""
    if origin is None or origin.schedule == "restart":
        return 0
    state = checkpoint_files.read_state(find_checkpoint(origin))
    return int(state["step"]) + int(state.get("schedule_offset", 0))


def use_copied_weights(settings: TrainSettings) -> TrainSettings:
    """Point `model.path` to the copied weights, if there are any."""
    origin, target = settings.model.init_from, Path(settings.output.folder) / START_FOLDER
    if origin is None or origin.step == "final" or not (target / CONFIG).is_file():
        return settings
    model = settings.model.model_copy(update={"path": str(target)})
    return settings.model_copy(update={"model": model})


def resolve_warm_start(
    settings: TrainSettings, world: World, reporter: WorkerReporter
) -> TrainSettings:
    """Copy a checkpoint's weights to the output folder; return settings with that path.

    Each machine's first process copies; the others wait for it. Raises TransientError after
    `execution.timeout_seconds`.
    """
    origin, seconds = settings.model.init_from, settings.execution.timeout_seconds
    if origin is None or origin.step == "final":
        return settings
    target = Path(settings.output.folder) / START_FOLDER
    if world.local_rank == 0:
        if not (target / CONFIG).is_file():
            _copy(origin, target, world.rank)
    elif not reporter.wait_for((target / CONFIG).is_file, seconds):
        problem = f"{target} was not copied within {seconds} s"
        raise TransientError(problem, "see the log of the first process")
    return use_copied_weights(settings)


def _copy(origin: InitFrom, target: Path, rank: int) -> None:
    """Export the checkpoint's model to `target`, without adapter files."""
    from regauge.training.checkpoint.export_weights import export_checkpoint

    step = checkpoint_files.parse_step(find_checkpoint(origin).name)
    if step is None:
        raise AssertionError(target)
    staging = target.with_name(f".{target.name}.{rank}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    model_folder = export_checkpoint(Path(origin.path), step, staging / "model")
    try:
        model_folder.replace(target)
    except OSError:  # another machine was faster
        if not (target / CONFIG).is_file():
            raise
    shutil.rmtree(staging)
