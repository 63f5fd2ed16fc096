"""A report as a file, in the form that is asked for."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from regauge import __version__
from regauge.config import FORMAT
from regauge.errors import SettingsError
from regauge.files import write_atomic
from regauge.reporting import (
    comparison_charts,
    inference_charts,
    run_charts,
    scaling_section,
)
from regauge.reporting.drawing import Place
from regauge.results import formatting

if TYPE_CHECKING:
    from regauge.reporting.page import Story
    from regauge.reporting.settings import ReportSettings

FOLDER = Path(__file__).parent


def path_of(folder: str, settings: ReportSettings) -> Path:
    """Return where a report goes."""
    return Path(folder) / f"report.{settings.format}"


def write(path: Path, story: Story) -> None:
    """Write the whole file or nothing, in the form of its suffix; no reader sees half a report."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _text(story, path.suffix))
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror}", "set another output.folder"
        ) from None


def _text(story: Story, suffix: str) -> str:
    if suffix == ".html":
        return page(story)
    return markdown(story) if suffix == ".md" else document(story)


def page(story: Story) -> str:
    """Return the report as HTML."""
    drawn = [
        run_charts.charts(chapter.run, f"chart-{place}")
        for place, chapter in enumerate(story.trained)
    ]
    scaled = [
        scaling_section.charts(each, Place(f"scaling-{number}", each.title))
        for number, each in enumerate(story.scalings)
    ]
    answered = [
        inference_charts.charts(each, Place(f"inference-{number}", each.title))
        for number, each in enumerate(story.inferences)
    ]
    together = comparison_charts.charts(story.compared, "beside") if story.compared else ()
    template = environment().get_template("report.html.j2")
    return template.render(
        story=story,
        # What is marked as safe is ours: matplotlib escapes the names that it draws.
        charts=[[(chart, Markup(chart.svg)) for chart in each] for each in drawn],  # noqa: S704
        together=[(chart, Markup(chart.svg)) for chart in together],  # noqa: S704
        scaled=[[(chart, Markup(chart.svg)) for chart in each] for each in scaled],  # noqa: S704
        answered=[[(chart, Markup(chart.svg)) for chart in each] for each in answered],  # noqa: S704
        style=Markup((FOLDER / "report.css").read_text(encoding="utf-8")),  # noqa: S704
        version=__version__,
    )


def markdown(story: Story) -> str:
    """Return the report as Markdown, without its curves."""
    template = environment().get_template("report.md.j2")
    return template.render(story=story)


def document(story: Story) -> str:
    """Return the report as JSON, with every series of every run."""
    told = {field.name: getattr(story, field.name) for field in fields(story)}
    del told["compared"]  # its runs are among the chapters, or would be told twice
    together = {"beside": story.beside, "accounts": story.accounts, "cost": story.cost}
    whole = {"format": FORMAT, **told, **(together if story.compared else {})}
    return json.dumps(whole, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else repr(value)


def environment() -> Environment:
    """Return the templates' environment; what goes into HTML is escaped."""
    templates = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=select_autoescape(("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("number", "duration", "share"):
        templates.filters[name] = getattr(formatting, name)
    templates.filters["cell"] = _cell
    return templates


def _cell(text: object) -> str:
    """Return text that keeps a Markdown table whole."""
    return " ".join(str(text).split()).replace("|", r"\|")
