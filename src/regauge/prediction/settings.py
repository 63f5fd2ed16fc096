"""The tables of a run file that `predict` reads; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, field_validator

from regauge.artifacts.output_settings import Written
from regauge.config import Settings, chosen
from regauge.data.sources import Source
from regauge.planning.settings import Price
from regauge.prediction.executors import Executor


class Predict(Settings):
    """What is asked of each record."""

    texts: tuple[str, ...] = ()
    """Fields with its texts; by default those of the artifact, `text`, or the only one."""
    prompt: str | None = None
    """Name of the artifact's prompt that stands before each text."""
    invariant: bool = True
    """Whether a text's answer has the same bits whatever is computed beside it."""
    rows: int = Field(default=32768, ge=1)
    """Most records of a shard, the unit that is computed, committed and tried again."""
    index: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto", union_mode="left_to_right"
    )
    """Which of several equal jobs this is; `auto` asks an array of Slurm or an indexed Job."""
    count: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", union_mode="left_to_right"
    )
    """How many jobs share the folder; a Kubernetes Job does not tell it."""
    max_usd: float | None = Field(default=None, gt=0)
    """Dollars after which no shard is begun; a later command with more goes on."""


class Working(Settings):
    """Who computes it; none of it changes what is computed."""

    price: Price | None = None
    """What an hour of a machine costs."""
    executor: Annotated[SerializeAsAny[Executor], chosen("prediction/executors")] = Field(
        default="local", validate_default=True
    )
    """Processes of this machine, or of a cluster."""
    workers: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", union_mode="left_to_right"
    )
    """Processes, each with a device or with the artifact's threads; by default all there is."""
    attempts: int = Field(default=3, ge=1)
    """How often a shard may end the process that computes it."""
    hang_seconds: float = Field(default=600, gt=0)
    """How long a process may say nothing before it is taken for lost."""


class Predicting(Settings):
    """Everything about answers to files."""

    artifact: str
    """Folder that `regauge export` wrote."""
    source: Annotated[SerializeAsAny[Source], chosen("data/sources")]
    """Records to be answered."""
    output: Written
    """Where the answers go, and what they consist of."""
    predict: Predict = Predict()
    """What is asked of each record."""
    execution: Working = Working()
    """Who computes it."""

    @field_validator("source")
    @classmethod
    def _answers_all(cls, source: Source) -> Source:
        """Refuse to leave copies out where that was asked for, and else leave none out."""
        if source.duplicates == "drop" and "duplicates" in source.model_fields_set:
            raise ValueError("every record has an answer: leave source.duplicates out")
        return source.model_copy(update={"duplicates": "keep"})
