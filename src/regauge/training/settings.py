"""The tables of a run file that training reads; nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, SerializeAsAny, model_validator

from regauge.accelerators import Accelerator
from regauge.config import Settings, chosen
from regauge.data.settings import Data
from regauge.models.settings import Model
from regauge.planning.catalog import rate
from regauge.planning.settings import Price
from regauge.strategies import Strategy
from regauge.supervision.settings import Nodes, Supervision
from regauge.tasks import Task
from regauge.trackers import Tracker

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
    microbatch_rows: int = Field(ge=1)
    """Rows that a process computes at a time; the global batch is cut into pieces of this size."""

    @model_validator(mode="after")
    def _divides(self) -> Batch:
        if self.rows % self.microbatch_rows:
            size = min(self.microbatch_rows, self.rows)
            below = next(n for n in range(size, 0, -1) if self.rows % n == 0)
            above = next(n for n in range(size, self.rows + 1) if self.rows % n == 0)
            raise ValueError(
                f"rows = {self.rows} is not divisible by microbatch_rows = {self.microbatch_rows}"
                f"; nearest that divide: {below}, {above}"
            )
        return self

    @property
    def microbatches(self) -> int:
        """Microbatches of one step, over all processes."""
        return self.rows // self.microbatch_rows


class Schedule(Settings):
    """The learning rate over the steps."""

    kind: Literal["constant", "linear", "cosine", "polynomial"] = "linear"
    """Shape of the decay after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that is left at the last step."""
    power: float = Field(default=2.0, gt=0)
    """Exponent of the polynomial decay."""


class Guarding(Settings):
    """What is kept out of the weights."""

    not_finite: Literal["skip", "roll-back", "stop"] = "skip"
    """What follows a step whose gradients are not finite; it never changes a weight."""
    spike: Literal["say", "skip", "roll-back", "stop"] = "say"
    """What follows a step whose loss or gradient norm is far above the usual."""
    deviations: float = Field(default=8.0, gt=0)
    """Standard deviations above its running mean at which a value is far above the usual."""
    skipped_in_a_row: int = Field(default=3, ge=1)
    """Steps in a row that may be skipped; then the run goes back to its last checkpoint, once."""
    check_every_steps: int = Field(default=500, ge=1)
    """Steps between two comparisons of the replicas' weights; each save compares them, too."""


class Optimizer(Settings):
    """How gradients change the weights."""

    kind: Literal["adamw", "sgd", "adafactor"] = "adamw"
    """The rule; each is torch's own."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of the first and second moment (adamw); the first is the momentum of sgd."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment (adamw)."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay of matrices; vectors (biases, norms) are not decayed."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    schedule: Schedule = Schedule()
    """The learning rate over the steps."""
    guard: Guarding = Guarding()
    """What is kept out of the weights."""


class Execution(Settings):
    """How the run is computed; none of it changes what is computed."""

    processes: int | Literal["auto"] = Field(default=1, union_mode="left_to_right")
    """Processes on each machine; `auto` takes one for each device that is fit, or one on a CPU."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each process; by default the cores shared among the processes."""
    precision: Literal["auto", "bf16", "fp32", "tf32", "fp16"] = "auto"
    """Type of the computation; master weights and moments are fp32 in all of them."""
    compile: Literal["no", "blocks"] = "no"
    """Whether torch.compile takes the model's repeated blocks."""
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


class Evaluation(Settings):
    """The measurement on held-out rows, in the loop and after it."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between two evaluations; 0 evaluates at the end alone."""
    rows: int | None = Field(default=None, ge=1)
    """Held-out rows that are used, a keyed sample of the split; all by default."""
    microbatch_rows: int | None = Field(default=None, ge=1)
    """Rows at a time; by default those of training."""


class Training(Settings):
    """Everything about a training run."""

    output: Output
    """What the run leaves behind, and where."""
    seed: int = Field(default=0, ge=0)
    """Key of the initial weights, the order, the masks and the dropout."""
    data: Data
    """The prepared dataset."""
    task: Annotated[SerializeAsAny[Task], chosen("tasks")]
    """The objective."""
    model: Model
    """The architecture, or the weights to start from."""
    accelerator: Annotated[SerializeAsAny[Accelerator], chosen("accelerators")] | None = None
    """The device; by default the fittest of this machine."""
    strategy: Annotated[SerializeAsAny[Strategy], chosen("strategies")] | None = None
    """How the model lies on the processes; by default `single` or `ddp`."""
    batch: Batch
    """What one step sees."""
    optimizer: Optimizer = Optimizer()
    """How gradients change the weights."""
    execution: Execution = Execution()
    """How the run is computed."""
    stop: Stop
    """When the run is over."""
    evaluation: Evaluation = Evaluation()
    """The measurement on held-out rows."""

    @model_validator(mode="after")
    def _batch_suits_the_task(self) -> Training:
        self.task.check_rows(self.batch.rows)
        return self

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> Training:
        if self.stop.usd is not None and rate(self.execution.price) is None:
            ways = "execution.price.usd_per_hour, or execution.price.instance"
            raise ValueError(f"stop.usd needs a price: set {ways}")
        return self


class Subjects(Settings):
    """What is measured, row by row."""

    models: dict[str, str] = Field(min_length=1)
    """Name of each row, and the folder of a run or of a transformers model."""
    untrained: Literal["no", "yes"] = "no"
    """Whether random weights of the first model's dimensions are a row as well."""
    rivals: Literal["no", "yes"] = "yes"
    """Whether other ways to answer the held-out rows are rows as well, where the task has any."""
    title: str = "Held-out rows"
    """Heading of the table."""


class Evaluating(Settings):
    """Everything about an evaluation of saved models."""

    output: Output
    """Where the table goes."""
    seed: int = Field(default=0, ge=0)
    """Key of the masks, and of random weights."""
    data: Data
    """The prepared dataset."""
    task: Annotated[SerializeAsAny[Task], chosen("tasks")]
    """The objective whose metrics are measured."""
    accelerator: Annotated[SerializeAsAny[Accelerator], chosen("accelerators")] | None = None
    """The device; by default the fittest of this machine."""
    execution: Execution = Execution()
    """How it is computed."""
    evaluation: Evaluation = Evaluation()
    """Which held-out rows are used."""
    subjects: Subjects
    """What is measured."""
