"""Compare runs: quality within a tolerance, first divergence, and cost.

For example:

    $ regauge compare out/baseline out/candidate
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from regauge import commands, config
from regauge.config import Settings
from regauge.config.output_files import SAVED_RUN
from regauge.evaluation.compare import first_divergence
from regauge.evaluation.compare.compare import DivergenceSummary, compare_runs
from regauge.evaluation.compare.sentences import (
    build_cost_table,
    describe_costs,
    describe_parity,
    describe_unreached,
    suggest_remedy,
)
from regauge.evaluation.compare.settings import MIN_RUNS, Comparison
from regauge.evaluation.report.settings import ReportOptions
from regauge.system.errors import DifferenceError, InconclusiveError, SettingsError
from regauge.training.settings import Batch, Output, TrainSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from regauge.evaluation.compare.compare import ComparisonResult

OUTPUT = "output.folder"
REPEAT_SUFFIX = "-again"
"""Folder suffix for a repeated run."""


class CompareSettings(Settings):
    """Run comparison settings."""

    output: Output | None = None
    """Folder for a report about the runs; by default no report is written."""
    comparison: Comparison
    """Runs to compare."""
    report: ReportOptions = ReportOptions()
    """Report options."""


ROOT = CompareSettings


def main(
    run_file: Annotated[
        Path, Parameter(help="Baseline run or its run file, or a run file with [comparison].")
    ],
    *overrides: Annotated[
        str, Parameter(help="Candidate runs or their run files, and overrides as key.path=value.")
    ],
    noise_floor: Annotated[
        bool,
        Parameter(
            help="Re-run the baseline with a different reduction order to measure run-to-run noise."
        ),
    ] = False,
    localize: Annotated[
        bool,
        Parameter(help="Recompute the first divergent step and name the module that diverges."),
    ] = False,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Compare candidate runs with a baseline; run files are trained first.

    For example:

        >>> regauge.compare("out/baseline", "out/candidate")
    """
    settings, files = load((str(run_file), *overrides))
    if dry_run:
        to_train = [str(file) for file in files]
        return commands.show({**plan(settings), "run_files_to_train": to_train}, as_json=json)
    for file in files:
        _train(commands.load_settings(TrainSettings, file, ()))
    if noise_floor:
        repeat = build_repeat(Path(settings.comparison.runs[0]))
        _train(repeat)
        noise_runs = (*settings.comparison.noise_runs, repeat.output.folder)
        comparison = settings.comparison.model_copy(update={"noise_runs": noise_runs})
        settings = settings.model_copy(update={"comparison": comparison})
    result = _compare(settings)
    if localize:
        result = replace(result, divergences=tuple(_localize_divergences(result, settings)))
    answer = commands.show(_build_answer(result, settings), as_json=json)
    _raise_if_different(result, settings.comparison)
    return answer


def load(arguments: tuple[str, ...]) -> tuple[CompareSettings, tuple[Path, ...]]:
    """Build command line settings; also return the run files to train first."""
    paths = [Path(word) for word in arguments if "=" not in word or Path(word).exists()]
    overrides = tuple(word for word in arguments if "=" in word and not Path(word).exists())
    if len(paths) == 1 and paths[0].suffix in commands.RUN_FILE_SUFFIXES:
        return commands.load_settings(CompareSettings, paths[0], overrides), ()
    if len(paths) < MIN_RUNS:
        remedy = "name two or more runs: regauge compare out/a out/b"
        raise SettingsError("nothing to compare with", remedy)
    files = tuple(path for path in paths if path.suffix in commands.RUN_FILE_SUFFIXES)
    folders = [
        commands.load_settings(TrainSettings, path, ()).output.folder
        if path in files
        else str(path)
        for path in paths
    ]
    tables = config.apply_overrides(
        {"comparison": {"runs": tuple(folders)}}, overrides, CompareSettings
    )
    return config.build(CompareSettings, tables, commands.table_names(), "the command line"), files


def plan(settings: CompareSettings) -> dict[str, Any]:
    """Return the runs to compare, and which of them do not exist yet."""
    runs = settings.comparison.runs
    missing = [folder for folder in runs if not Path(folder).is_dir()]
    answer = {
        "baseline": runs[0],
        "candidates": list(runs[1:]),
        "tolerance": settings.comparison.tolerance,
    }
    return answer | ({"missing_runs": missing} if missing else {})


def run(settings: CompareSettings) -> dict[str, Any]:
    """Compare existing runs; return the verdicts.

    Raises DifferenceError or InconclusiveError if a candidate does not pass.
    """
    result = _compare(settings)
    answer = _build_answer(result, settings)
    _raise_if_different(result, settings.comparison)
    return answer


def build_repeat(folder: Path) -> TrainSettings:
    """Return settings that repeat a run with another microbatch size.

    Only the summation order of its gradients differs. Its folder is next to the run's.
    """
    path = folder / SAVED_RUN
    # Unlike `commands.load_settings`, this permits no custom code: the user did not write the file.
    tables = config.read_saved_run(folder)
    settings = config.build(TrainSettings, tables, commands.table_names(), str(path))
    sizes = [_find_other_microbatch(task_config.batch) for task_config in settings.task_configs]
    if not any(sizes):
        raise SettingsError(
            f"{folder} has batches of one row, so its reduction order cannot change",
            "name a repetition of it in comparison.noise_runs",
        )
    changed: dict[str, Any] = {}
    if isinstance(settings.task, tuple):
        changed["task"] = tuple(
            entry.model_copy(
                update={"batch": entry.batch.model_copy(update={"microbatch_rows": size})}
            )
            if size
            else entry
            for entry, size in zip(settings.task, sizes, strict=True)
        )
    else:
        changed["batch"] = settings.batch.model_copy(update={"microbatch_rows": sizes[0]})
    repeat_folder = folder.with_name(folder.name + REPEAT_SUFFIX)
    output = settings.output.model_copy(update={"folder": str(repeat_folder)})
    return settings.model_copy(update={**changed, "output": output})


def _find_other_microbatch(batch: Batch) -> int | None:
    """Return half or twice the microbatch size if it divides the batch; None if neither does."""
    size = batch.microbatch
    sizes = (size // 2, size * 2)
    return next((other for other in sizes if other and batch.rows % other == 0), None)


def _train(settings: TrainSettings) -> None:
    commands.import_verb("train").run(settings)


def _compare(settings: CompareSettings) -> ComparisonResult:
    return compare_runs(settings.comparison)


def _build_answer(result: ComparisonResult, settings: CompareSettings) -> dict[str, Any]:
    """Return the verdicts and the costs; write a report if an output folder is set."""
    answer: dict[str, Any] = {
        parity.candidate: {"verdict": parity.verdict, "summary": describe_parity(parity)}
        for parity in result.parities
    }
    for divergence in result.divergences:
        answer[divergence.run]["first_divergence"] = divergence.sentence
        answer[divergence.run]["divergence_rows"] = divergence.rows
    if result.target is not None:
        answer["cost_summary"] = describe_costs(result)
        answer["cost_to_target"] = build_cost_table(result)
    if settings.output is not None:
        from regauge.evaluation.report.page import build_report
        from regauge.evaluation.report.render import report_path, write_report

        path = report_path(settings.output.folder, settings.report)
        write_report(path, build_report(result.runs, settings.report.title, result))
        answer["report"] = str(path)
    return answer


def _localize_divergences(
    result: ComparisonResult, settings: CompareSettings
) -> Iterator[DivergenceSummary]:
    from regauge.commands._parts.localize import localize_divergence

    baseline, *candidates = result.runs
    folder = Path(settings.output.folder) if settings.output else baseline.folder
    float64 = settings.comparison.reference_precision == "fp64"
    for parity, candidate in zip(result.parities, candidates, strict=True):
        if parity.first_divergence is None or parity.blocking_differences:
            continue
        divergence = localize_divergence(
            (baseline.folder, candidate.folder),
            parity,
            folder / f"localize-{candidate.folder.name}",
            float64=float64,
        )
        sentence = first_divergence.describe_divergence(divergence)
        rows = first_divergence.build_value_table(divergence)
        yield DivergenceSummary(candidate.name, sentence, rows)


def _raise_if_different(result: ComparisonResult, comparison: Comparison) -> None:
    for parity in result.parities:
        problem = describe_parity(parity)[0].rstrip(".")
        if parity.verdict == "inconclusive":
            raise InconclusiveError(problem, suggest_remedy(parity))
        if parity.verdict == "fail" and comparison.on_difference == "fail":
            raise DifferenceError(problem, suggest_remedy(parity))
    if comparison.target is not None and (unreached := describe_unreached(result)):
        problem = unreached[0].rstrip(".")
        raise InconclusiveError(problem, "train longer, or set an easier comparison.target")
