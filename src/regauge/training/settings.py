"""The tables of a run file that training reads; nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import Field, SerializeAsAny, model_validator

from regauge.accelerators import Accelerator
from regauge.config import Settings, build, chosen, dump
from regauge.data.settings import Data
from regauge.errors import SettingsError
from regauge.models.settings import Model
from regauge.planning.catalog import rate
from regauge.planning.settings import Price
from regauge.strategies import Strategy
from regauge.supervision.settings import Nodes, Supervision
from regauge.tasks import Task
from regauge.trackers import Tracker
from regauge.training.evaluation_settings import Evaluation
from regauge.training.optimizer_settings import Optimizer
from regauge.training.task_settings import Tasks

if TYPE_CHECKING:
    from collections.abc import Mapping


class Checkpoint(Settings):
    """When the run saves, and what it keeps."""

    every_steps: int = Field(default=500, ge=1)
    """Steps between two saves; the last step is always saved."""
    root: str | None = None
    """Object store that holds the checkpoints as well, such as `s3://bucket/run`."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    best: str | None = None
    """Held-out metric whose best checkpoint is kept as well, such as `heldout/recall@10`."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which end of the metric is the best."""
    writing: Literal["background", "blocking"] = "background"
    """Whether training goes on while a checkpoint is written."""


class Output(Settings):
    """What the run leaves behind."""

    folder: str
    """The output folder; one run owns it."""
    trackers: tuple[Annotated[SerializeAsAny[Tracker], chosen("trackers")], ...] = Field(
        default=("console", "jsonl"), validate_default=True
    )
    """Where metrics go."""
    every_steps: int = Field(default=10, ge=1)
    """Steps between two lines of training metrics."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run saves, and what it keeps."""


class Batch(Settings):
    """The unit of training: what one optimizer step sees, on any number of processes."""

    rows: int = Field(ge=1)
    """Rows of a global batch."""
    microbatch_rows: Annotated[int, Field(ge=1)] | Literal["auto"]
    """Rows that a process computes at a time; `auto` predicts a size, tries it and keeps it."""

    @model_validator(mode="after")
    def _divides(self) -> Batch:
        if self.microbatch_rows != "auto" and self.rows % self.microbatch_rows:
            size = min(self.microbatch_rows, self.rows)
            below = next(n for n in range(size, 0, -1) if self.rows % n == 0)
            above = next(n for n in range(size, self.rows + 1) if self.rows % n == 0)
            raise ValueError(
                f"rows = {self.rows} is not divisible by microbatch_rows = {self.microbatch_rows}"
                f"; nearest that divide: {below}, {above}"
            )
        return self

    @property
    def microbatch(self) -> int:
        """Rows of a microbatch, once that is decided."""
        if self.microbatch_rows == "auto":
            raise SettingsError("batch.microbatch_rows is not decided", "set it to a number")
        return self.microbatch_rows

    @property
    def microbatches(self) -> int:
        """Microbatches of one step, over all processes."""
        return self.rows // self.microbatch


class Aim(NamedTuple):
    """A task of a run, with what it trains on."""

    name: str
    """Empty where the run has one task."""
    weight: int
    task: Task
    data: Data
    batch: Batch


class Execution(Settings):
    """How the run is computed; none of it changes what is computed."""

    processes: int | Literal["auto"] = Field(default=1, union_mode="left_to_right")
    """Processes on each machine; `auto` takes one for each device that is fit, or one on a CPU."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each process; by default the cores shared among the processes."""
    precision: Literal["auto", "bf16", "fp32", "tf32", "fp16"] = "auto"
    """Type of the computation; master weights and moments are fp32 in all of them."""
    compile: Literal["auto", "no", "blocks"] = "auto"
    """Whether torch.compile takes the model's repeated blocks; `auto` where that saves time."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: nothing, all but matmuls, or whole blocks."""
    compile_cache: str | None = None
    """Folder where compiled graphs persist; graphs are code: name one that only you can write."""
    recompile_budget: int = Field(default=0, ge=0)
    """Graphs that may be compiled after the warm-up before the run fails."""
    timeout_seconds: int = Field(default=600, ge=1)
    """Longest wait of one process for the others."""
    nodes: Nodes = Nodes()
    """The machines of the run, where it has more than one."""
    supervision: Supervision = Supervision()
    """What follows when a process fails."""
    price: Price = Price()
    """What its machines cost."""


class Target(Settings):
    """A held-out metric that ends the run when it is reached."""

    metric: str
    """Name as the trackers show it, such as `heldout/recall@10`."""
    at_least: float | None = None
    """Reached from below."""
    at_most: float | None = None
    """Reached from above."""

    @model_validator(mode="after")
    def _has_a_value(self) -> Target:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a target has one value: set either at_least or at_most")
        return self

    @property
    def value(self) -> float:
        """The value that is to be reached."""
        return self.at_least if self.at_least is not None else self.at_most or 0.0

    def reached(self, values: Mapping[str, float]) -> bool:
        """Return whether an evaluation's values reach the target."""
        value = values.get(self.metric)
        if value is None:
            return False
        return value <= self.value if self.at_least is None else value >= self.value


class Stop(Settings):
    """When the run is over: at its length, or before it at a limit."""

    steps: int | None = Field(default=None, ge=1)
    """Length in optimizer steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Length in passes over the training rows."""
    tokens: int | None = Field(default=None, ge=1)
    """Real tokens after which it stops."""
    seconds: float | None = Field(default=None, gt=0)
    """Training seconds, over all attempts, after which it saves and stops."""
    usd: float | None = Field(default=None, gt=0)
    """Dollars, over all attempts, after which it saves and stops."""
    target: Target | None = None
    """A metric whose value ends the run."""

    @model_validator(mode="after")
    def _has_a_length(self) -> Stop:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a run has one length: set either stop.steps or stop.epochs")
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the length in optimizer steps."""
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or 0) * steps_per_epoch))


class Computation(Settings):
    """What a run computes, on any device."""

    seed: int = Field(default=0, ge=0)
    """Key of the initial weights, the order, the masks and the dropout."""
    data: Data
    """The prepared dataset."""
    task: Tasks
    """The objective, or several that take turns, each a `[[task]]` with a name."""
    model: Model
    """The architecture, or the weights to start from."""
    batch: Batch
    """What one step sees."""
    optimizer: Optimizer = Optimizer()
    """How gradients change the weights."""
    stop: Stop
    """When the run is over."""
    evaluation: Evaluation = Evaluation()
    """The measurement on held-out rows."""

    @property
    def aims(self) -> tuple[Aim, ...]:
        """The tasks of the run, each with its rows and its batch."""
        if isinstance(self.task, Task):
            return (Aim("", 1, self.task, self.data, self.batch),)
        alone = len(self.task) == 1
        return tuple(
            Aim(
                "" if alone else each.name,
                each.weight,
                each.task,
                build(
                    Data,
                    {**dump(self.data), **(dump(each.data) if each.data else {})},
                    where=f"task {each.name}",
                ),
                build(Batch, {**dump(self.batch), **dump(each.batch)}, where=f"task {each.name}"),
            )
            for each in self.task
        )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [aim.name for aim in self.aims]
        if not names:
            raise ValueError("a run has a task: set task.kind")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two tasks are named '{twice}'")
        if isinstance(self.task, tuple) and self.batch.microbatch_rows == "auto":
            raise ValueError("a size is found for a [task]: set batch.microbatch_rows to a number")
        if len(names) > 1 and self.model.lora is not None:
            raise ValueError("adapters are trained for one task at a time: leave model.lora out")
        return self

    @model_validator(mode="after")
    def _all_suits_the_task(self) -> Self:
        for aim in self.aims:
            aim.task.check_rows(aim.batch.rows)
        self.evaluation.check(*(aim.task for aim in self.aims))
        return self


class Training(Computation):
    """Everything about a training run."""

    output: Output
    """What the run leaves behind, and where."""
    accelerator: Annotated[SerializeAsAny[Accelerator], chosen("accelerators")] | None = None
    """The device; by default the fittest of this machine."""
    strategy: Annotated[SerializeAsAny[Strategy], chosen("strategies")] | None = None
    """How the model lies on the processes; by default `single` or `ddp`."""
    execution: Execution = Execution()
    """How the run is computed."""
    profile: bool = False
    """Whether some steps are looked at closely: where they go, and what to change first."""

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> Training:
        if self.stop.usd is not None and rate(self.execution.price) is None:
            ways = "execution.price.usd_per_hour, or execution.price.instance"
            raise ValueError(f"stop.usd needs a price: set {ways}")
        return self
