"""The training run that a run file describes, as the planner needs it.

The tables are read without the classes of tasks and strategies, which import numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge import config
from regauge.config import Settings
from regauge.data.buckets import BatchForm
from regauge.data.settings import DataSettings
from regauge.models.default_sizes import DEFAULT_SIZES
from regauge.models.settings import Model
from regauge.planner.model_shape import shape_from_config
from regauge.planner.run_plans.prepared_data import DEFAULT_BUCKETS, RowLengths, read_lengths
from regauge.planner.run_plans.ranking_network import add_ranking_network, read_ranking_network
from regauge.planner.run_plans.task_texts import READERS, read_task_texts
from regauge.planner.training_job import TrainingJob
from regauge.system import choices
from regauge.system.errors import DataError, SettingsError
from regauge.system.hub import CONFIG, resolve_model
from regauge.system.json_files import read_json
from regauge.training.settings import Batch, Execution, Optimizer, Stop

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.planner.model_shape import Head, ModelShape
    from regauge.planner.run_plans.task_texts import TaskTexts
    from regauge.planner.training_job import PrecisionPlan, Strategy

HEADS: dict[str, Head] = {"mlm": "masked-lm", "clm": "lm", "sft": "lm", "dpo": "lm"}
"""Output layer of a task; others compute vectors or classes."""
OPTIMIZERS = {"sgd": "sgd", "adafactor": "8bit"}
"""Optimizers with fewer moments than AdamW."""
DEFAULT_LENGTH = 512
DEFAULT_GROUP_SIZE = 16
"""Candidates of a row that is not prepared, as `rows.max_group_size`."""


class PlannedRun(Settings):
    """The tables of a run file that decide memory and time."""

    model: Model
    """The model."""
    batch: Batch
    """The global batch and the microbatch."""
    data: DataSettings | None = None
    """The prepared dataset."""
    execution: Execution = Execution()
    """Precision, recomputation, machines and price."""
    stop: Stop = Stop(steps=1)
    """Length of the run, and its target."""
    optimizer: Optimizer = Optimizer()
    """The optimizer, whose moments need memory."""


class OtherTask(NamedTuple):
    """Another task than the first one of a run with several tasks."""

    name: str
    share: float
    """Share of the steps."""
    request: TrainingRequest


@dataclass(frozen=True)
class TrainingRequest:
    """A training run: the job of one device, the global batch and the length of the run."""

    job: TrainingJob
    """The job; its micro-batch and accumulation depend on the number of devices."""
    batch_sequences: int
    """Sequences of a global batch: rows x sequences of a row."""
    sequences_per_row: int
    micro_batch: int | None
    """Sequences of a microbatch; None if the planner may choose."""
    steps: int | None
    """Updates of the run; None if it is unknown."""
    lengths: RowLengths
    run: PlannedRun
    notes: tuple[str, ...]
    """Assumptions that a user should know."""
    name: str = ""
    """Name of the task, if the run has several."""
    others: tuple[OtherTask, ...] = ()
    """The other tasks, whose steps alternate with those of this one."""

    @property
    def smallest_task(self) -> TrainingRequest:
        """The task with the fewest sequences in a global batch."""
        others = (other.request for other in self.others)
        return min((self, *others), key=lambda task: task.batch_sequences)

    def place(self, devices: int, micro_batch: int | None = None) -> TrainingJob | None:
        """Return the job on a number of devices; None if the batch has too few rows for them.

        A micro-batch that is larger than the share of a device is reduced to it.
        """
        if self.smallest_task.batch_sequences < devices:
            return None
        share = self.batch_sequences // devices
        size = min(micro_batch or self.micro_batch or share, share)
        passes = max(round(self.batch_sequences / (devices * size)), 1)
        return replace(self.job, micro_batch=size, accumulation=passes)


def read_request(tables: Mapping[str, Any], run_file: Path) -> TrainingRequest:
    """Return the training run that tables describe.

    Raises SettingsError for an invalid table, and for a model that the planner cannot count.
    """
    entries = _list_tasks(tables.get("task"))
    weights = [float(entry.get("weight", 1)) for entry in entries]
    shares = [weight / sum(weights) for weight in weights]
    first, *others = [
        _read_task(_select_task(tables, entry, is_only=len(entries) == 1), run_file, share)
        for entry, share in zip(entries, shares, strict=True)
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
    """Return the tables of the tasks; raises SettingsError without one."""
    values = value if isinstance(value, list | tuple) else (value,)
    entries = [{"kind": item} if isinstance(item, str) else item for item in values]
    if not entries or not all(isinstance(item, dict) and "kind" in item for item in entries):
        raise SettingsError("the run file has no task", 'add [task] with a kind, such as "mlm"')
    return entries


def _select_task(
    tables: Mapping[str, Any], entry: Mapping[str, Any], *, is_only: bool
) -> dict[str, Any]:
    """Return the tables of a run with one of its tasks alone."""
    tasks = {name: value for name, value in entry.items() if name not in ("data", "batch")}
    if is_only:
        tasks.pop("name", None)
    selected = {**tables, "task": tasks}
    for name in ("data", "batch"):
        if merged := {**(tables.get(name) or {}), **(entry.get(name) or {})}:
            selected[name] = merged
    return selected


def _read_task(tables: Mapping[str, Any], run_file: Path, share: float) -> TrainingRequest:
    """Return the run of one task, which has a share of the steps."""
    task_table = tables["task"]
    notes = _check_task(task_table)
    run = _build_run(tables, run_file)
    task = str(task_table.get("kind", ""))
    max_buckets = int(task_table.get("max_buckets", DEFAULT_BUCKETS))
    texts = read_task_texts(task_table)
    lengths, length_notes = _read_lengths(tables, run, texts, max_buckets)
    shape = read_shape(run.model, lengths.vocab_size or _read_vocabulary(tables))
    shape = _add_task_layers(shape, run.model, task_table)
    sequences = lengths.sequences_per_row
    micro_rows = run.batch.microbatch_rows
    strategy, strategy_notes = _read_strategy(tables.get("strategy"))
    head = HEADS.get(task, "none")
    return TrainingRequest(
        job=TrainingJob(
            shape=shape,
            length=max(round(lengths.length), 1),
            micro_batch=1,
            strategy=strategy,
            recomputation=run.execution.activation_checkpointing,
            precision=_read_precision(run.execution.precision),
            head=head,
            has_fused_attention=run.model.attention != "eager",
            has_fused_norms=run.execution.compile != "off",
            dropout=bool(run.model.dropout),
            logits="fused",
            optimizer=OPTIMIZERS.get(run.optimizer.kind, "adamw"),  # type: ignore[arg-type]
            trained_fraction=count_trained_fraction(run.model, shape, head),
            useful_fraction=lengths.real_fraction,
        ),
        batch_sequences=run.batch.rows * sequences,
        sequences_per_row=sequences,
        micro_batch=None if micro_rows == "auto" else micro_rows * sequences,
        steps=_count_steps(run, lengths, share) if "stop" in tables else None,
        lengths=lengths,
        run=run,
        notes=(*notes, *length_notes, *strategy_notes),
        name=str(task_table.get("name", "")),
    )


def _build_run(tables: Mapping[str, Any], run_file: Path) -> PlannedRun:
    for name in ("model", "batch"):
        if name not in tables:
            problem = f"{run_file} has no table [{name}], and the plan of a training run needs it"
            raise SettingsError(problem, f"add [{name}]; see 'regauge explain {name}'")
    known = {name: tables[name] for name in PlannedRun.model_fields if name in tables}
    return config.build(PlannedRun, known, (), str(run_file))


def _check_task(table: Mapping[str, Any]) -> list[str]:
    """Return notes about a task; raises SettingsError for one that the planner cannot express."""
    kind = str(table["kind"])
    choices.check_name("tasks", kind)
    if kind == "rank" and not table.get("query", True):
        problem = "the planner counts transformers, and a task 'rank' without texts has none"
        raise SettingsError(problem, "measure it with: regauge benchmark --training")
    if kind in READERS:
        return []
    return [f"each row of task '{kind}' is planned as one text of full length"]


def _read_strategy(value: Any) -> tuple[Strategy, list[str]]:
    table = {"kind": value} if isinstance(value, str) else value or {"kind": "ddp"}
    kind = str(table.get("kind", "ddp"))
    names: dict[str, Strategy] = {
        "single": "single",
        "ddp": "ddp",
        "zero1": "zero1",
        "fsdp": "zero2" if table.get("sharding") == "shard-grad-op" else "fsdp",
        "hsdp": "hsdp",
    }
    choices.check_name("strategies", kind)
    if kind in names:
        return names[kind], []
    return "ddp", [f"strategy '{kind}' is planned as ddp"]


def _read_precision(precision: str) -> PrecisionPlan:
    plans: dict[str, PrecisionPlan] = {"fp32": "fp32", "tf32": "tf32", "fp8": "fp8"}
    return plans.get(precision, "autocast")


def _read_lengths(
    tables: Mapping[str, Any], run: PlannedRun, texts: TaskTexts, max_buckets: int
) -> tuple[RowLengths, list[str]]:
    """Return the lengths of the prepared rows, or else the limits of the settings with a note."""
    path = run.data.path if run.data else None
    rows, microbatch_rows = run.batch.rows, run.batch.microbatch_rows
    form = BatchForm(
        rows,
        rows if microbatch_rows == "auto" else microbatch_rows,
        has_any_shape=run.execution.compile == "off",
    )
    if path and (lengths := read_lengths(Path(path).expanduser(), texts, form, max_buckets)):
        return lengths, []
    declared_rows = tables.get("rows")
    table = declared_rows if isinstance(declared_rows, dict) else {}
    fields = table.get("fields") or {}
    limits = [size for name, size in fields.items() if name in texts.all_fields]
    limits = [size for size in limits if isinstance(size, int)]
    limit = sum(limits) if texts.padding == "joined" else max(limits, default=0)
    declared = table.get("length") or limit
    longest = int(declared or run.model.config.get("max_position_embeddings") or DEFAULT_LENGTH)
    key = "rows.length" if table.get("length") else "rows.fields" if limits else "model.config"
    source = f"{key}, since {path or 'data.path'} is not prepared"
    sequences = texts.count_sequences(int(table.get("max_group_size") or DEFAULT_GROUP_SIZE))
    lengths = RowLengths(longest, longest, 1.0, (longest,), source, sequences_per_row=sequences)
    text = f"every sequence is planned with {longest} tokens ({source}); real texts may be shorter"
    return lengths, [text]


def _read_vocabulary(tables: Mapping[str, Any]) -> int | None:
    table = tables.get("tokenizer")
    size = table.get("vocab_size") if isinstance(table, dict) else None
    return size if isinstance(size, int) else None


def read_shape(model: Model, vocab_size: int | None) -> ModelShape:
    """Return the shape of the model of a run file.

    Sizes that the run file leaves out have the defaults of transformers. Raises SettingsError for
    an architecture that the planner does not know, and if the vocabulary is unknown.
    """
    if model.path is not None:
        folder = resolve_model(model.path, fetch=False)
        values = read_json(folder / CONFIG, "copy the folder again")
    else:
        architecture = model.architecture or ""
        sizes = DEFAULT_SIZES.get(architecture, {})
        vocabulary = {} if vocab_size is None else {"vocab_size": vocab_size}
        values = {"model_type": architecture, **sizes, **vocabulary, **model.config}
        if "vocab_size" not in vocabulary | model.config:
            problem = "the vocabulary of the model is unknown until the data is prepared"
            raise SettingsError(problem, "set model.config.vocab_size")
    try:
        return shape_from_config(values)
    except DataError as error:
        raise SettingsError(error.problem, error.remedy) from None


def _add_task_layers(shape: ModelShape, model: Model, task: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model with the layers of its task besides an output layer.

    Only classes and the next sentence are predicted from a pooler: other new models have none.
    """
    if task.get("next_sentence"):
        classes = 2 * (shape.hidden + 1)
        return replace(shape, other_parameters=shape.pooler_parameters + classes)
    if model.path is None and task["kind"] != "classify":
        shape = replace(shape, pooler_parameters=0)
    network = read_ranking_network(task)
    return add_ranking_network(shape, network) if network else shape


def count_trained_fraction(model: Model, shape: ModelShape, head: Head) -> float:
    """Return the share of the parameters that are trained: 1, or those of LoRA adapters.

    An adapter of a layer with m inputs and n outputs has rank x (m + n) parameters. Frozen blocks
    (`model.trainable_layers`) are not trained.
    """
    total = shape.parameters(head)
    if model.lora is not None:
        attention, feed_forward = shape.attention, shape.hidden + shape.ffn
        sums = 2 * (shape.hidden + attention.width) + 2 * (shape.hidden + attention.kv_width)
        sums += (3 if shape.is_gated else 2) * feed_forward
        return min(model.lora.rank * sums * shape.layers / total, 1.0)
    if model.trainable_layers == "all":
        return 1.0
    blocks = 0 if model.trainable_layers == "none" else model.trainable_layers
    return min(blocks * shape.layer_parameters / total + 1e-6, 1.0)


def _count_steps(run: PlannedRun, lengths: RowLengths, share: float) -> int | None:
    """Return the updates of the run; None for epochs over data that is not prepared.

    An epoch is one of the first task, which has a share of the steps.
    """
    if run.stop.steps is not None:
        return run.stop.steps
    if lengths.rows is None:
        return None
    batches = -(-lengths.rows // run.batch.rows)
    return run.stop.total_steps(math.ceil(round(batches / share, 6)))
