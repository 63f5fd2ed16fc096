"""Write a self-contained report about runs, with the results first.

For example:

    $ regauge report run.toml --format html
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import commands, config
from regauge.evaluation.compare.compare import compare_runs
from regauge.evaluation.compare.settings import Comparison
from regauge.evaluation.report.settings import ReportOptions
from regauge.run_folders import run_folder
from regauge.training.settings import Output


class ReportSettings(config.Settings):
    """Runs in a report, and the report folder."""

    output: Output
    """Report folder."""
    report: ReportOptions = ReportOptions()
    """Runs, format and title."""
    comparison: Comparison | None = None
    """Runs compared in the report; default: none."""


ROOT = ReportSettings

RunFile = Annotated[Path, Parameter(help="Run file, or a run's or pipeline's output folder.")]
OUTPUT = "output.folder"
EARLIER_STAGES = "report.runs"


def main(
    run_file: RunFile,
    *overrides: commands.Override,
    form: Annotated[
        Literal["html", "md", "json"] | None,
        Parameter(name="--format", help="Report format."),
    ] = None,
    dry_run: commands.DryRun = False,
    json: commands.AsJson = False,
) -> dict[str, Any]:
    """Write a report about the runs in a run file or a folder.

    For example:

        >>> regauge.report("run.toml", form="html")
    """
    assignments = () if form is None else (f"report.format={form}",)
    settings = load(Path(run_file), (*overrides, *assignments))
    if dry_run:
        return commands.show(plan(settings), as_json=json)
    return commands.show(run(settings), as_json=json)


def load(run_file: Path, overrides: tuple[str, ...]) -> ReportSettings:
    """Build the settings from a run file, or from a folder, which also gets the report."""
    if not run_file.is_dir():
        return commands.load_settings(ROOT, run_file, overrides)
    tables = config.apply_overrides({"output": {"folder": str(run_file)}}, overrides)
    if not tables.get("report", {}).get("runs"):
        tables = config.merge(tables, {"report": {"runs": (str(run_file),)}})
    return config.build(ROOT, tables, commands.table_names(), str(run_file))


def plan(settings: ReportSettings) -> dict[str, Any]:
    """Return the paths to read and write; raises SettingsError if a run does not exist yet."""
    from regauge.evaluation.report.render import report_path

    path = report_path(settings.output.folder, settings.report)
    return {"report": str(path), "runs": [str(folder) for folder in _find_runs(settings)]}


def run(settings: ReportSettings) -> dict[str, Any]:
    from regauge.evaluation.report import page
    from regauge.evaluation.report.render import report_path, write_report

    folders = _find_runs(settings)
    report = page.build_report(
        tuple(run_folder.read_run_folder(folder) for folder in folders),
        settings.report.title,
        compare_runs(settings.comparison) if settings.comparison else None,
    )
    path = report_path(settings.output.folder, settings.report)
    write_report(path, report)
    return {"report": str(path), "summary": " ".join(report.summary)}


def _find_runs(settings: ReportSettings) -> list[Path]:
    """Return the runs in order, without a pipeline's stages that leave nothing to report."""
    folders = [Path(name) for name in settings.report.runs or (settings.output.folder,)]
    reported = [folder for folder in folders if not run_folder.is_other_stage(folder)]
    return [run for folder in reported or folders for run in run_folder.find_run_folders(folder)]
