"""The tables of a run file that training reads; nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from regauge.accelerators import Accelerator
from regauge.checkpoint.settings import Checkpoint
from regauge.config import Settings, build, choose, chosen, dump
from regauge.data.settings import Data, Part
from regauge.errors import SettingsError
from regauge.models.settings import Model
from regauge.planning.catalog import rate
from regauge.planning.settings import Price
from regauge.strategies import Strategy
from regauge.supervision.settings import Nodes, Supervision
from regauge.tasks import Task
from regauge.trackers import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping


Share = Annotated[float, Field(ge=0, lt=1)]


class Schedule(Settings):
    """The learning rate over the steps."""

    kind: Literal["constant", "linear", "cosine", "polynomial", "wsd"] = "linear"
    """Shape of the decay after the warm-up; wsd stays at the peak until its last steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that is left at the last step."""
    power: float = Field(default=2.0, gt=0)
    """Exponent of the polynomial decay."""
    decay_share: float = Field(default=0.1, gt=0, le=1)
    """Share of all steps, the last ones, in which wsd decays, linearly."""


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

    kind: Literal["adamw", "lamb", "sgd", "adafactor"] = "adamw"
    """The rule: torch's own, or LAMB (You et al., 2020), for large batches."""
    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """Decay of the first and second moment (adamw, lamb); the first is the momentum of sgd."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment (adamw, lamb)."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled decay of matrices; vectors (biases, norms) are not decayed."""
    shares: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Shares of the learning rate by how a weight's name begins, such as `{"model." = 0.1}`."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm."""
    schedule: Schedule = Schedule()
    """The learning rate over the steps."""
    guard: Guarding = Guarding()
    """What is kept out of the weights."""


class OwnData(Settings):
    """The dataset of one of several tasks."""

    path: str
    """Folder of the dataset; its tokenizer is that of the others."""
    mix: tuple[Part, ...] = ()
    """Datasets that are mixed in."""


class OwnBatch(Settings):
    """The unit of training of one of several tasks; by default that of the run."""

    rows: int | None = Field(default=None, ge=1)
    """Rows of a global batch."""
    microbatch_rows: int | None = Field(default=None, ge=1)
    """Rows that a process computes at a time."""


class Entry(Settings):
    """One of several tasks of a run, `[[task]]`: its keys, and these beside them."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]*$")
    """Word for it in the names of metrics and folders."""
    weight: int = Field(default=1, ge=1, le=1000)
    """How many of the steps it gets for each one that a task of weight 1 gets."""
    data: OwnData | None = None
    """Its dataset, where that is another than the run's."""
    batch: OwnBatch = OwnBatch()
    """What its steps see, where that is not the run's batch."""
    task: Annotated[SerializeAsAny[Task], chosen("tasks")]
    """The objective; its keys stand in the table itself."""

    @model_serializer(mode="wrap")
    def _in_one_table(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        own = handler(self)
        return {**own.pop("task"), **own}


def _one_or_several(value: Any) -> Any:
    if not isinstance(value, tuple | list):
        return choose("tasks", value)
    return tuple(_entry(each, number) for number, each in enumerate(value, start=1))


def _entry(value: Any, number: int) -> Any:
    """Return one of several tasks; its keys stand beside those of the objective."""
    if not isinstance(value, dict):
        return value
    own = {key: item for key, item in value.items() if key in Entry.model_fields}
    rest = {key: item for key, item in value.items() if key not in own}
    return build(Entry, {"task": rest, **own}, where=f"task {value.get('name', number)}")


One = Annotated[SerializeAsAny[Task], chosen("tasks")]
Tasks = Annotated[One | tuple[Entry, ...], BeforeValidator(_one_or_several)]
"""One task, or several that take turns."""


class Samples(Settings):
    """Texts that the model goes on with at each evaluation, greedily: `samples.jsonl`."""

    prompts: int = Field(default=0, ge=0)
    """Held-out prompts; each token of the answers costs the computation of a whole microbatch."""
    most_tokens: int = Field(default=64, ge=1)
    """Tokens of the longest answer."""
    prompt_tokens: int = Field(default=16, ge=1)
    """Tokens of a document that are a prompt; a conversation says itself what is asked."""


class Evaluation(Settings):
    """The measurement on held-out rows, in the loop and after it."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between two evaluations; 0 evaluates at the end alone."""
    rows: int | None = Field(default=None, ge=1)
    """Held-out rows that are used, a keyed sample of the split; all by default."""
    microbatch_rows: int | None = Field(default=None, ge=1)
    """Rows at a time; by default those of training."""
    samples: Samples = Samples()
    """Texts that the model goes on with."""

    def check(self, *tasks: Task) -> None:
        """Raise SettingsError for tasks that cannot be evaluated so."""
        if self.samples.prompts and not any(task.writes for task in tasks):
            kinds = "', '".join(task.kind for task in tasks)
            raise SettingsError(
                f"a model of task '{kinds}' writes no text", "leave evaluation.samples out"
            )


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


class TaskConfig(NamedTuple):
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
    def task_configs(self) -> tuple[TaskConfig, ...]:
        """The tasks of the run, each with its rows and its batch."""
        if isinstance(self.task, Task):
            return (TaskConfig("", 1, self.task, self.data, self.batch),)
        alone = len(self.task) == 1
        return tuple(
            TaskConfig(
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
        names = [aim.name for aim in self.task_configs]
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
        for aim in self.task_configs:
            aim.task.check_rows(aim.batch.rows)
        self.evaluation.check(*(aim.task for aim in self.task_configs))
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
