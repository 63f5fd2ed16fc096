"""Report rendering to HTML, Markdown or JSON, and the report file."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from regauge import __version__
from regauge.config import FORMAT
from regauge.evaluation.report import benchmarks, drawing
from regauge.evaluation.report.comparison_section import LIMIT_NOTE
from regauge.run_folders import formatting
from regauge.system.errors import SettingsError
from regauge.system.files import format_json, write_atomic

if TYPE_CHECKING:
    from regauge.evaluation.report.charts import Chart
    from regauge.evaluation.report.page import Report
    from regauge.evaluation.report.settings import ReportOptions

TEMPLATE_FOLDER = Path(__file__).parent


def report_path(folder: str, settings: ReportOptions) -> Path:
    """Return a report's path in an output folder."""
    return Path(folder) / f"report.{settings.format}"


def write_report(path: Path, report: Report) -> None:
    """Write a report atomically, in the format of the file suffix.

    Raises SettingsError if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _render(report, path.suffix))
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}", "set another output.folder"
        ) from None


def _render(report: Report, suffix: str) -> str:
    if suffix == ".html":
        return render_html(report)
    return render_markdown(report) if suffix == ".md" else render_json(report)


def render_html(report: Report) -> str:
    """Return the report as one self-contained HTML page with charts."""
    css = drawing.CSS.read_text(encoding="utf-8")
    template = build_environment().get_template("report.html.j2")
    return template.render(
        report=report,
        draw=_draw,
        limit_note=LIMIT_NOTE,
        style=Markup(css),  # noqa: S704  (a file of this package)
        version=__version__,
    )


def _draw(chart: Chart, key: str, owner: str) -> Markup:
    """Return a chart's SVG, which is not escaped again: matplotlib escapes all text."""
    return Markup(drawing.draw(chart, key, owner))  # noqa: S704  (drawn by this package)


def render_markdown(report: Report) -> str:
    """Return the report as Markdown, without charts."""
    template = build_environment().get_template("report.md.j2")
    return template.render(report=report, limit_note=LIMIT_NOTE)


def render_json(report: Report) -> str:
    """Return the report as JSON, with every series from every run."""
    document = {"format": FORMAT, **_to_dict(report)}
    del document["comparison"], document["benchmarks"]  # their parts have keys of their own
    for kind in benchmarks.BUILDERS:
        sections = [section for section in report.benchmarks if section.document["kind"] == kind]
        document[f"{kind}_benchmarks"] = sections
    document["training_benchmarks"] = [
        {
            "title": section.title,
            "rows": section.tables[0].rows,
            "sentence": section.sentences[0],
            "document": section.document,
        }
        for section in document["training_benchmarks"]
    ]
    document["class_sections"] = report.class_sections
    if report.comparison:
        document["comparison_sections"] = report.comparison.sections
        document["cost_rows"] = report.comparison.cost_rows
        document["cost_sentences"] = report.comparison.cost_sentences
    return format_json(document, indent=2, default=_to_jsonable) + "\n"


def _to_jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _to_dict(value)
    return str(value) if isinstance(value, Path) else repr(value)


def _to_dict(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields by name, one level deep, without charts."""
    names = [field.name for field in fields(value) if field.name != "charts"]
    return {name: getattr(value, name) for name in names}


def build_environment() -> Environment:
    """Return the templates' Jinja environment; HTML is escaped automatically."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE_FOLDER),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "duration", "percent"):
        environment.filters[name] = getattr(formatting, name)
    environment.filters["cell"] = _format_cell
    return environment


def _format_cell(text: object) -> str:
    """Return text on one line, with pipes escaped, for a Markdown table cell."""
    return " ".join(str(text).split()).replace("|", r"\|")
