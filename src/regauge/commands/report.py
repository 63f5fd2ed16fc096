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
from regauge.system.errors import SettingsError
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
    """Return the paths to read and write, and which runs do not exist yet."""
    runs = settings.report.runs or _plan_default_runs(settings)
    missing = [folder for folder in runs if not Path(folder).is_dir()]
    from regauge.evaluation.report.render import report_path

    path = report_path(settings.output.folder, settings.report)
    answer = {"report": str(path), "runs": list(runs)}
    return answer | ({"missing_runs": missing} if missing else {})


def run(settings: ReportSettings) -> dict[str, Any]:
    from regauge.evaluation.report import page
    from regauge.evaluation.report.render import report_path, write_report

    folders = [
        folder
        for name in settings.report.runs
        for folder in run_folder.find_run_folders(Path(name))
    ]
    folders = folders or list(_find_default_runs(settings))
    report = page.build_report(
        tuple(run_folder.read_run_folder(folder) for folder in folders),
        settings.report.title,
        compare_runs(settings.comparison) if settings.comparison else None,
    )
    path = report_path(settings.output.folder, settings.report)
    write_report(path, report)
    return {"report": str(path), "summary": " ".join(report.summary)}


def _plan_default_runs(settings: ReportSettings) -> tuple[str, ...]:
    try:
        return tuple(map(str, _find_default_runs(settings)))
    except SettingsError:
        return (settings.output.folder,)


def _find_default_runs(settings: ReportSettings) -> tuple[Path, ...]:
    folder = Path(settings.output.folder)
    parent = folder.absolute().parent
    stage_folders = run_folder.find_stage_folders(parent) if parent.is_dir() else ()
    is_run = folder.is_dir() and run_folder.is_run_folder(folder)
    return stage_folders if stage_folders and not is_run else run_folder.find_run_folders(folder)
