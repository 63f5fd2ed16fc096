"""Adds reference values to a run's rows: read from its file, or computed.

The values are keyed by weights and rows. So a resumed run has the same values, also on another
number of processes or in another precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from regauge.models.multitask import set_active_task
from regauge.system import safetensors_io, stop_signals
from regauge.system.log import logger
from regauge.training.gradients import gather_by_slot
from regauge.training.heldout import HeldoutSet

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from regauge.training.context import RunContext
    from regauge.training.state import TrainState
    from regauge.training.task_runtime import TaskRuntime


REFERENCES = "references.safetensors"
"""File in the run folder with all rows' values; NaN for a row that was not needed."""
WEIGHTS_KEY = "weights_checksum"


def share_values(stored: Tensor | None, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Share process 0's values with all processes, [rows, columns] fp32.

    Missing values, and values with another shape, are NaN.
    """
    values = torch.full(shape, torch.nan)
    if stored is not None and stored.shape == shape:
        values = stored
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared = values.to(device)
        dist.broadcast(shared, src=0)
        values = shared.cpu()
    return values


def read_values(path: Path, identity: dict[str, str]) -> dict[str, Tensor]:
    """Read a file with this identity; empty if it is another, or damaged."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata() == identity:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        reason = "belongs to other weights or rows"
    except (OSError, SafetensorError) as error:
        reason = f"cannot be read: {error}"
    logger.warning("%s %s; its values are computed again", path, reason)
    return {}


@dataclass(frozen=True)
class _ReferenceTable:
    """Rows in one split that need reference values, and the split's identity."""

    name: str
    rows: HeldoutSet
    """Rows to compute; their numbers are unique and ascending."""
    fingerprint: str


def add_references(context: RunContext, state: TrainState) -> None:
    """Add the reference columns of each task to its rows; every process calls this.

    The model must have the weights of step 0, so call this before a checkpoint is loaded.
    """
    tables = [table for task in context.tasks for table in _list_tables(context, task)]
    if not tables:
        return
    with context.hooks.phase("evaluate"), context.hooks.compilation():
        path = context.folder / REFERENCES
        identity = {table.name: table.fingerprint for table in tables}
        identity[WEIGHTS_KEY] = state.weights_checksum
        stored = read_values(path, identity) if context.world.is_main_process else {}
        tensors, is_complete = {}, True
        for table in tables:
            shape = len(table.rows.loader), len(table.rows.task.reference_columns)
            values = share_values(stored.get(table.name), shape, context.device)
            numbers = table.rows.row_numbers
            missing = numbers[values[numbers].isnan().any(1).numpy()]
            if len(missing):
                is_complete = False
                if context.world.is_main_process:
                    logger.info("computing the reference values of %d rows", len(missing))
                rows = _select_rows(table.rows, missing)
                values[missing] = compute_references(rows, state.model.module)
            tensors[table.name] = values
            attach_references(table.rows, values)
        if context.world.is_main_process and not is_complete:
            safetensors_io.write_tensors(path, tensors, identity)


def compute_references(rows: HeldoutSet, module: nn.Module) -> Tensor:
    """Compute the rows' reference values, [rows, columns] fp32 on the CPU.

    Every process calls this and gets the same values. They do not depend on the number of
    processes, because a microbatch has the same rows for every number.
    """
    set_active_task(module, rows.task_name)
    module.eval()
    values, slots = [], []
    with torch.no_grad():
        batches, num_padded = rows.read_batches()
        for batch in batches:
            stop_signals.check_stop()
            values.append(rows.task.reference_values(module(batch)).float())
            slots.append({name: batch[name] for name in ("slots", "real")})
            rows.end_microbatch()
        gathered = gather_by_slot(values, slots, num_padded)["vectors"]
    return gathered[: len(rows.row_numbers)].cpu()


def attach_references(rows: HeldoutSet, values: Tensor) -> None:
    """Add reference values, [split rows, columns], to a loader's later batches."""
    names = rows.task.reference_columns
    rows.loader.add_columns(dict(zip(names, values.numpy().T, strict=True)))


def _list_tables(context: RunContext, task: TaskRuntime) -> list[_ReferenceTable]:
    """Return a task's tables: training rows, and all rows in held-out sets."""
    if not task.task.reference_columns:
        return []
    train = HeldoutSet(
        task=task.task,
        accelerator=context.accelerator,
        end_microbatch=context.end_microbatch,
        device=context.device,
        loader=task.loader,
        row_numbers=_find_needed_rows(context, task),
        task_name=task.name,
    )
    name = ".".join(filter(None, ("train", task.name)))
    tables = {name: train}
    for prefix, heldout in task.heldout.items():
        tables[prefix] = _select_rows(heldout, np.arange(len(heldout.loader)))
    fingerprint = task.manifest.fingerprint
    return [_ReferenceTable(name, rows, fingerprint) for name, rows in tables.items()]


def _find_needed_rows(context: RunContext, task: TaskRuntime) -> np.ndarray:
    """Return the training row numbers used by the run's steps, ascending."""
    num_rows, weights = len(task.loader), context.task_schedule.weights
    share = weights[context.tasks.index(task)] / sum(weights)
    num_steps = int(context.total_steps * share) + 1
    if num_steps * task.batch.rows >= num_rows:
        return np.arange(num_rows)
    numbers = np.concatenate([task.order.batch(step) for step in range(num_steps)])
    return np.unique(numbers[numbers >= 0] % num_rows)


def _select_rows(rows: HeldoutSet, row_numbers: np.ndarray) -> HeldoutSet:
    return replace(rows, row_numbers=row_numbers)
