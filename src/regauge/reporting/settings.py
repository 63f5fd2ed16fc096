"""The tables of a run file that `report` and `compare` read; nothing here draws."""

from __future__ import annotations

from typing import Literal

from regauge.config import Settings


class ReportSettings(Settings):
    """What is told, and how."""

    runs: tuple[str, ...] = ()
    """Output folders in the order of the story; by default those in or beside `output.folder`."""
    format: Literal["html", "md", "json"] = "html"
    """One self-contained page, Markdown, or a document for machines."""
    title: str | None = None
    """Headline; by default made of the names of the runs."""
