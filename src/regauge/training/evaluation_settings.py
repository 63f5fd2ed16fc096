"""The tables of a run file that say what is measured on held-out rows; no torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from regauge.config import Settings
from regauge.errors import SettingsError

if TYPE_CHECKING:
    from regauge.tasks import Task


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
