"""One self-contained page: no script, no font, no image, and no request leaves the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from regauge import __version__
from regauge.reporting import curves, inference_charts, overlays, scaling
from regauge.reporting.drawing import Place
from regauge.reporting.templates import FOLDER, environment

if TYPE_CHECKING:
    from regauge.reporting.story import Story


def page(story: Story) -> str:
    """Return the report as HTML."""
    drawn = [
        curves.charts(chapter.run, f"chart-{place}") for place, chapter in enumerate(story.trained)
    ]
    scaled = [
        scaling.charts(each, Place(f"scaling-{number}", each.title))
        for number, each in enumerate(story.scalings)
    ]
    answered = [
        inference_charts.charts(each, Place(f"inference-{number}", each.title))
        for number, each in enumerate(story.inferences)
    ]
    together = overlays.charts(story.compared, "beside") if story.compared else ()
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
