"""Run file tables for `evaluate`; this module does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from regauge.accelerators import Accelerator
from regauge.config import Settings, choice_of
from regauge.data.settings import DataSettings
from regauge.data.sources import Source
from regauge.tasks import Task
from regauge.training.settings import Evaluation, Execution, Output


class EvaluateOptions(Settings):
    """Additional rows and the table heading."""

    task_settings: Literal["given", "run"] = "given"
    """Which task evaluates a run: the one in this run file (`given`), or its own (`run`)."""
    source: Annotated[SerializeAsAny[Source], choice_of("data/sources")] | None = None
    """Records to evaluate instead of the held-out rows; they are prepared like the dataset."""
    untrained: bool = False
    """Adds a row for random weights with the first model's dimensions."""
    baselines: bool = True
    """Adds rows for the task's baselines, such as BM25 or the majority class."""
    training_data: str | None = None
    """Dataset whose training rows fit the baselines; default: `data.path`."""
    title: str = "Held-out rows"
    """Table heading."""


class EvaluateSettings(Settings):
    """All settings for evaluating saved models."""

    output: Output
    """The table's folder."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed for token masks and untrained weights."""
    data: DataSettings
    """The prepared dataset."""
    task: Annotated[SerializeAsAny[Task], choice_of("tasks")]
    """Task to compute metrics for."""
    accelerator: Annotated[SerializeAsAny[Accelerator], choice_of("accelerators")] | None = None
    """The accelerator; by default this machine's best one."""
    execution: Execution = Execution()
    """Processes, precision and compilation."""
    evaluation: Evaluation = Evaluation()
    """Held-out rows, and samples from generative models."""
    models: dict[str, str] = Field(min_length=1)
    """Name in the table -> run, transformers model or artifact folder."""
    evaluate: EvaluateOptions = EvaluateOptions()
    """Additional rows and the table heading."""
