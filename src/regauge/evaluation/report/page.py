"""Content of a report: results first, then each run. No markup, no charts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regauge.config import flatten
from regauge.evaluation.compare import sentences
from regauge.evaluation.compare.compare import ComparisonResult
from regauge.evaluation.compare.verdict import heldout_metrics
from regauge.evaluation.report import benchmarks, comparison_section, run_charts
from regauge.evaluation.report.classes_section import ClassesSection, build_classes_sections
from regauge.evaluation.report.comparison_section import (
    ComparisonSection,
    Row,
    build_comparison_sections,
    build_cost_rows,
)
from regauge.evaluation.report.failures_section import FailureSection, build_failure_sections
from regauge.evaluation.report.figures import (
    KeyFigure,
    TimeShare,
    build_reliability_figures,
    build_throughput_figures,
)
from regauge.evaluation.report.profile_section import ProfileSection, build_profile_section
from regauge.run_folders import formatting
from regauge.run_folders.evaluation_table import EvaluationTable, build_table
from regauge.run_folders.run_folder import RunFolder

if TYPE_CHECKING:
    from regauge.evaluation.report.benchmark_section import BenchmarkSection
    from regauge.evaluation.report.charts import Chart

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
"""Accounts of the ledger, and the description of each in a report."""

Environment = tuple[tuple[str, str], ...]
"""(key, value) of a run's environment."""


@dataclass(frozen=True)
class RunSection:
    """The section of one run."""

    run: RunFolder
    description: str
    """Verb, task and dataset."""
    state: str
    """How the run ended, and at which step."""
    figures: tuple[KeyFigure, ...]
    """Goodput, tokens, throughput, padding, MFU and dollars, each with its formula or source."""
    time_breakdown: tuple[TimeShare, ...]
    profile: ProfileSection | None
    """Profile of a training step; None if the run was not profiled."""
    settings: tuple[str, ...]
    """Settings as `key.path=value`, the form that the command line takes."""
    environment: Environment
    failures: tuple[FailureSection, ...]
    """Failed attempts, oldest first."""

    @property
    def seconds(self) -> float | None:
        """Wall-clock seconds of the run over all attempts."""
        if not self.time_breakdown:
            return self.run.seconds
        return sum(account.seconds for account in self.time_breakdown)

    @property
    def charts(self) -> list[Chart]:
        """Training curves, and the memory by content."""
        return run_charts.build_charts(self.run)


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    title: str
    summary: tuple[str, ...]
    """The results in sentences, the most important first."""
    figures: tuple[KeyFigure, ...]
    """Key figures over all runs."""
    tables: tuple[EvaluationTable, ...]
    run_sections: tuple[RunSection, ...]
    benchmarks: tuple[BenchmarkSection, ...] = ()
    """Benchmarks of training, then of artifacts, then of servers."""
    comparison: ComparisonResult | None = None
    """Comparison with a baseline; None if no comparison was requested."""

    @property
    def class_sections(self) -> tuple[ClassesSection, ...]:
        """One section per model whose classes were evaluated."""
        return build_classes_sections(section.run for section in self.run_sections)

    @property
    def comparison_charts(self) -> list[Chart]:
        """Charts of all compared runs."""
        return comparison_section.build_charts(self.comparison) if self.comparison else []

    @property
    def comparison_sections(self) -> tuple[ComparisonSection, ...]:
        """One section per run that is compared with the baseline."""
        return build_comparison_sections(self.comparison) if self.comparison else ()

    @property
    def cost_rows(self) -> tuple[Row, ...]:
        """Cost of each compared run up to the target."""
        return build_cost_rows(self.comparison) if self.comparison else ()

    @property
    def cost_sentences(self) -> tuple[str, ...]:
        """The costs of the compared runs in sentences."""
        return sentences.describe_costs(self.comparison) if self.comparison else ()

    @property
    def training_sections(self) -> tuple[RunSection, ...]:
        """Sections of the runs with a ledger or metrics."""
        return tuple(
            section for section in self.run_sections if section.run.ledger or section.run.series
        )

    @property
    def environments(self) -> list[tuple[Environment, str]]:
        """Each environment once, with the names of the runs that used it."""
        names: dict[Environment, list[str]] = {}
        for section in self.run_sections:
            if section.environment:
                names.setdefault(section.environment, []).append(section.run.name)
        return [(environment, ", ".join(runs)) for environment, runs in names.items()]


def build_report(
    runs: tuple[RunFolder, ...],
    title: str | None = None,
    comparison: ComparisonResult | None = None,
) -> Report:
    """Return the report on runs in the given order, and on a comparison if there is one."""
    tables = tuple(build_table(run.evaluation) for run in runs if run.evaluation)
    run_sections = tuple(_build_run_section(run) for run in runs)
    benchmark_sections = benchmarks.build_sections(runs)
    return Report(
        title=title or _build_title(runs, comparison),
        summary=(
            *_describe_comparison(comparison),
            *_describe_results(tables, run_sections),
            *(sentence for section in benchmark_sections for sentence in section.summary),
        ),
        figures=_build_key_figures(tables, run_sections),
        tables=tables,
        run_sections=run_sections,
        benchmarks=benchmark_sections,
        comparison=comparison,
    )


def _describe_comparison(comparison: ComparisonResult | None) -> tuple[str, ...]:
    """Return the verdict on each compared run, and the cheapest run."""
    if comparison is None:
        return ()
    verdicts = [sentences.describe_parity(parity)[0] for parity in comparison.parities]
    return (*verdicts, *sentences.describe_cheapest(comparison))


def _build_title(runs: tuple[RunFolder, ...], comparison: ComparisonResult | None) -> str:
    """Return the names of the compared runs, the name of a single run, or the pipeline's name."""
    if comparison is not None and comparison.runs == runs:
        return " vs. ".join(run.name for run in runs)
    if len(runs) == 1:
        return runs[0].name
    parents = {run.folder.resolve().parent.name for run in runs}
    return parents.pop() if len(parents) == 1 else ", ".join(run.name for run in runs)


def _describe_results(
    tables: tuple[EvaluationTable, ...], run_sections: tuple[RunSection, ...]
) -> tuple[str, ...]:
    """Return the results, one sentence each; an unfinished run reports its progress."""
    lines = [sentence for table in tables for sentence in table.leader_sentences()]
    unfinished = [
        section
        for section in run_sections
        if section.run.step is not None and not section.run.outcome
    ]
    if not lines:
        lines = [line for section in run_sections for line in _describe_heldout(section.run)]
    lines += [f"{section.run.name}: {section.state}." for section in unfinished]
    for section in unfinished:
        lines += [f"{section.run.name}: {failure.sentence}" for failure in section.failures[-1:]]
    return tuple(lines)


def _describe_heldout(run: RunFolder) -> list[str]:
    """Return a sentence for each metric that changed, and one for all that did not."""
    changed, unchanged = [], []
    for name, series in heldout_metrics(run).items():
        (first_step, first), (last_step, last) = series[0], series[-1]
        if len(series) > 1 and formatting.number(first) != formatting.number(last):
            interval = f"between steps {first_step} and {last_step}"
            change = formatting.change(first, last)
            changed.append(f"{run.name}: {name} changed {change} {interval}.")
        elif len(series) > 1:
            unchanged.append(f"{name} {formatting.number(last)}")
    return [*changed, *([f"{run.name}: unchanged: {', '.join(unchanged)}."] if unchanged else [])]


def _build_key_figures(
    tables: tuple[EvaluationTable, ...], run_sections: tuple[RunSection, ...]
) -> tuple[KeyFigure, ...]:
    """Return the figures at the top: best values, then time, tokens and dollars."""
    best = [
        KeyFigure(f"best {metric}", formatting.number(value), name)
        for table in tables[-1:]
        for metric, name, value in table.best_rows()[:2]
    ]
    seconds = [section.seconds for section in run_sections if section.seconds is not None]
    ledgers = [section.run.ledger for section in run_sections if section.run.ledger]
    totals = [KeyFigure("wall-clock time", formatting.duration(sum(seconds)))] if seconds else []
    if ledgers:
        tokens = sum(ledger.get("tokens") or 0 for ledger in ledgers)
        totals.append(
            KeyFigure("real tokens trained on", formatting.count(tokens), "without padding")
        )
        totals.append(_build_cost_figure(run_sections))
    return (*best, *totals)


def _build_cost_figure(run_sections: tuple[RunSection, ...]) -> KeyFigure:
    costs: list[tuple[str, float | None]] = [
        (section.run.name, section.run.ledger.get("usd"))
        for section in run_sections
        if section.run.ledger
    ]
    unpriced = [name for name, usd in costs if usd is None]
    if unpriced:
        return KeyFigure("cost", formatting.UNKNOWN, f"no price is set for {', '.join(unpriced)}")
    total = sum(usd for _, usd in costs if usd is not None)
    return KeyFigure("cost", formatting.dollars(total), "over all attempts")


def _build_run_section(run: RunFolder) -> RunSection:
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
        failures=build_failure_sections(run),
    )


def _describe_run(run: RunFolder) -> str:
    """Return the verb, the tasks and the size of the dataset, as far as the folder has them."""
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
