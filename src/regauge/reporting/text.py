"""The report without a page: Markdown to read, or one JSON document for machines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.config import FORMAT
from regauge.reporting.templates import environment

if TYPE_CHECKING:
    from regauge.reporting.story import Story


def markdown(story: Story) -> str:
    """Return the report as Markdown, without its curves."""
    template = environment().get_template("report.md.j2")
    return template.render(story=story)


def document(story: Story) -> str:
    """Return the report as JSON, with every series of every run."""
    return json.dumps({"format": FORMAT, **asdict(story)}, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> str:
    return str(value) if isinstance(value, Path) else repr(value)
