"""The tables of a run file that `evaluate` reads; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from regauge.accelerators import Accelerator
from regauge.config import Settings, chosen
from regauge.data.settings import Data
from regauge.tasks import Task
from regauge.training.settings import Evaluation, Execution, Output

EVALUATION = "evaluation.json"
DEFAULT_MICROBATCH_ROWS = 64


class Subjects(Settings):
    """What is measured, row by row."""

    models: dict[str, str] = Field(min_length=1)
    """Name of each row, and the folder of a run or of a transformers model."""
    tasks: Literal["given", "own"] = "given"
    """Whether each run is measured by the given task, or by its own settings of that kind."""
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
