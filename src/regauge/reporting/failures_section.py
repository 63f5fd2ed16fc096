"""How the attempts of a run failed: what happened, what followed, and what shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.supervision.failures import POLICIES

if TYPE_CHECKING:
    from regauge.results.run_folder import Document, Run


@dataclass(frozen=True)
class Ending:
    """One attempt that failed."""

    what: str
    """Which attempt, after which step, and what was wrong."""
    then: str
    """Where the next attempt went on, or what may be done; may be empty."""
    file: str
    evidence: Document
    """All that was written down: stacks, collectives, exit code, last lines of the log."""

    @property
    def sentence(self) -> str:
        """What happened and what followed, in one line."""
        return f"{self.what}{f'; {self.then}' if self.then else ''}."


def endings(run: Run) -> tuple[Ending, ...]:
    """Return how attempts failed, oldest first."""
    return tuple(_ending(run, failure) for failure in run.failures)


def _ending(run: Run, failure: Document) -> Ending:
    number, step = failure.get("attempt"), failure.get("step")
    known = number if isinstance(number, int) else len(run.attempts)
    later = next((each for each in run.attempts if each.number > known), None)
    policy = POLICIES.get(str(failure.get("kind")))
    then = policy.advice if policy else ""
    if later:
        then = f"attempt {later.number} went on from step {max(0, later.first - 1)}"
    return Ending(
        what=f"attempt {number} ended after step {step}: {failure.get('problem')}",
        then=then,
        file=str(failure.get("file")),
        evidence={name: value for name, value in failure.items() if name != "file"},
    )
