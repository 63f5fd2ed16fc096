"""A run file's training run, as the planner needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, SerializeAsAny

from regauge import config
from regauge.accelerators import Accelerator
from regauge.config import Settings, choice_of
from regauge.data.settings import DataSettings
from regauge.models.settings import Model
from regauge.planner.run_plans.planned_model import read_model
from regauge.planner.run_plans.prepared_data import RowLengths, read_rows
from regauge.planner.training_job import TrainingJob
from regauge.system.errors import SettingsError
from regauge.tasks import Task
from regauge.training.settings import Batch, Execution, Optimizer, Stop
from regauge.training.strategies import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.planner.training_job import PrecisionPlan

OPTIMIZERS = {"sgd": "sgd", "adafactor": "8bit"}


class PlannedRun(Settings):
    """Run file tables that decide memory and time."""

    task: Annotated[SerializeAsAny[Task], choice_of("tasks")]
    """The task, which knows the rows it reads and the model head."""
    model: Model
    """The model."""
    batch: Batch
    """The global batch and the microbatch."""
    data: DataSettings | None = None
    """The prepared dataset."""
    seed: int = 0
    """Seed for the row order."""
    accelerator: Annotated[SerializeAsAny[Accelerator], choice_of("accelerators")] | None = None
    """The device, which may need batches of declared shapes."""
    execution: Execution = Execution()
    """Precision, recomputation, machines and price."""
    stop: Stop = Stop(steps=1)
    """Run length, and target."""
    optimizer: Optimizer = Optimizer()
    """The optimizer, whose moments need memory."""
    strategy: Annotated[SerializeAsAny[Strategy], choice_of("strategies")] = Field(
        default_factory=lambda: config.parse_choice("strategies", "ddp")
    )
    """The strategy, which knows what it stores and sends."""


class OtherTask(NamedTuple):
    """Any task after the first one in a run with several tasks."""

    name: str
    share: float
    """Share of the steps."""
    request: TrainingRequest


@dataclass(frozen=True)
class TrainingRequest:
    """A training run: one device's job, the global batch and the run length."""

    job: TrainingJob
    """The job; its micro-batch and accumulation depend on the device count."""
    batch_sequences: int
    """Sequences per global batch: rows x sequences per row."""
    sequences_per_row: int
    micro_batch: int | None
    """Sequences per microbatch; None if the planner may choose."""
    steps: int | None
    """Updates in the run; None if unknown."""
    lengths: RowLengths
    run: PlannedRun
    notes: tuple[str, ...]
    """Assumptions that users should know."""
    name: str = ""
    """Task name, if the run has several."""
    others: tuple[OtherTask, ...] = ()
    """The other tasks, whose steps alternate with this one's."""

    @property
    def smallest_task(self) -> TrainingRequest:
        """The task with the fewest sequences in a global batch."""
        others = (other.request for other in self.others)
        return min((self, *others), key=lambda task: task.batch_sequences)

    def place(self, devices: int, micro_batch: int | None = None) -> TrainingJob | None:
        """Return the job on a device count; None if the batch has too few rows for it.

        Micro-batches are equal: one that is larger than a device's share becomes the largest
        divisor of the batch within it. The last pass may leave devices idle.
        """
        if self.smallest_task.batch_sequences < devices:
            return None
        share = self.batch_sequences // devices
        limit = min(micro_batch or self.micro_batch or share, share) // self.sequences_per_row
        batch_rows = self.batch_sequences // self.sequences_per_row
        size = find_divisor(batch_rows, max(limit, 1)) * self.sequences_per_row
        passes = -(-self.batch_sequences // (devices * size))
        return replace(
            self.job, micro_batch=size, accumulation=passes, batch_rows=self.batch_sequences
        )


@lru_cache(maxsize=4096)
def find_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of a number within a limit."""
    return next(size for size in range(limit, 0, -1) if number % size == 0)


def read_request(tables: Mapping[str, Any], run_file: Path) -> TrainingRequest:
    """Return the training run described by tables.

    Raises SettingsError for an invalid table, and for a model that the planner cannot count.
    """
    entries = _list_tasks(tables.get("task"))
    weights = [float(entry.get("weight", 1)) for entry in entries]
    shares = [weight / sum(weights) for weight in weights]
    names = ["" if len(entries) == 1 else str(entry.get("name", "")) for entry in entries]
    first, *others = [
        replace(_read_task(_select_task(tables, entry), run_file, share), name=name)
        for entry, share, name in zip(entries, shares, names, strict=True)
    ]
    if not others:
        return first
    notes = dict.fromkeys(note for request in (first, *others) for note in request.notes)
    mixed = zip(shares[1:], others, strict=True)
    return replace(
        first,
        notes=tuple(notes),
        others=tuple(OtherTask(other.name, share, other) for share, other in mixed),
    )


def _list_tasks(value: Any) -> list[Mapping[str, Any]]:
    """Return the task tables; raises SettingsError without one."""
    values = value if isinstance(value, list | tuple) else (value,)
    entries = [{"kind": item} if isinstance(item, str) else item for item in values]
    if not entries or not all(isinstance(item, dict) and "kind" in item for item in entries):
        raise SettingsError("the run file has no task", 'add [task] with a kind, such as "mlm"')
    return entries


def _select_task(tables: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    others = ("name", "weight", "data", "batch")
    selected = {**tables, "task": {key: entry[key] for key in entry if key not in others}}
    for name in ("data", "batch"):
        if merged := {**(tables.get(name) or {}), **(entry.get(name) or {})}:
            selected[name] = merged
    return selected


def _read_task(tables: Mapping[str, Any], run_file: Path, share: float) -> TrainingRequest:
    """Return the run with one task, which has a share of the steps."""
    run = _build_run(tables, run_file)
    if not run.task.text_columns():
        problem = f"the planner counts transformers, and a task '{run.task.kind}' without texts"
        raise SettingsError(f"{problem} has none", "measure it with: regauge benchmark --training")
    manifest, lengths, notes = read_rows(run, tables)
    is_prepared = lengths.rows is not None
    vocabulary = manifest.tokenizer.vocab_size if is_prepared else _read_vocabulary(tables)
    model = read_model(run, manifest, vocabulary)
    sequences = lengths.sequences_per_row
    micro_rows = run.batch.microbatch_rows
    return TrainingRequest(
        job=TrainingJob(
            shape=model.shape,
            length=max(round(lengths.length), 1),
            micro_batch=1,
            strategy=run.strategy,
            recomputation=run.execution.activation_checkpointing,
            precision=_read_precision(run.execution.precision),
            head=model.head,
            has_fused_attention=run.model.attention != "eager",
            has_fused_norms=run.execution.compile != "off",
            dropout=bool(run.model.dropout),
            logits="streamed",
            optimizer=OPTIMIZERS.get(run.optimizer.kind, "adamw"),  # type: ignore[arg-type]
            trained_fraction=model.trained_fraction,
            useful_fraction=lengths.real_fraction,
            weights=model.weights,
        ),
        batch_sequences=run.batch.rows * sequences,
        sequences_per_row=sequences,
        micro_batch=None if micro_rows == "auto" else micro_rows * sequences,
        steps=_count_steps(run, lengths, share) if "stop" in tables else None,
        lengths=lengths,
        run=run,
        notes=notes,
    )


def _build_run(tables: Mapping[str, Any], run_file: Path) -> PlannedRun:
    for name in ("model", "batch"):
        if name not in tables:
            problem = f"{run_file} has no table [{name}], and the plan of a training run needs it"
            raise SettingsError(problem, f"add [{name}]; see 'regauge explain {name}'")
    known = {name: tables[name] for name in PlannedRun.model_fields if name in tables}
    return config.build(PlannedRun, known, (), str(run_file))


def _read_precision(precision: str) -> PrecisionPlan:
    plans: dict[str, PrecisionPlan] = {"fp32": "fp32", "tf32": "tf32", "fp8": "fp8"}
    return plans.get(precision, "autocast")


def _read_vocabulary(tables: Mapping[str, Any]) -> int | None:
    table = tables.get("tokenizer")
    size = table.get("vocab_size") if isinstance(table, dict) else None
    return size if isinstance(size, int) else None


def _count_steps(run: PlannedRun, lengths: RowLengths, share: float) -> int | None:
    """Return the run's updates; None for epochs over unprepared data.

    An epoch counts the first task, which has a share of the steps.
    """
    if run.stop.steps is not None:
        return run.stop.steps
    if lengths.rows is None:
        return None
    batches = -(-lengths.rows // run.batch.rows)
    return run.stop.total_steps(math.ceil(round(batches / share, 6)))
