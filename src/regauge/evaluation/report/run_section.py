"""Report section on one run: state, figures, time, profile, settings and failures."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from regauge.config import flatten
from regauge.evaluation.report.charts import (
    NUM_LOOKS,
    Bar,
    Chart,
    Curve,
    chart_bars,
    chart_curves,
)
from regauge.evaluation.report.figures import (
    KeyFigure,
    TimeShare,
    build_reliability_figures,
    build_throughput_figures,
)
from regauge.evaluation.report.profile_section import ProfileSection, build_profile_section
from regauge.monitoring.trackers import is_train_metric
from regauge.run_folders.series import Series, smooth
from regauge.supervision.failures import POLICIES
from regauge.system.units import MEGA

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
        return build_charts(self.run)


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
        is_earlier = run.model_step is not None and run.model_step != run.step
        model = f"; the model is of step {run.model_step:,}" if is_earlier else ""
        return f"{run.outcome} at step {run.step:,}{model}"
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


def build_charts(run: RunFolder) -> list[Chart]:
    series = run.series
    return [
        *chart_curves("Loss", _loss_curves(series)),
        *_chart_heldout_metrics(series),
        *chart_curves(
            "Real tokens per second", _smoothed_curves(series, "train/tokens_per_second")
        ),
        *chart_curves("Learning rate", _plain_curve(series, "train/learning_rate")),
        *chart_curves("Gradient norm", _smoothed_curves(series, "train/grad_norm")),
        *chart_memory([run]),
    ]


def chart_memory(runs: Iterable[RunFolder]) -> list[Chart]:
    """Return a chart with one bar per run: rank 0 memory by content."""
    bars = []
    for run in runs:
        parts = dict(run.ledger.get("memory_bytes") or {})
        if not parts:
            continue
        peak = parts.pop("peak", None)
        rest = {} if peak is None else {"other": max(0, peak - sum(parts.values()))}
        pieces = {**parts, **rest}.items()
        bars.append(Bar(run.name, tuple((name, size / MEGA) for name, size in pieces)))
    return chart_bars("Memory of rank 0", bars, " MB")


def _loss_curves(series: dict[str, Series]) -> list[Curve]:
    heldout = [
        Curve(name.removesuffix("/loss"), points, "points")
        for name, points in series.items()
        if name.endswith("/loss") and not is_train_metric(name)
    ]
    by_task = [
        replace(_smoothed_curves(series, name)[-1], label=name.removesuffix("/loss"))
        for name in series
        if name.startswith("train.") and name.endswith("/loss")
    ]
    train = _smoothed_curves(series, "train/loss")
    labelled = [replace(curve, label=f"train, {curve.label}") for curve in train]
    return [*(by_task or labelled), *heldout]


def _chart_heldout_metrics(series: dict[str, Series]) -> list[Chart]:
    """Return charts of all held-out metrics except losses and counts.

    Metrics between -1 and 1 share charts, as many as there are looks; any other metric has its own
    chart.
    """
    bounded: list[Curve] = []
    unbounded: list[Curve] = []
    for name, points in series.items():
        if is_train_metric(name) or name.endswith(("/loss", "/items")):
            continue
        is_bounded = all(abs(value) <= 1 for _, value in points)
        (bounded if is_bounded else unbounded).append(Curve(name, points, "points"))
    groups = [bounded[start : start + NUM_LOOKS] for start in range(0, len(bounded), NUM_LOOKS)]
    charts: list[Chart] = []
    for number, group in enumerate([*groups, *([curve] for curve in unbounded)], start=1):
        title = "Held-out metrics" if number == 1 else f"Held-out metrics ({number})"
        charts += chart_curves(title, group)
    return charts


def _smoothed_curves(series: dict[str, Series], name: str) -> list[Curve]:
    points = series.get(name, ())
    if len(points) < 8:  # noqa: PLR2004  (too few to have noise)
        return _plain_curve(series, name)
    return [Curve("as logged", points, "raw"), Curve("smoothed", smooth(points), "mean")]


def _plain_curve(series: dict[str, Series], name: str) -> list[Curve]:
    return [Curve(name.rpartition("/")[2].replace("_", " "), series.get(name, ()), "mean")]
