"""Section of a report on failed attempts: problem, consequence and evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.supervision.failures import POLICIES

if TYPE_CHECKING:
    from regauge.run_folders.run_folder import Document, RunFolder


@dataclass(frozen=True)
class FailureSection:
    """One failed attempt."""

    problem: str
    """Number of the attempt, its last step, and the failure."""
    consequence: str
    """Resume point of the next attempt, or the recommended action; may be empty."""
    file: str
    """Name of the failure document."""
    evidence: Document
    """Content of the failure document: stacks, collectives, exit code, last log lines."""

    @property
    def sentence(self) -> str:
        """Problem and consequence in one sentence."""
        return f"{self.problem}{f'; {self.consequence}' if self.consequence else ''}."


def build_failure_sections(run: RunFolder) -> tuple[FailureSection, ...]:
    """Return one section per failed attempt, oldest first."""
    return tuple(_build_section(run, failure) for failure in run.failures)


def _build_section(run: RunFolder, failure: Document) -> FailureSection:
    number, step = failure.get("attempt"), failure.get("step")
    failed_number = number if isinstance(number, int) else len(run.attempts)
    later = (attempt for attempt in run.attempts if attempt.number > failed_number)
    policy = POLICIES.get(str(failure.get("kind")))
    consequence = policy.advice if policy else ""
    if next_attempt := next(later, None):
        step_before = max(0, next_attempt.first_step - 1)
        consequence = f"attempt {next_attempt.number} resumed from step {step_before}"
    return FailureSection(
        problem=f"attempt {number} ended after step {step}: {failure.get('problem')}",
        consequence=consequence,
        file=str(failure.get("file")),
        evidence={name: value for name, value in failure.items() if name != "file"},
    )
