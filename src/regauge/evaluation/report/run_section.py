"""Report section on one run: state, figures, time, profile, settings and failures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.config import flatten
from regauge.evaluation.report import run_charts
from regauge.evaluation.report.figures import (
    KeyFigure,
    TimeShare,
    build_reliability_figures,
    build_throughput_figures,
)
from regauge.evaluation.report.profile_section import ProfileSection, build_profile_section
from regauge.supervision.failures import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from regauge.evaluation.report.charts import Chart
    from regauge.run_folders.documents import Document
    from regauge.run_folders.run_folder import RunFolder

ACCOUNT_DESCRIPTIONS = {
    "init": "starting processes, loading the model and the data",
    "compile": "compiling graphs",
    "data_wait": "waiting for the next batch",
    "step": "forward, backward and optimizer",
    "evaluate": "evaluation on held-out rows",
    "checkpoint": "training blocked by a save",
    "lost": "work of failed attempts that was repeated",
    "idle": "between attempts, or not recorded because of a kill",
}
"""Ledger account -> description."""

Environment = tuple[tuple[str, str], ...]
"""(key, value) pairs."""


@dataclass(frozen=True)
class FailureSection:
    """One failed attempt."""

    problem: str
    """Attempt number, last step, and failure."""
    consequence: str
    """The next attempt's resume point, or the recommended action; may be empty."""
    file: str
    """Failure document name."""
    evidence: Document
    """Failure document content: stacks, collectives, exit code, last log lines."""

    @property
    def sentence(self) -> str:
        """Problem and consequence in one sentence."""
        return f"{self.problem}{f'; {self.consequence}' if self.consequence else ''}."


@dataclass(frozen=True)
class RunSection:
    run: RunFolder
    description: str
    """Verb, task and dataset."""
    state: str
    """How the run ended, and at which step."""
    figures: tuple[KeyFigure, ...]
    """Goodput, tokens, throughput, padding, MFU and dollars, each with a formula or source."""
    time_breakdown: tuple[TimeShare, ...]
    profile: ProfileSection | None
    """Training step profile; None if the run was not profiled."""
    settings: tuple[str, ...]
    """Settings as `key.path=value`, the command line form."""
    environment: Environment
    failures: tuple[FailureSection, ...]
    """Failed attempts, oldest first."""

    @property
    def seconds(self) -> float | None:
        """Wall-clock seconds over all attempts."""
        if not self.time_breakdown:
            return self.run.seconds
        return sum(account.seconds for account in self.time_breakdown)

    @property
    def charts(self) -> list[Chart]:
        """Training curves, and memory by content."""
        return run_charts.build_charts(self.run)


def build_run_section(run: RunFolder) -> RunSection:
    throughput = build_throughput_figures(run.ledger) if run.ledger else ()
    seconds = run.goodput.seconds if run.goodput else run.ledger.get("seconds") or {}
    return RunSection(
        run=run,
        description=_describe_run(run),
        state=_describe_state(run),
        figures=(*build_reliability_figures(run), *throughput),
        time_breakdown=_build_time_shares(seconds),
        profile=build_profile_section(run.profile),
        settings=tuple(f"{key}={json.dumps(value)}" for key, value in flatten(run.settings)),
        environment=tuple((key, _format_value(value)) for key, value in flatten(run.environment)),
        failures=tuple(_build_failure_section(run, failure) for failure in run.failures),
    )


def _describe_run(run: RunFolder) -> str:
    """Return the verb, the tasks and the dataset size, as far as the folder contains them."""
    results = {
        "evaluation": run.evaluation,
        "benchmark": run.benchmark,
        "prepare": run.dataset,
        "train": run.series or run.ledger,
    }
    verb = run.verb or next((name for name, result in results.items() if result), "run")
    task = run.settings.get("task")
    tasks = [task, *task.values()] if isinstance(task, dict) else []
    kinds = [table.get("kind") for table in tasks if isinstance(table, dict)]
    task_kinds = " and ".join(kind for kind in kinds if isinstance(kind, str))
    splits = run.dataset.get("splits", {})
    counts = ", ".join(f"{split.get('rows', 0):,} {name}" for name, split in splits.items())
    return " ".join(filter(None, [verb, task_kinds, f"({counts} rows)" if counts else ""]))


def _describe_state(run: RunFolder) -> str:
    if run.step is None:
        has_result = run.outcome or run.evaluation or run.benchmark or run.dataset
        return "finished" if has_result else "not finished, no step logged"
    if run.outcome:
        return f"{run.outcome} at step {run.step:,}"
    length = run.settings.get("stop", {}).get("steps")
    of_length = f" of {length:,}" if isinstance(length, int) else ""
    return f"not finished, last logged step {run.step:,}{of_length}"


def _build_time_shares(seconds: Mapping[str, float]) -> tuple[TimeShare, ...]:
    total = sum(seconds.values())
    known = [name for name in ACCOUNT_DESCRIPTIONS if name in seconds]
    custom = [name for name in seconds if name not in ACCOUNT_DESCRIPTIONS]
    return tuple(
        TimeShare(
            name.replace("_", " "),
            ACCOUNT_DESCRIPTIONS.get(name, ""),
            seconds[name],
            seconds[name] / total if total else 0.0,
        )
        for name in (*known, *custom)
    )


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _build_failure_section(run: RunFolder, failure: Document) -> FailureSection:
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
