"""Where the templates of reports are, and the words for figures as their filters."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from regauge.reporting import words

FOLDER = Path(__file__).parent


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
        templates.filters[name] = getattr(words, name)
    templates.filters["cell"] = _cell
    return templates


def _cell(text: object) -> str:
    """Return text that keeps a Markdown table whole."""
    return " ".join(str(text).split()).replace("|", r"\|")
