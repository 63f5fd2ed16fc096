"""Rendering of a report to HTML, Markdown or JSON, and the file that holds it."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from regauge import __version__
from regauge.config import FORMAT
from regauge.evaluation.report import (
    classes_section,
    comparison_charts,
    inference_charts,
    run_charts,
    scaling_section,
    serving_section,
)
from regauge.evaluation.report.comparison_section import LIMIT_NOTE
from regauge.evaluation.report.drawing import ChartContext
from regauge.run_folders import formatting
from regauge.system.errors import SettingsError
from regauge.system.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from regauge.evaluation.report.classes_section import ClassesSection
    from regauge.evaluation.report.drawing import Chart
    from regauge.evaluation.report.page import Report
    from regauge.evaluation.report.settings import ReportOptions

TEMPLATE_FOLDER = Path(__file__).parent


def report_path(folder: str, settings: ReportOptions) -> Path:
    """Return the path of a report in an output folder."""
    return Path(folder) / f"report.{settings.format}"


def write_report(path: Path, report: Report) -> None:
    """Write a report atomically, in the format of the file's suffix.

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
    """Return the report as one self-contained HTML page with its charts."""
    run_charts_by_section = [
        _mark_safe(run_charts.build_charts(section.run, f"chart-{index}"))
        for index, section in enumerate(report.training_sections)
    ]
    class_sections = _build_class_sections(report)
    class_charts = [
        _mark_safe(
            classes_section.build_charts(section, ChartContext(f"classes-{index}", section.title))
        )
        for index, section in enumerate(class_sections)
    ]
    scaling_charts = [
        _mark_safe(
            scaling_section.build_charts(scaling, ChartContext(f"scaling-{index}", scaling.title))
        )
        for index, scaling in enumerate(report.training_benchmarks)
    ]
    latency_charts = [
        _mark_safe(
            inference_charts.build_charts(
                inference, ChartContext(f"inference-{index}", inference.title)
            )
        )
        for index, inference in enumerate(report.inference_benchmarks)
    ]
    serving_charts = [
        _mark_safe(
            serving_section.build_charts(serving, ChartContext(f"serving-{index}", serving.title))
        )
        for index, serving in enumerate(report.serving_benchmarks)
    ]
    compared: tuple[Chart, ...] = ()
    if report.comparison:
        compared = comparison_charts.build_charts(report.comparison, "comparison")
    css = (TEMPLATE_FOLDER / "report.css").read_text(encoding="utf-8")
    template = build_environment().get_template("report.html.j2")
    return template.render(
        report=report,
        run_charts=run_charts_by_section,
        class_sections=class_sections,
        class_charts=class_charts,
        scaling_charts=scaling_charts,
        inference_charts=latency_charts,
        serving_charts=serving_charts,
        comparison_charts=_mark_safe(compared),
        limit_note=LIMIT_NOTE,
        style=Markup(css),  # noqa: S704  (a file of this package)
        version=__version__,
    )


def _build_class_sections(report: Report) -> tuple[ClassesSection, ...]:
    runs = (section.run for section in report.run_sections)
    return classes_section.build_classes_sections(runs)


def _mark_safe(charts: Iterable[Chart]) -> list[tuple[Chart, Markup]]:
    """Return charts with their SVG, which is not escaped again: matplotlib escapes all text."""
    return [(chart, Markup(chart.svg)) for chart in charts]  # noqa: S704  (drawn by this package)


def render_markdown(report: Report) -> str:
    """Return the report as Markdown, without charts."""
    template = build_environment().get_template("report.md.j2")
    sections = _build_class_sections(report)
    return template.render(report=report, class_sections=sections, limit_note=LIMIT_NOTE)


def render_json(report: Report) -> str:
    """Return the report as JSON, with every series of every run."""
    sections = _build_class_sections(report)
    document = {"format": FORMAT, **_to_dict(report), "class_sections": sections}
    del document["comparison"]  # its runs are run sections, or would be written twice
    if report.comparison:
        document["comparison_sections"] = report.comparison_sections
        document["cost_rows"] = report.cost_rows
        document["cost_sentences"] = report.cost_sentences
    return json.dumps(document, indent=2, default=_to_jsonable) + "\n"


def _to_jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _to_dict(value)
    return str(value) if isinstance(value, Path) else repr(value)


def _to_dict(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, one level deep."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def build_environment() -> Environment:
    """Return the Jinja environment of the templates; HTML is escaped automatically."""
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
    """Return text on one line, with pipes escaped, for a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", r"\|")
