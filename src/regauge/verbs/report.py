"""Report on runs as one self-contained page, with the results first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from regauge import config, verbs
from regauge.comparison.settings import Comparison
from regauge.reporting.settings import ReportSettings
from regauge.training.settings import Output


class Report(config.Settings):
    """Which runs are told, and where the report goes."""

    output: Output
    """The folder that the report is written to."""
    report: ReportSettings = ReportSettings()
    """What is told, and how."""
    comparison: Comparison | None = None
    """Runs that are told beside the first of them; none by default."""


ROOT = Report

RunFile = Annotated[
    Path, Parameter(help="a run file, or the output folder of a run or of a pipeline")
]
OUTPUT = "output.folder"


def main(
    run_file: RunFile,
    *overrides: verbs.Override,
    form: Annotated[
        Literal["html", "md", "json"] | None, Parameter(name="--format", help="of the report")
    ] = None,
    dry_run: verbs.DryRun = False,
    json: verbs.AsJson = False,
) -> dict[str, Any]:
    """Write report.html about the runs of a run file, or about a run's or a pipeline's folder."""
    asked = () if form is None else (f"report.format={form}",)
    settings = load(Path(run_file), (*overrides, *asked))
    return verbs.show(plan(settings) if dry_run else run(settings), as_json=json)


def load(run_file: Path, overrides: tuple[str, ...]) -> Report:
    """Return the settings of a run file; a folder is reported on in itself."""
    if not run_file.is_dir():
        return verbs.load(ROOT, run_file, overrides)
    tables = config.override({"output": {"folder": str(run_file)}}, overrides)
    if not tables.get("report", {}).get("runs"):
        tables = config.merge(tables, {"report": {"runs": (str(run_file),)}})
    return config.build(ROOT, tables, verbs.tables(), str(run_file))


def plan(settings: Report) -> dict[str, Any]:
    """Return what would be read and written; runs that do not exist yet are named."""
    runs = settings.report.runs or (settings.output.folder,)
    missing = [folder for folder in runs if not Path(folder).is_dir()]
    from regauge.reporting.render import path_of

    path = path_of(settings.output.folder, settings.report)
    answer = {"report": str(path), "runs": list(runs)}
    return answer | ({"not_there_yet": missing} if missing else {})


def run(settings: Report) -> dict[str, Any]:
    """Read the runs and write the report."""
    from regauge.comparison.compare import compared
    from regauge.reporting import page
    from regauge.reporting.render import path_of, write
    from regauge.results import run_folder

    folders = [
        folder for name in settings.report.runs for folder in run_folder.discover(Path(name))
    ]
    folders = folders or list(_default(settings))
    told = page.tell(
        tuple(run_folder.read(folder) for folder in folders),
        settings.report.title,
        compared(settings.comparison) if settings.comparison else None,
    )
    path = path_of(settings.output.folder, settings.report)
    write(path, told)
    return {"report": str(path), "verdict": " ".join(told.verdict)}


def _default(settings: Report) -> tuple[Path, ...]:
    """Return the runs in the output folder, or those beside it where a pipeline made it."""
    from regauge.results import run_folder

    folder = Path(settings.output.folder)
    beside = folder.absolute().parent
    found = run_folder.stages(beside) if beside.is_dir() else ()
    in_pipeline = found and not (folder.is_dir() and run_folder.holds_run(folder))
    return found if in_pipeline else run_folder.discover(folder)
