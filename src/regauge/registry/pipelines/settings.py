"""Tables for a repeating pipeline, the gate, and the promotion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field, model_validator

from regauge.config import Settings
from regauge.tasks import Direction


class Repeat(Settings):
    """A pipeline that runs again on new data; each pass through the stages is a round."""

    increments: tuple[str, ...] = ()
    """Stages that read only `source.files` not read by a finished round."""
    deadline_hours: float | None = Field(default=None, gt=0)
    """Time limit per round in hours; a round projected to be late is reported early."""


class RegistryModel(Settings):
    """A model in a registry, and the stage whose version serves."""

    path: str
    """Registry folder or URL."""
    model: str
    """Model name."""
    stage: str = "production"
    """Stage whose version the servers use."""


class MetricBand(Settings):
    """Limits for one metric of the new model; at least one limit is needed."""

    max_loss: float | None = Field(default=None, ge=0)
    """Largest absolute loss compared with the serving model."""
    max_relative_loss: float | None = Field(default=None, ge=0)
    """Largest loss as a share of the serving model's value."""
    sigmas: float | None = Field(default=None, gt=0)
    """Certainty in standard errors, for means over rows from 0 to 1: the loss must be within the
    limit even at the lower bound. For F1 and correlations it is approximate. Without a limit, the
    new model must be better."""
    direction: Direction | None = None
    """Whether a low (`min`) or a high (`max`) value is better; default: as the task declares."""
    min_value: float | None = None
    """Lowest permitted value, also if no model serves yet."""
    max_value: float | None = None
    """Highest permitted value, also if no model serves yet."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if not self.model_dump(exclude_none=True, exclude={"direction"}):
            raise ValueError("a metric of the gate has no limit; set max_loss or min_value")
        return self

    @property
    def compares(self) -> bool:
        """Whether the new model is compared with the serving model."""
        return not (self.max_loss is self.max_relative_loss is self.sigmas is None)


class GateOptions(Settings):
    """Evaluation to check, and the limits."""

    evaluation: str
    """The new model's evaluation folder."""
    serving_evaluation: str | None = None
    """The serving model's evaluation folder; default: `evaluation`."""
    new: str = "new"
    """The new model's name in the evaluation."""
    serving: str = "serving"
    """The serving model's name in the evaluation."""
    metrics: Mapping[str, MetricBand] = Field(min_length=1)
    """Metric -> limits."""


class PromoteOptions(Settings):
    """Artifact to register and promote."""

    artifact: str
    """Artifact folder."""
    gate: str | None = None
    """Gate folder; the artifact must have passed this gate."""
    evaluation: str | None = None
    """Evaluation folder whose metrics the registry records."""


class StageOutput(Settings):
    """Output folder of a gate or a promotion."""

    folder: str
    """Record folder."""
