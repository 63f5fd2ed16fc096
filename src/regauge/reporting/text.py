"""The report without a page: Markdown to read, or one JSON document for machines."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
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
    told = {field.name: getattr(story, field.name) for field in fields(story)}
    del told["compared"]  # its runs are among the chapters, or would be told twice
    together = {"beside": story.beside, "accounts": story.accounts, "cost": story.cost}
    whole = {"format": FORMAT, **told, **(together if story.compared else {})}
    return json.dumps(whole, indent=2, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else repr(value)
