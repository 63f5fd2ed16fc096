"""The tables of a run file that `evaluate` reads; this module imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from regauge.accelerators import Accelerator
from regauge.config import Settings, choice_of
from regauge.data.settings import DataSettings
from regauge.data.sources import Source
from regauge.tasks import Task
from regauge.training.settings import Evaluation, Execution, Output

DEFAULT_MICROBATCH_ROWS = 64


class EvaluateOptions(Settings):
    """Additional rows and the heading of the table."""

    task_settings: Literal["given", "run"] = "given"
    """Which task evaluates a run: the one in this run file (`given`), or its own (`run`)."""
    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")] | None = None
    """Records to evaluate instead of the held-out rows; they are prepared like the dataset."""
    untrained: bool = False
    """Adds a row for random weights with the dimensions of the first model."""
    baselines: bool = True
    """Adds rows for the baselines of the task, such as BM25, if it has any."""
    title: str = "Held-out rows"
    """Table heading."""


class EvaluateSettings(Settings):
    """All settings of an evaluation of saved models."""

    output: Output
    """The folder of the table."""
    seed: int = Field(default=0, ge=0)
    """Seed for token masks and untrained weights."""
    data: DataSettings
    """The prepared dataset."""
    task: Annotated[SerializeAsAny[Task], choice_of("tasks")]
    """The task whose metrics are computed."""
    accelerator: Annotated[SerializeAsAny[Accelerator], choice_of("accelerators")] | None = None
    """The accelerator; by default the best one of this machine."""
    execution: Execution = Execution()
    """Processes, precision and compilation."""
    evaluation: Evaluation = Evaluation()
    """The held-out rows, and samples of generative models."""
    models: dict[str, str] = Field(min_length=1)
    """Folders of runs, transformers models or artifacts, by their names in the table."""
    evaluate: EvaluateOptions = EvaluateOptions()
    """Additional rows and the heading of the table."""
