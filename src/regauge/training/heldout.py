"""Evaluates a module on held-out rows, in the training loop and for `evaluate`."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regauge.models.multitask import set_active_task
from regauge.system import choices, stop_signals
from regauge.system.errors import DataError
from regauge.tasks import GATHERED_COLUMNS, ITEMS
from regauge.training.gradients import all_reduce_sum, gather_by_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from torch import nn

    from regauge.accelerators import Accelerator, Batch
    from regauge.data.loader import BatchLoader
    from regauge.tasks import ClassReport, MetricSums, Task


GATHERED = ("slots", "real", *GATHERED_COLUMNS)
"""Batch arrays needed by metrics over all rows."""


class CustomMetric(NamedTuple):
    """A function that maps the arrays of all held-out rows to a number, or to numbers by name."""

    path: str
    """As in the run file, `file.py:function`."""
    compute: Callable[[dict[str, np.ndarray]], Any]


@dataclass(frozen=True)
class HeldoutSet:
    """A dataset's held-out rows, and everything needed to evaluate a module on them."""

    task: Task
    accelerator: Accelerator
    end_microbatch: Callable[[], None]
    device: torch.device
    loader: BatchLoader
    row_numbers: np.ndarray
    """Sampled rows of the split, in output order."""
    task_name: str = ""
    """Empty if the run has one task."""
    dataset_name: str = ""
    """Name of a dataset that is mixed in; empty for the task's main dataset."""
    custom_metrics: tuple[CustomMetric, ...] = ()

    def evaluate(self, module: nn.Module) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return a module's metrics and outputs; every process gets the same values.

        Outputs, in row order, are returned only for tasks with `metrics_need_all_rows` or custom
        metrics. If the loss or an output is not finite, all metrics are NaN and no outputs are
        returned, because comparing or sorting NaN may give any value, even the best one. Raises
        DataError if a custom metric fails.
        """
        set_active_task(module, self.task_name)
        module.eval()
        with torch.no_grad():
            metrics, outputs = self._evaluate(module)
        is_finite = math.isfinite(next(iter(metrics.values())))
        if outputs:
            is_finite &= bool(select_real(outputs)["vectors"].isfinite().all())
        if self.custom_metrics:
            tensors = self.task.metric_arrays(select_real(outputs))
            metrics = compute_custom_metrics(self.custom_metrics, tensors, metrics)
        if is_finite:
            return metrics, outputs
        return {name: metrics[name] if name == ITEMS else math.nan for name in metrics}, {}

    def _evaluate(self, module: nn.Module) -> tuple[dict[str, float], Batch]:
        """Return the metrics over all processes, and the outputs in slot order if needed.

        Sums are exact and count each row once; means are taken at the end.
        """
        task = self.task
        gathers = bool(self.custom_metrics) or task.metrics_need_all_rows
        tables: list[Tensor] = []
        vectors: list[Tensor] = []
        slots: list[Batch] = []
        names: list[str] = []
        outputs: Batch = {}
        batches, num_rows = self.read_batches()
        for batch in batches:
            stop_signals.check_stop()
            output = module(batch)
            if gathers:
                vectors.append(task.eval_outputs(output, batch))
                slots.append({name: batch[name] for name in GATHERED if name in batch})
            if not task.metrics_need_all_rows:
                names, table = _build_table(task.metric_sums(output, batch))
                tables.append(table)
            self.end_microbatch()
        if gathers:
            outputs = gather_by_slot(vectors, slots, num_rows * task.slots_per_row())
        if task.metrics_need_all_rows:
            names, table = _build_table(task.metric_sums(outputs, outputs))
            self.end_microbatch()
            return task.derive_metrics(_divide(names, table.cpu())), outputs
        total = torch.stack([table.cpu() for table in tables]).double().sum(0).float()
        means = _divide(names, all_reduce_sum(total.to(tables[0].device)).cpu())
        return task.derive_metrics(means), outputs

    def read_batches(self) -> tuple[Iterator[Batch], int]:
        """Return this process's batches on the device, and the row count with padding."""
        arrays, rows = self.loader.load_evaluation_batches(self.row_numbers)
        host = (
            [{name: torch.from_numpy(value) for name, value in batch.items()}] for batch in arrays
        )
        return (batch for (batch,) in self.accelerator.wrap_loader(host, self.device)), rows

    def class_report(self, outputs: dict[str, torch.Tensor]) -> ClassReport | None:
        if not outputs or not self.task.has_classes:
            return None
        return self.task.class_report(select_real(outputs))


def select_real(outputs: Batch) -> Batch:
    """Return an evaluation's outputs on the CPU, without padding rows."""
    is_real = outputs["real"].cpu() > 0
    return {"vectors": outputs["vectors"].cpu()[is_real]}


def compute_means(sums: MetricSums) -> dict[str, float]:
    """Return each metric's mean, and the number of items; the device is read once."""
    names, table = _build_table(sums)
    return _divide(names, table.cpu())


def _build_table(sums: MetricSums) -> tuple[list[str], Tensor]:
    """Return metric names, and a table [metrics, 2] of their sums and weights.

    Some metrics are computed on the CPU; the table is on the first one's device.
    """
    rows = [torch.stack([total.float(), weight.float()]) for total, weight in sums.values()]
    return list(sums), torch.stack([row.to(rows[0].device) for row in rows])


def _divide(names: list[str], table: Tensor) -> dict[str, float]:
    """Divide each sum by its weight; `items` defaults to the first weight."""
    rows = table.tolist()
    pairs = zip(names, rows, strict=True)
    means = {name: total / max(weight, 1e-9) for name, (total, weight) in pairs}
    return means if ITEMS in means else means | {ITEMS: rows[0][1]}


def load_custom_metrics(paths: tuple[str, ...]) -> tuple[CustomMetric, ...]:
    """Import the functions in `evaluation.metrics`.

    Raises SettingsError if a function is missing, or if this command's run file does not name it.
    """
    return tuple(CustomMetric(path, choices.load_function(path)) for path in paths)


def compute_custom_metrics(
    custom_metrics: tuple[CustomMetric, ...],
    arrays: Mapping[str, Tensor],
    metrics: Mapping[str, float],
) -> dict[str, float]:
    """Add custom metrics to the metrics.

    Each function gets a dictionary with its own copy of `arrays` as NumPy arrays. Raises DataError
    if a function fails, or if it returns anything but numbers under new names.
    """
    merged = dict(metrics)
    for metric in custom_metrics:
        values = _compute(metric, {name: value.numpy().copy() for name, value in arrays.items()})
        for name, value in values.items():
            if name in merged:
                raise DataError(
                    f"'{metric.path}' returned '{name}', which is already a metric",
                    "return it under another name",
                )
            merged[name] = value
    return merged


def _compute(metric: CustomMetric, arrays: dict[str, np.ndarray]) -> dict[str, float]:
    try:
        result = metric.compute(arrays)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {error}"
        raise DataError(f"'{metric.path}' failed: {reason}", "correct that function") from error
    name = metric.path.rpartition(":")[2]
    values = dict(result) if isinstance(result, Mapping) else {name: result}
    try:
        return {str(key): float(value) for key, value in values.items()}
    except (TypeError, ValueError):
        kinds = ", ".join(sorted({type(value).__name__ for value in values.values()}))
        problem = f"'{metric.path}' returned {kinds}"
        raise DataError(problem, "return a number, or a dictionary of numbers by name") from None
