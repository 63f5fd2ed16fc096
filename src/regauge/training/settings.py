"""The run file tables read by `train`; this module imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from regauge.accelerators import Accelerator
from regauge.config import KindTable, Settings, build, choice_of, dump, parse_choice
from regauge.config.validation import require_pattern
from regauge.data.settings import DataSettings, MixEntry
from regauge.machines.catalog import find_price
from regauge.machines.settings import Price
from regauge.models.settings import DEFAULT_NEW_TOKENS, Generation, Model
from regauge.monitoring.settings import Monitoring
from regauge.monitoring.trackers import Tracker
from regauge.run_folders.checkpoint_files import CHECKPOINTS
from regauge.supervision.settings import Nodes, Supervision
from regauge.system.errors import SettingsError
from regauge.system.wording import join_alternatives
from regauge.tasks import Task
from regauge.training.checkpoint.settings import Checkpoint
from regauge.training.strategies import Strategy

if TYPE_CHECKING:
    from collections.abc import Mapping

FunctionPath = Annotated[
    str,
    require_pattern(
        r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "'file.py:function'; name a file and a function in it"
    ),
]
T = TypeVar("T")
Fraction = Annotated[float, Field(ge=0, lt=1)]
Auto = Literal["auto"]
AUTO: Auto = "auto"
MAX_BATCH_ROWS = 2**24
"""Largest batch in rows."""


class Schedule(KindTable):
    """The learning rate schedule: a linear warm-up, then a decay."""

    kind: Literal["constant", "linear", "cosine", "polynomial", "wsd"] = "linear"
    """Shape of the decay after the warm-up; wsd (warm-up, stable, decay) decays only at the end."""
    warmup_steps: Annotated[int, Field(ge=0)] | Auto = AUTO
    """Linear warm-up steps from 0 to the peak; `auto` is 0 for random weights, and 10 % of all
    steps for pretrained weights."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the last step, as a fraction of the peak."""
    power: float = Field(default=2.0, gt=0)
    """Polynomial decay exponent."""
    decay_fraction: float = Field(default=0.1, gt=0, le=1)
    """Fraction of all steps, at the end of the run, in which wsd decays linearly."""

    @property
    def num_warmup_steps(self) -> int:
        """Warm-up steps; raises SettingsError if they are not resolved yet."""
        return _check_resolved(self.warmup_steps, "optimizer.schedule.warmup_steps")


class GuardSettings(Settings):
    """Actions after bad steps: non-finite gradients, and loss or gradient norm spikes."""

    not_finite: Literal["skip", "rollback", "stop"] = "skip"
    """Action after a step with non-finite gradients; such a step never changes a weight."""
    spike: Literal["warn", "skip", "rollback", "stop"] = "warn"
    """Action after a step whose loss or gradient norm is a spike."""
    sigmas: float = Field(default=8.0, gt=0)
    """A value this many standard deviations above the running mean is a spike."""
    max_consecutive_skips: int = Field(default=3, ge=1)
    """Consecutive skipped steps after which the run rolls back to its last checkpoint, once."""
    check_replicas_every_steps: int = Field(default=500, ge=1)
    """Steps between comparisons of replicated weights; each checkpoint compares them, too."""


class Optimizer(KindTable):
    """The optimizer and its hyperparameters."""

    kind: Literal["adamw", "lamb", "sgd", "adafactor"] = "adamw"
    """torch optimizer, or LAMB (You et al., 2020) for large batches."""
    learning_rate: Annotated[float, Field(gt=0)] | Auto = AUTO
    """Peak learning rate; `auto` is 5e-4 for random weights and for a head on a frozen encoder,
    2e-5 for pretrained weights, and 2e-4 for LoRA adapters."""
    betas: tuple[Fraction, Fraction] | Auto = AUTO
    """Moment decay rates (adamw, lamb); the first is sgd's momentum. `auto` is 0.9 and 0.98 for
    random weights, else 0.9 and 0.999."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the root of the second moment (adamw, lamb)."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay for matrices, not for vectors (biases, norms)."""
    lr_multipliers: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Weight name prefix -> learning rate multiplier, such as `{"model." = 0.1}`."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Norm to which the global gradient is clipped."""
    schedule: Schedule = Schedule()
    """The learning rate schedule."""
    guard: GuardSettings = GuardSettings()
    """Actions after bad steps."""

    @property
    def peak_learning_rate(self) -> float:
        """Peak learning rate; raises SettingsError if it is not resolved yet."""
        return _check_resolved(self.learning_rate, "optimizer.learning_rate")

    @property
    def moment_decay_rates(self) -> tuple[float, float]:
        """Moment decay rates; raises SettingsError if they are not resolved yet."""
        return _check_resolved(self.betas, "optimizer.betas")


def _check_resolved(value: T | Auto, key: str) -> T:
    """Return a resolved value; raises SettingsError for "auto"."""
    if value == AUTO:
        raise SettingsError(f"{key} is not resolved", "set it in the run file")
    return value


class TaskData(Settings):
    """Dataset for one of several tasks."""

    path: str
    """Dataset folder; all tasks need the same tokenizer."""
    mix: tuple[MixEntry, ...] = ()
    """Datasets to mix in."""


class TaskBatch(Settings):
    """Global batch for one of several tasks; by default the run's."""

    rows: int | None = Field(default=None, ge=1)
    """Global batch size in rows."""
    microbatch_rows: int | None = Field(default=None, ge=1, le=MAX_BATCH_ROWS)
    """Rows that a process computes at a time."""


class TaskEntry(Settings):
    """One of several tasks: a `[[task]]` table with the task's keys and these."""

    name: Annotated[
        str, require_pattern(r"[a-z][a-z0-9_-]*", "a name; use a to z, 0 to 9, '-' and '_'")
    ]
    """Task name in metrics and folders."""
    weight: int = Field(default=1, ge=1, le=1000)
    """Steps of this task for each step of a task with weight 1."""
    data: TaskData | None = None
    """Dataset, if it differs from the run's."""
    batch: TaskBatch = TaskBatch()
    """Batch, if it differs from the run's."""
    task: Annotated[SerializeAsAny[Task], choice_of("tasks")]
    """The task; its keys are keys in the `[[task]]` table itself."""

    @model_serializer(mode="wrap")
    def _merge_tables(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        entry = handler(self)
        return {**entry.pop("task"), **entry}


def _read_tasks(value: Any) -> Any:
    if not isinstance(value, tuple | list):
        return parse_choice("tasks", value)
    return tuple(_read_entry(table, number) for number, table in enumerate(value, start=1))


def _read_entry(value: Any, number: int) -> Any:
    """Split a `[[task]]` table into `TaskEntry` keys and task keys."""
    if not isinstance(value, dict):
        return value
    entry = {key: item for key, item in value.items() if key in TaskEntry.model_fields}
    task = {key: item for key, item in value.items() if key not in entry}
    return build(TaskEntry, {"task": task, **entry}, source=f"task {value.get('name', number)}")


OneTask = Annotated[SerializeAsAny[Task], choice_of("tasks")]
Tasks = Annotated[OneTask | tuple[TaskEntry, ...], BeforeValidator(_read_tasks)]
"""One task, or several tasks with alternating steps."""


class Samples(Generation):
    """Generation from held-out prompts at each evaluation, written to `samples.jsonl`."""

    prompts: int = Field(default=0, ge=0)
    """Held-out prompts; each generated token costs a whole microbatch's forward pass."""
    max_new_tokens: int = Field(default=DEFAULT_NEW_TOKENS, ge=1)
    """Maximum answer length in tokens."""
    prompt_tokens: int = Field(default=16, ge=1)
    """How many document tokens form the prompt; a conversation already has one."""


class Evaluation(Settings):
    """Evaluation on held-out rows, during and after training."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    rows: int | None = Field(default=None, ge=1)
    """Held-out rows to evaluate, a fixed random sample of the split; all by default."""
    microbatch_rows: int | None = Field(default=None, ge=1, le=MAX_BATCH_ROWS)
    """Evaluation microbatch size in rows; by default the training microbatch size."""
    samples: Samples = Samples()
    """Generation from held-out prompts."""
    metrics: tuple[FunctionPath, ...] = ()
    """Custom metrics, as `file.py:function`; each gets the arrays of all held-out rows."""

    def check(self, *tasks: Task) -> None:
        """Raise SettingsError if samples are requested and no task generates text."""
        if self.samples.prompts and not any(task.generative for task in tasks):
            kinds = "', '".join(task.kind for task in tasks)
            raise SettingsError(
                f"a model of task '{kinds}' generates no text", "leave evaluation.samples out"
            )


class Output(Settings):
    """The run's output folder, logs and checkpoints."""

    folder: str
    """The output folder; it belongs to one run."""
    trackers: tuple[Annotated[SerializeAsAny[Tracker], choice_of("trackers")], ...] = Field(
        default=("console", "jsonl"), validate_default=True
    )
    """Where metrics are sent."""
    log_every_steps: int = Field(default=10, ge=1)
    """Steps between training metric lines."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save checkpoints, and how many to keep."""
    final_model: Literal["auto", "last", "best"] = "auto"
    """Step for the final model: the last one, or the best one by `checkpoint.best_metric`. `auto`
    is `best` with `stop.patience`, else `last`."""

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.folder) / CHECKPOINTS


class Batch(Settings):
    """The global batch: the rows in one optimizer step, on any number of processes."""

    rows: int = Field(ge=1, le=MAX_BATCH_ROWS)
    """Global batch size in rows."""
    microbatch_rows: Annotated[int, Field(ge=1)] | Auto = AUTO
    """Rows that each process computes at a time (gradient accumulation). `auto` is the process's
    whole share for a small batch, else the fastest size that fits, measured once."""

    @model_validator(mode="after")
    def _check_divisibility(self) -> Batch:
        if self.microbatch_rows != "auto" and self.rows % self.microbatch_rows:
            size = min(self.microbatch_rows, self.rows)
            below = next(n for n in range(size, 0, -1) if self.rows % n == 0)
            above = next(n for n in range(size, self.rows + 1) if self.rows % n == 0)
            divisors = join_alternatives(dict.fromkeys((str(below), str(above))))
            raise ValueError(
                f"rows = {self.rows} is not divisible by microbatch_rows = {self.microbatch_rows}"
                f"; set batch.microbatch_rows to a divisor, such as {divisors}"
            )
        return self

    @property
    def microbatch(self) -> int:
        """Rows per microbatch; raises SettingsError if they are not resolved yet."""
        return _check_resolved(self.microbatch_rows, "batch.microbatch_rows")

    @property
    def microbatches(self) -> int:
        return self.rows // self.microbatch


class TaskConfig(NamedTuple):
    """A task with its dataset and batch."""

    name: str
    weight: int
    task: Task
    data: DataSettings
    batch: Batch


class Execution(Settings):
    """How the run is executed; these settings do not change the data order or the model."""

    processes: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1, union_mode="left_to_right"
    )
    """Processes on each machine; `auto` is one per healthy device, or one on a CPU."""
    threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads per process; by default the cores divided by the processes."""
    precision: Literal["auto", "bf16", "fp32", "tf32", "fp16", "fp8"] = "auto"
    """Compute dtype; master weights and moments are fp32. `fp8`: bf16 with fp8 linear layers."""
    compile: Literal["auto", "off", "blocks"] = "auto"
    """Compile the model's repeated blocks with torch.compile; `auto` does so if it saves time."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recomputation in the backward pass: none, all but matrix products, or whole blocks."""
    compile_cache: str | None = None
    """Folder of cached compiled graphs; graphs are code, so only you should have write access. By
    default `~/.cache/regauge/graphs`, once `regauge compile` has created it."""
    recompile_budget: int = Field(default=0, ge=0)
    """Graphs that may be compiled after the warm-up before the run fails."""
    timeout_seconds: int = Field(default=600, ge=1)
    """How long a process waits for other processes."""
    nodes: Nodes = Nodes()
    """Machines for a run on more than one machine."""
    supervision: Supervision = Supervision()
    """What to do after a failure."""
    price: Price = Price()
    """Price of the machines."""


class Target(Settings):
    """A held-out metric that ends the run when reached."""

    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "at_least": ("at_most",),
        "at_most": ("at_least",),
    }

    metric: str
    """Metric name in the trackers, such as `heldout/recall@10`."""
    at_least: float | None = None
    """Threshold for a metric that should be high."""
    at_most: float | None = None
    """Threshold for a metric that should be low."""

    @model_validator(mode="after")
    def _check_value(self) -> Target:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a target has one value; set either at_least or at_most")
        return self

    @property
    def threshold(self) -> float:
        """Metric value that ends the run."""
        return self.at_least if self.at_least is not None else self.at_most or 0.0

    def is_reached(self, values: Mapping[str, float]) -> bool:
        value = values.get(self.metric, math.nan)
        low, high = (value, self.threshold) if self.at_least is None else (self.threshold, value)
        return low <= high and math.isfinite(value)


class Stop(Settings):
    """When the run ends: its length, and limits that stop it earlier."""

    exclusive_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "steps": ("epochs",),
        "epochs": ("steps",),
    }

    steps: int | None = Field(default=None, ge=1)
    """Length in optimizer steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Length in passes over the training rows."""
    tokens: int | None = Field(default=None, ge=1)
    """Limit in real tokens (padding excluded); the run saves and stops."""
    seconds: float | None = Field(default=None, gt=0)
    """Limit in seconds over all attempts; the run saves and stops."""
    usd: float | None = Field(default=None, gt=0)
    """Limit in dollars over all attempts; the run saves and stops."""
    target: Target | None = None
    """Target metric that ends the run."""
    patience: int | None = Field(default=None, ge=1)
    """Early stopping: end the run after this many evaluations without an improvement in
    `output.checkpoint.best_metric`."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest metric change that counts as an improvement."""

    @model_validator(mode="after")
    def _check_length(self) -> Stop:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a run has one length; set either stop.steps or stop.epochs")
        if self.min_delta and self.patience is None:
            raise ValueError("min_delta has no effect without patience; set stop.patience")
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        return self.steps or max(1, round((self.epochs or 0) * steps_per_epoch))


class Computation(Settings):
    """What a run computes, independent of the device."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed for initial weights, row order, masks and dropout."""
    data: DataSettings
    """The prepared dataset."""
    task: Tasks
    """The task, or several named `[[task]]` tables with alternating steps."""
    model: Model
    """The architecture, or the pretrained weights."""
    batch: Batch
    """The global batch."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its hyperparameters."""
    stop: Stop
    """When the run ends."""
    evaluation: Evaluation = Evaluation()
    """Evaluation on held-out rows."""

    @property
    def task_configs(self) -> tuple[TaskConfig, ...]:
        if isinstance(self.task, Task):
            return (TaskConfig("", 1, self.task, self.data, self.batch),)
        is_only_task = len(self.task) == 1
        return tuple(
            self._task_config(entry, "" if is_only_task else entry.name) for entry in self.task
        )

    def find_next_command(self, run: str) -> str | None:
        """Return the command that uses the trained model of a run folder, if there is one."""
        commands = [config.task.find_next_command(run) for config in self.task_configs]
        return commands[0] if all(commands) else None

    def _task_config(self, entry: TaskEntry, name: str) -> TaskConfig:
        source = f"task {entry.name}"
        data = {**dump(self.data), **(dump(entry.data) if entry.data else {})}
        batch = {**dump(self.batch), **dump(entry.batch)}
        return TaskConfig(
            name,
            entry.weight,
            entry.task,
            build(DataSettings, data, source=source),
            build(Batch, batch, source=source),
        )

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        names = [config.name for config in self.task_configs]
        if not names:
            raise ValueError("a run needs a task; set task.kind")
        if duplicate := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two tasks are named '{duplicate}'; give one another name")
        if isinstance(self.task, tuple) and self.batch.microbatch_rows == "auto":
            raise ValueError(
                "batch.microbatch_rows = auto needs a single [task] table; set it to a number"
            )
        if len(names) > 1 and self.model.lora is not None:
            raise ValueError("LoRA adapters need a single task; leave model.lora out")
        return self

    @model_validator(mode="after")
    def _check_rows_and_evaluation(self) -> Self:
        for config in self.task_configs:
            config.task.check_global_batch(config.batch.rows)
        self.evaluation.check(*(config.task for config in self.task_configs))
        return self


class TrainSettings(Computation):
    """All settings of a training run."""

    output: Output
    """The run's output folder, logs and checkpoints."""
    accelerator: Annotated[SerializeAsAny[Accelerator], choice_of("accelerators")] | None = None
    """The device; by default this machine's best device."""
    strategy: Annotated[SerializeAsAny[Strategy], choice_of("strategies")] | None = None
    """The parallelism strategy; by default `single` or `ddp`."""
    execution: Execution = Execution()
    """How the run is executed."""
    callbacks: tuple[FunctionPath, ...] = ()
    """Custom callbacks as import paths, `module:Class`; see `regauge.Callback`."""
    profile: bool = False
    """Profile some steps: how their time breaks down, and advice to shorten them."""
    monitoring: Monitoring = Monitoring()
    """How to watch the run."""

    @property
    def has_best_final_model(self) -> bool:
        """Whether the final model is the best checkpoint instead of the last step."""
        choice = self.output.final_model
        return choice == "best" or (choice == "auto" and self.stop.patience is not None)

    @model_validator(mode="after")
    def _check_best_model(self) -> TrainSettings:
        key = "stop.patience" if self.stop.patience is not None else "output.final_model = best"
        if not self.has_best_final_model and self.stop.patience is None:
            return self
        if self.output.checkpoint.best_metric == "off":
            raise ValueError(f"{key} needs a metric; set output.checkpoint.best_metric")
        if self.stop.patience is not None and self.evaluation.every_steps == 0:
            raise ValueError(f"{key} needs evaluations; set evaluation.every_steps")
        return self

    @model_validator(mode="after")
    def _check_price_and_metrics(self) -> TrainSettings:
        has_metrics = any(tracker.kind == "jsonl" for tracker in self.output.trackers)
        if self.monitoring.port is not None and not has_metrics:
            raise ValueError('monitoring.port needs metrics; add "jsonl" to output.trackers')
        if self.stop.usd is not None and find_price(self.execution.price) is None:
            keys = "execution.price.usd_per_hour, or execution.price.instance"
            raise ValueError(f"stop.usd needs a price; set {keys}")
        return self
